"""`dino-ds eval` on small folders: numbers, files, ranks, and input that can't be evaluated."""

from __future__ import annotations

import json

import pytest
import torch

from dino_ds.errors import CheckpointError, ConfigError, DataError
from dino_ds.evals.suite import EVALUATIONS, Labelled, Settings, draw_balanced
from dino_ds.tools.evaluate import run
from dino_ds.weights.export import FORMATS
from tests.ranks import run_on_ranks
from tests.training.harness import image_folder
from tests.weights.test_weights import _backbone

DEFAULTS = {"source": None, "size": None, "k": "1,5", "temperature": 0.07, "images": None, "workers": 0, "json": True}


@pytest.fixture
def place(tmp_path):
    """A teacher, 24 training and 9 test images in three classes."""
    FORMATS["safetensors"][0](_backbone(), tmp_path / "teacher.safetensors", {})
    image_folder(tmp_path / "train", 24, 3)
    image_folder(tmp_path / "test", 9, 3, seed=1)
    return tmp_path


def _run(place, evals="knn", **changes):
    files = {"model": str(place), "root": str(place / "train"), "test_root": str(place / "test")}
    run(**{**files, **DEFAULTS, "evals": evals, "out": str(place / "results.json"), **changes})


def _results(place):
    return json.loads((place / "results.json").read_text())


def test_every_evaluation_gives_numbers(place, capsys):
    _run(place, ",".join(EVALUATIONS))
    results = _results(place)
    names = {"knn_1", "knn_5", "linear", "ridge", "few_shot_1%", "few_shot_10%", "retrieval_map", "rankme"}
    assert names <= results.keys()
    assert json.loads(capsys.readouterr().out)["results"] == results
    _run(place, "knn")
    assert _results(place) == results  # what was not asked for again stays


def test_two_ranks_give_what_one_gives(place):
    _run(place)
    one = _results(place)
    (place / "results.json").unlink()
    run_on_ranks(_run, place)
    assert _results(place) == one


def test_bad_input_is_one_line(place):
    image_folder(place / "other", 8, 4)
    image_folder(place / "plain", 4)
    for changes, error, words in (
        ({"evals": "knm"}, ConfigError, "Did you mean knn"),
        ({"k": "0,3"}, ConfigError, "numbers of neighbours"),
        ({"model": None}, ConfigError, "give a run folder"),
        ({"model": str(place / "nothing")}, CheckpointError, "does not exist"),
        ({"test_root": str(place / "other")}, DataError, "1 classes of the test images are not in training: class3"),
        ({"root": str(place / "plain")}, DataError, "the training images have no classes"),
        ({"root": None}, DataError, "needs a folder"),
        ({"test_root": None}, DataError, "--test_root"),
    ):
        with pytest.raises(error, match=words):
            _run(place, **changes)


def test_fewer_images_than_neighbours_uses_all_there_are():
    rows = Labelled(torch.randn(6, 4), torch.arange(6) % 2, 2)
    assert list(EVALUATIONS["knn"](rows, rows, Settings(ks=(10, 20)))) == ["knn_6"]


def test_few_shot_images_are_drawn_by_class():
    labels = torch.tensor([0] * 50 + [1] * 10 + [2])
    drawn = draw_balanced(labels, 0.1, torch.Generator().manual_seed(0))
    assert torch.bincount(labels[drawn]).tolist() == [5, 1, 1]
    assert len(drawn.unique()) == len(drawn)

"""Evaluations and pictures in the middle of training: what they give, and that training does not notice."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dino_ds
from dino_ds.data.sources import build_source
from dino_ds.evals.album import Album
from dino_ds.evals.results import read_results
from dino_ds.evals.subject import Settings, Subject
from dino_ds.evals.suite import EVALUATIONS, evaluate
from dino_ds.evals.watch import Watch
from dino_ds.teacher import Teacher
from tests.ranks import run_on_ranks
from tests.training.harness import image_folder, log_of, losses_of, read_metrics, train_tiny, whole_tensors

FROM_FEATURES = ("knn", "linear", "ridge", "few-shot", "retrieval", "statistics")
K = 5


def _train(root, run, ds, changes):
    """Its message, what the generators give next, and how many images the teacher has described each time."""
    seen, original = [], Teacher.features
    Teacher.features = lambda self, images: (seen.append(len(images)), original(self, images))[1]
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    try:
        message = train_tiny(root, run, ds, changes={"length": "4 steps", "data.workers": "1", **changes})
    finally:
        Teacher.features = original
    return message, (float(torch.rand(1)), float(np.random.rand()), random.random()), sum(seen)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    image_folder(folder / "images", 24, 3), image_folder(folder / "test", 9, 3, seed=1)
    return folder


@pytest.fixture(scope="module", params=["zero0_fp32.json", "zero1_fp16.json", "zero2_bf16.json", "zero3_fp32.json"])
def runs(request, images):
    """(ds config, a run that evaluates and draws, one that does neither, what `_train` says of both)."""
    ds, root = request.param, images / "images"
    changes = {
        "eval.every": "2 steps",
        "eval.evals": ",".join(FROM_FEATURES),
        "eval.root": str(images / "test"),
        "eval.k": str(K),
        "eval.pictures_every": "2 steps",
    }
    with_, without = images / f"with_{ds}", images / f"without_{ds}"
    said = [run_on_ranks(_train, root, run, ds, how) for run, how in ((with_, changes), (without, {}))]
    return ds, with_, without, said


def test_training_does_not_notice(runs):
    """Losses and teacher to the last bit, and all generators of random numbers."""
    _, with_, without, said = runs
    for watched, alone in zip(*said, strict=True):
        assert watched[0] is None and alone[0] is None
        assert watched[1] == alone[1]
    assert losses_of(with_) == losses_of(without)
    ours, theirs = whole_tensors(with_, 4), whole_tensors(without, 4)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_features_are_computed_once_for_all_evaluations(runs):
    """24 training and 9 test images at steps 0, 2 and 4, each on one of the ranks."""
    watched, alone = runs[3]
    assert sum(seen for _, _, seen in watched) == 3 * (24 + 9) and sum(seen for _, _, seen in alone) == 0


def test_results_are_those_of_the_saved_teacher(runs, images):
    """What training writes is what `dino-ds eval` finds with the same settings on the run's file."""
    ds, run, _, _ = runs
    kept = read_results(run / "evaluations.json")
    assert list(kept) == list(FROM_FEATURES)
    sources = tuple(build_source("folder", str(images / part), "train", False) for part in ("images", "test"))
    subject = Subject(dino_ds.load(run), Settings(ks=(K,), workers=0), torch.device("cpu"), lambda: sources)
    for name, result in kept.items():
        assert (result["step"], result["images"], result["train_images"] or 24, result["test_images"]) == (4, 32, 24, 9)
        if "fp32" in ds:
            assert result["results"] == pytest.approx(evaluate(name, subject), rel=1e-3, abs=1e-3)


def test_metrics_and_tensorboard_have_them_under_clear_names(runs):
    _, run, _, _ = runs
    records = [r for r in read_metrics(run) if "knn_top1" in r]
    assert [r["step"] for r in records] == [0, 2, 4]
    kept = read_results(run / "evaluations.json")
    assert records[-1]["knn_top1"] == pytest.approx(kept["knn"]["results"][f"knn_{K}"])
    for name in FROM_FEATURES[1:]:
        for metric, value in kept[name]["results"].items():
            assert records[-1][f"eval/{metric}"] == pytest.approx(value)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert {"knn_top1", "eval/linear", "eval/rankme"} <= set(events.Tags()["scalars"])
    assert "linear   at step 2: linear " in log_of(run) and "k-NN     at step 2: raw pixels " in log_of(run)


def test_pictures_are_in_the_folder_and_in_tensorboard(runs):
    _, run, _, _ = runs
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name in ("attention", "pca"):
        assert [event.step for event in events.Images(name)] == [0, 2, 4]
        for step in (0, 2, 4):
            with Image.open(run / f"pictures/step_{step:08d}/{name}.png") as picture:
                assert min(picture.size) > 100


def test_names_of_the_recipe_are_those_of_the_table():
    from dino_ds import recipe

    assert tuple(EVALUATIONS) == recipe.EVALUATIONS


@pytest.fixture
def watch(images):
    return _watch(images)


def _watch(images, names=("knn", "linear"), k=K, limit=None):
    train, test = (build_source("folder", str(images / part), "train", False) for part in ("images", "test"))
    settings = Settings(ks=(k,), workers=0, images=limit)
    return Watch(names, 2, train, test, settings, 32)


class _Live:
    """In the place of LiveTeacher: two pixels are the features."""

    image_size, patch_size, width = 32, 8, 6

    def __init__(self, *_):
        pass

    def features(self, images):
        return images[:, :, 10, 10:12].flatten(1)


@pytest.fixture(autouse=True)
def live(monkeypatch):
    monkeypatch.setattr("dino_ds.evals.watch.LiveTeacher", _Live)


def _evaluate(watch, step, give_up=lambda: False):
    return watch.evaluate(None, step, 8 * step, torch.device("cpu"), give_up)


def test_whoever_gives_up_keeps_nothing(watch):
    """At any question: between the evaluations, or between the batches of one."""
    questions = []
    assert _evaluate(watch, 0, lambda: questions.append(1)) is not None
    for patience in range(len(questions)):
        asked, other = iter(range(100)), _watch(watch_folder(watch))
        assert _evaluate(other, 0, lambda: next(asked) == patience) is None
        assert other.latest is None and other.raw is None


def watch_folder(watch):
    """Where the images of `watch` lie."""
    from pathlib import Path

    return Path(watch._sources[0].name(0)).parents[2]


def test_what_fails_later_is_left_out_and_said_once(watch, monkeypatch):
    """Before the first step it is an error: nothing is lost yet."""
    from dino_ds.errors import DataError

    assert set(_evaluate(watch, 0)) == {"knn", "linear"}
    watch.lines({})

    def fail(_):
        raise DataError("the disk is gone")

    monkeypatch.setitem(EVALUATIONS, "linear", fail)
    found = _evaluate(watch, 2)
    assert set(found) == {"knn"}
    assert watch.lines(found)[0] == "evals    linear can't be evaluated at step 2: the disk is gone"
    with pytest.raises(DataError, match=r"eval\.evals linear: the disk is gone"):
        _evaluate(watch, 0)


def test_baselines_of_other_neighbours_are_forgotten(images):
    """They would be compared with what they are not; the raw pixels are measured again."""
    first, same, other = _watch(images), _watch(images), _watch(images, k=3)
    _evaluate(first, 0)
    state = json.loads(json.dumps(first.state_dict()))
    same.load_state_dict(state)
    other.load_state_dict(state)
    assert (same.raw, same.untrained) == (first.raw, first.untrained)
    _evaluate(other, 2)
    assert other.untrained is None and other.raw is not None
    assert "untrained" not in other.verdict() and "untrained" in same.verdict()


def test_more_neighbours_than_images_is_said_before_training(images):
    from dino_ds.errors import DataError

    with pytest.raises(DataError, match=r"eval\.k 5 is more than the 4 labelled training images"):
        _watch(images, limit=4)


def test_statistics_need_no_labels(tmp_path):
    train = build_source("folder", str(image_folder(tmp_path)), "train", False)
    watch = Watch(("statistics",), 2, train, None, Settings(workers=0), 32)
    found = _evaluate(watch, 0)
    assert found["statistics"]["test_images"] == 20
    assert watch.metrics(found)["eval/rankme"] > 1


def test_a_picture_that_can_not_be_drawn_costs_a_line(images, tmp_path):
    """Here: a file where the folder should be. On an unreadable image the others are drawn."""
    source = build_source("folder", str(images / "images"), "train", False)
    (tmp_path / "pictures").write_text("")
    album = Album(source, 2, tmp_path / "pictures", 32)
    line = album.draw(None, 2, torch.device("cpu"), lambda *_: None)
    assert line.startswith("no pictures of step 2: ") and line.endswith("training goes on")
    assert album.due(2) and not album.due(3) and album.due(3, last=True)
    assert not Album(source, 0, tmp_path, 32).due(0)

"""`dino-ds eval` on small folders: numbers, files, ranks, and input that can't be evaluated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from dino_ds.cli.main import main
from dino_ds.commands import evaluate
from dino_ds.commands.evaluate import run
from dino_ds.config.evaluation import BENCHMARKS, EVALUATIONS
from dino_ds.data.sources import build_source
from dino_ds.errors import ConfigError, DataError
from dino_ds.evals.context import Labeled, Settings
from dino_ds.evals.suite import knn, note_on_shared
from dino_ds.evals.tracking import read_results
from dino_ds.options.definition import EvalOptions
from dino_ds.weights.export import FORMATS
from tests.evals.tiny import clips
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder
from tests.weights.test_weights import _backbone

DEFAULTS = {"source": None, "benchmark_root": None, "size": None, "temperature": None, "images": None}


LABELED = [name for name in EVALUATIONS if name not in BENCHMARKS]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("evaluate")
    FORMATS["safetensors"](_backbone(), path / "teacher.safetensors")
    _tinted(path / "train", 24, seed=0)
    _tinted(path / "test", 9, seed=1)
    image_folder(path / "other", 8, 4)
    image_folder(path / "plain", 6)
    return path


@pytest.fixture
def place(made, tmp_path):
    """A teacher, 24 training and 9 test images in three classes; `other` has four, `plain` none."""
    for name in ("teacher.safetensors", "teacher.json"):
        shutil.copy(made / name, tmp_path)
    for name in ("train", "test", "other", "plain"):
        (tmp_path / name).symlink_to(made / name)
    return tmp_path


def _tinted(root, images, seed):
    """Noise with more or less of one color in each class: far enough apart that rounding decides nothing."""
    generator = np.random.default_rng(seed)
    for i in range(images):
        pixels = generator.integers(0, 256, (40, 48, 3)) * np.roll([1, 0.6, 0.3], i % 3) * generator.uniform(0.2, 1)
        (root / f"class{i % 3}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(root / f"class{i % 3}" / f"{i}.png")


def _run(place, evals="knn", **changes):
    """What concerns one evaluation alone is given with it."""
    names = evals.split(",")
    given = {"model": str(place), "root": str(place / "train"), "test_root": str(place / "test"), "workers": 0}
    given |= {"k": (1, 5) if "knn" in names else None}
    if (before := place / "results.json").is_file() and set(names) & json.loads(before.read_text()).keys():
        before.unlink()  # results in --out are not replaced
    result = run(EvalOptions(**{**given, **DEFAULTS, "evals": names, "out": str(place / "results.json"), **changes}))
    result.show(as_json=True)
    return result


def _results(place):
    return {name: kept["results"] for name, kept in read_results(place / "results.json").items()}


@pytest.fixture(scope="module")
def labeled(made):
    return _run(made, ",".join(LABELED)).data["results"]


@pytest.mark.slow
def test_every_evaluation_gives_numbers(made, labeled):
    results = _results(made)
    assert results.keys() == set(LABELED)
    assert {"knn_1", "knn_5", "linear", "ridge", "rankme"} <= {name for values in results.values() for name in values}
    written = read_results(made / "results.json")
    assert labeled == written
    assert {written["knn"][key] for key in ("step", "images", "train_images", "test_images")} == {3, 24, 9}
    (made / "results.json").write_text(json.dumps({name: kept for name, kept in written.items() if name != "knn"}))
    _run(made, "knn")
    assert _results(made) == results  # what was not asked for stays


def test_test_images_that_are_training_images_are_said(place, capsys):
    """By content, whatever the folders are called; k-NN with k 1 is 100 % there without any learning."""
    _run(place, root=str(place / "test"), k=(1,))
    output, told = capsys.readouterr()
    assert json.loads(output)["results"]["knn"]["results"]["knn_1"] == 100
    assert "9 of 9 test images looked at are training images too, such as " in told
    _run(place, k=(1,))
    assert "training images too" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "shared"),
    [
        (lambda folder: shutil.rmtree(folder / "class1"), 16),
        (lambda folder: [path.rename(folder / path.name) for path in folder.glob("*/*")], 24),
        (lambda folder: [path.write_bytes(path.read_bytes() + b"0") for path in folder.glob("class2/*")], 16),
    ],
)
def test_shared_images_are_found_by_name_and_content(made, tmp_path, change, shared):
    root = Path(shutil.copytree(made / "train", tmp_path / "copy"))
    change(root)
    train, test = (build_source("folder", str(path), "train", False) for path in (made / "train", root))
    share, (note,) = note_on_shared(["knn"], train, test, "--test_root")
    assert share == shared / len(test)
    assert note.startswith(f"{shared} of {len(test)} test images looked at are training images too")
    others = build_source("photos", None, "test", False)
    for names, images in ((["statistics"], test), (["knn"], None), (["knn"], others)):
        assert note_on_shared(names, train, images, "") == (0, [])


def test_two_ranks_give_what_one_gives(place, labeled):
    """Features differ in their last bits with the images of a batch: 1e-4 of a percent."""
    run_on_ranks(_run, place, ",".join(LABELED))
    two = _results(place)
    assert two.keys() == labeled.keys()
    for name, kept in labeled.items():
        assert two[name] == pytest.approx(kept["results"], rel=1e-3, abs=1e-4)


def test_what_an_evaluation_lacks_is_said_before_the_first(place, monkeypatch):
    monkeypatch.setattr(evaluate, "evaluate", lambda name, context: pytest.fail("too late"))
    for evals, changes, error, words in (
        ("knn,davis", {}, ConfigError, r"DAVIS needs its images: --benchmark_root DIR, wanted is JPEGImages"),
        ("knn,davis", {"benchmark_root": str(place)}, DataError, "no DAVIS in"),
        ("statistics,knn", {"k": (30,)}, DataError, "24 training images have no 30 neighbors"),
        ("statistics,ridge", {"test_root": str(place / "other")}, DataError, "not in training: class3"),
    ):
        with pytest.raises(error, match=words):
            _run(place, evals, **changes)


def test_labeled_images_and_benchmarks_in_one_command(place):
    clips(place / "data/DAVIS", names=("walk",), frames=3)
    _run(place, "knn,davis", benchmark_root=str(place / "data"), size=32)
    assert _results(place).keys() == {"knn", "davis"}
    found = read_results(place / "results.json")  # a benchmark is not of the images that others have used
    assert (found["knn"]["data"], found["knn"]["test_images"]) == (f"{place.name}/test", 9)
    assert (found["davis"]["data"], found["davis"]["test_images"]) == ("davis", None)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("train", "it is a folder"),
        ("mine.json", "something else than results of dino-ds eval"),
        ("nowhere/results.json", "is not a writable folder"),
    ],
)
def test_a_place_for_results_is_looked_at_first(place, monkeypatch, out, words):
    monkeypatch.setattr(evaluate, "load", lambda *_: pytest.fail("too late"))
    (place / "mine.json").write_text('{"name": 1}')
    with pytest.raises(ConfigError, match=words):
        _run(place, out=str(place / out))


def test_what_evaluations_leave_out():
    """What has no k neighbors, which is said, and an error where nothing is left."""
    rows, notes = Labeled(torch.randn(6, 4), torch.arange(6) % 2, 2), list[str]()
    context = SimpleNamespace(train_indices=range(30), train=rows, test=rows, note=notes.extend)
    context.settings = Settings(ks=(6, 10, 20))
    assert list(knn(context)) == ["knn_6"]
    assert notes == ["k = 10, 20 left out: there are 6 training images"]
    context.settings = Settings(ks=(10, 20))
    with pytest.raises(DataError, match="6 training images have no 10 neighbors"):
        knn(context)


def test_bad_input_at_the_command_line(place, capsys):
    (place / "empty").mkdir()
    sets = ("--root", place / "train", "--test_root", place / "test", "--workers", 0)
    for code, words, given in (
        (3, "does not exist", (place / "nothing", *sets)),
        (2, "the training images have no classes", (place, "--root", place / "plain", *sets[2:])),
        (2, "there are no test images: name labeled ones with --test_root", (place, *sets[:2])),
        (2, "needs a folder", (place, *sets[2:])),
        (2, "empty", (place, *sets[:3], place / "empty")),
        (2, "multiples of the patch size", (place, *sets, "--size", 30)),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["eval", *map(str, given)])
        assert stopped.value.code == code, words
        said = capsys.readouterr().err.strip().splitlines()
        assert words in said[-1] and "error:" in said[-1], (words, said)
        assert not any("Traceback" in line for line in said)
    assert not (place / "evaluations.json").exists()


def test_an_option_that_would_change_nothing_is_refused(place, monkeypatch):
    monkeypatch.setattr(evaluate, "load", lambda *_: pytest.fail("too late"))
    with pytest.raises(ConfigError, match="--k changes nothing of ridge: it is for knn; add one to --evals, or leave"):
        _run(place, "ridge", k=(3,))


def test_an_evaluation_that_fails_leaves_the_others(place, capsys, monkeypatch):
    original = evaluate.evaluate

    def fail(name, context):
        if name == "ridge":
            raise DataError("the disk is gone")
        return original(name, context)

    monkeypatch.setattr(evaluate, "evaluate", fail)
    with pytest.raises(DataError, match="the disk is gone"):
        _run(place, "knn,ridge")
    assert json.loads(capsys.readouterr().out)["results"].keys() == {"knn"}

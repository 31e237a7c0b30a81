"""Evaluations of a run, one object at a time. In whole runs: tests/run/test_best.py."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch

from dino_ds.config.loading import load_recipe
from dino_ds.data.normalization import IMAGENET
from dino_ds.data.sources import build_source
from dino_ds.errors import DataError
from dino_ds.evals import runner as runner_module
from dino_ds.evals import suite
from dino_ds.evals.context import Settings
from dino_ds.evals.runner import EvalRunner
from dino_ds.evals.tracking import Best, Knn, evaluated_every
from dino_ds.run.run import StepContext
from tests.run.harness import image_folder

_KINDS = ("train contents", "test contents", "train names", "test classes")


class _Live:
    """In the place of a live teacher: a few pixels are the features."""

    image_size, normalization = 32, IMAGENET

    def features(self, images):
        return images[:, :, 10, 10:12].flatten(1)


@pytest.fixture(autouse=True)
def live(monkeypatch):
    monkeypatch.setattr(runner_module, "live_teacher", lambda *_: contextlib.nullcontext(_Live()))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runner")
    roots = image_folder(folder / "images", 24, 3), image_folder(folder / "test", 9, 3, seed=1)
    return tuple(build_source("folder", str(root), "train", False) for root in roots)


def _runner(sources, names=("knn", "linear"), k=5, limit=None, **changes):
    settings = {"ks": (k,), "workers": 0, "images": limit, "test_images": 100, **changes}
    return EvalRunner(names, 2, sources, Settings(**settings), 32, IMAGENET)


def _evaluate(runner, step, give_up=lambda: False):
    return runner.evaluate(StepContext(None, torch.device("cpu"), step, 8 * step, Path(), None, give_up))


def test_whoever_gives_up_keeps_nothing(sources):
    questions = []
    assert _evaluate(_runner(sources), 0, lambda: bool(questions.append(1))) is not None
    assert len(questions) > 20
    for patience in (0, 1, 4, len(questions) // 2, len(questions) - 1):
        asked, runner = itertools.count(), _runner(sources)
        assert _evaluate(runner, 0, lambda asked=asked, patience=patience: next(asked) == patience) is None
        assert runner.knn == Knn(chance=runner.knn.chance, images=runner.knn.images)


def test_what_fails_later_is_left_out_and_said_once(sources, monkeypatch):
    """Before the first step it is an error: nothing is lost yet."""
    runner = _runner(sources)
    assert set(_evaluate(runner, 0)) == {"knn", "linear"}

    def linear(_):
        raise DataError("the disk is gone")

    monkeypatch.setattr(suite, "linear", linear)
    found = _evaluate(runner, 2)
    assert set(found) == {"knn"}
    assert runner.lines(found)[0] == "evals    linear can't be evaluated at step 2: the disk is gone"
    with pytest.raises(DataError, match=r"eval\.evals linear: the disk is gone"):
        _evaluate(runner, 0)


def _others(sources, tmp_path, what):
    """`sources` with other images of the same number in the place of the training or the test images."""
    which = what.startswith("test")
    root = shutil.copytree(sources[which].name(0).rpartition("/class")[0], tmp_path / what.replace(" ", "_"))
    files = sorted(root.rglob("*.png"))
    for file, other in zip(files, [*files[-3:], *files[:-3]], strict=True):
        if what.endswith("contents"):  # the checksum at the end, which no decoder looks at
            file.write_bytes(file.read_bytes()[:-1] + b"x")
        elif what.endswith("names"):
            file.rename(file.with_name(f"x{file.name}"))
        elif what.endswith("classes"):
            file.rename(other.parent / file.name)
    other = build_source("folder", str(root), "train", False)
    return (sources[0], other) if which else (other, sources[1])


@pytest.mark.parametrize("what", ["k", "temperature", "bank", "limit", "moved", *_KINDS])
def test_values_are_kept_for_the_same_images_and_settings_alone(sources, tmp_path, what):
    """With others they would be compared with what they are not: they are measured again, which is said."""
    first = _runner(sources)
    first.best = Best("knn", basis=first.basis)
    _evaluate(first, 0)
    first.best.see(0, first.knn.latest, True, True)
    state = json.loads(json.dumps(first.state_dict()))
    changes = {"k": {"k": 3}, "temperature": {"temperature": 1.0}, "bank": {"limit": 12}, "limit": {"test_images": 6}}
    others = _others(sources, tmp_path, "test moved" if what == "moved" else what) if what not in changes else sources
    now = _runner(others, **changes.get(what, {}))
    now.best = Best("knn", basis=now.basis)
    now.load_state_dict(state)
    if what == "moved":
        assert now.state_dict() == first.state_dict() and not now.missed(0, False)
        return
    assert (now.knn.raw, now.knn.latest, now.knn.untrained, now.best.value, now.best.start) == (None,) * 5
    assert now.missed(2, False) and len(now._notes) == 2
    lines = now.lines(_evaluate(now, 2))
    assert f"k-NN {first.knn.latest:.1f} % at step 0" in lines[0] and "of other images or settings" in lines[0]
    assert "sought anew" in lines[1]
    assert now.knn.raw is not None and "untrained" not in now.knn.line()


def test_a_short_run_is_evaluated_ten_times():
    """Unless steps are named."""
    for length, every, wanted in (
        *(("550 steps", "100 steps", 100), ("550 steps", "9 epochs", 55), ("5 steps", "5 epochs", 1)),
    ):
        assert evaluated_every(load_recipe(None, {"length": length, "eval.every": every}), 10) == wanted


def test_test_images_that_are_not_read_are_named():
    """A source with test images of its own takes no others: a given folder is not dropped in silence."""
    recipe = load_recipe("quickstart", {"eval.root": "nowhere"})
    runner = EvalRunner.build(recipe, build_source("photos", None, "train", False), 10)
    assert "eval.root nowhere is not read: data.source photos has its own test images" in runner._notes


def test_what_can_not_be_evaluated_is_said_before_training(sources, tmp_path):
    train, test = sources
    unlabeled = build_source("folder", str(image_folder(tmp_path / "flat")), "train", False)
    with pytest.raises(DataError, match=r"knn: 4 training images have no 5 neighbors: give a smaller --eval\.k"):
        _runner(sources, limit=4)
    with pytest.raises(DataError, match=r"eval\.evals linear: .* of 2 classes of the test images.*eval\.bank_images"):
        _runner(sources, ("linear",), limit=1)
    with pytest.raises(DataError, match=r"eval\.evals ridge: there are no test images: .* --eval\.root"):
        _runner((train, None), ("statistics", "ridge"))
    for pair, which in (((unlabeled, test), "training"), ((train, unlabeled), "test")):
        with pytest.raises(DataError, match=rf"eval\.evals linear: the {which} images have no classes"):
            _runner(pair, ("linear",))

"""Evaluations and pictures in the middle of training: what they give, and that training does not notice."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dino_ds
from dino_ds.config.evaluation import BENCHMARKS, EVALUATIONS
from dino_ds.data.sources import build_source
from dino_ds.evals.context import EvalContext, Settings
from dino_ds.evals.suite import evaluate
from dino_ds.evals.tracking import read_results
from dino_ds.weights.load import Backbone
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, log_of, losses_of, read_metrics, train_tiny, whole_tensors

FROM_FEATURES = [name for name in EVALUATIONS if name not in BENCHMARKS]
K = 5


def _train(root, run, changes):
    """Its message, what the generators give next, and how many images the teacher has described each time."""
    seen, original = [], Backbone.features
    Backbone.features = lambda self, images: (seen.append(len(images)), original(self, images))[1]
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    try:
        message = train_tiny(root, run, "zero2_bf16.json", changes={"length": "2 steps", **changes})
    finally:
        Backbone.features = original
    return message, (float(torch.rand(1)), float(np.random.rand()), random.random()), sum(seen)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    image_folder(folder / "images", 24, 3), image_folder(folder / "test", 9, 3, seed=1)
    return folder


@pytest.fixture(scope="module")
def runs(images):
    """(a run that evaluates and draws, one that does neither, what `_train` says of both)."""
    root = images / "images"
    changes = {
        "eval.every": "2 steps",
        "eval.evals": ",".join(FROM_FEATURES),
        "eval.root": str(images / "test"),
        "eval.k": str(K),
        "eval.pictures_every": "2 steps",
    }
    with_, without = images / "with", images / "without"
    said = [run_on_ranks(_train, root, run, how) for run, how in ((with_, changes), (without, {}))]
    return with_, without, said


def test_training_does_not_notice(runs):
    with_, without, said = runs
    for watched, alone in zip(*said, strict=True):
        assert watched[0] is None and alone[0] is None
        assert watched[1] == alone[1]
    assert losses_of(with_) == losses_of(without)
    ours, theirs = whole_tensors(with_, 2), whole_tensors(without, 2)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_features_are_computed_once_for_all_evaluations(runs):
    """24 training and 9 test images at steps 0 and 2, on either rank; pictures take the training images once more."""
    watched, alone = runs[2]
    assert sum(seen for _, _, seen in watched) == 2 * (24 + 9 + 24) and sum(seen for _, _, seen in alone) == 0


def test_results_are_those_of_the_saved_teacher(runs, images):
    """`dino-ds eval` finds the same with the same settings on the run's file, in any precision."""
    run, _, _ = runs
    kept = read_results(run / "evaluations.json")
    assert list(kept) == list(FROM_FEATURES)
    sources = tuple(build_source("folder", str(images / part), "train", False) for part in ("images", "test"))
    context = EvalContext(dino_ds.load(run), Settings(ks=(K,), workers=0), torch.device("cpu"), lambda: sources)
    for name, result in kept.items():
        assert (result["step"], result["images"], result["train_images"] or 24, result["test_images"]) == (2, 16, 24, 9)
        assert result["results"] == pytest.approx(evaluate(name, context), rel=1e-3, abs=1e-3)


def test_metrics_and_tensorboard_have_them_under_clear_names(runs):
    run, _, _ = runs
    records = [r for r in read_metrics(run) if "knn_top1" in r]
    assert [r["step"] for r in records] == [0, 2]
    kept = read_results(run / "evaluations.json")
    assert records[-1]["knn_top1"] == pytest.approx(kept["knn"]["results"][f"knn_{K}"])
    for name in FROM_FEATURES[1:]:
        for metric, value in kept[name]["results"].items():
            assert records[-1][f"eval/{metric}"] == pytest.approx(value)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert {"knn_top1", "eval/linear", "eval/rankme"} <= set(events.Tags()["scalars"])
    assert "linear   at step 2: " in log_of(run) and "k-NN     at step 2: teacher " in log_of(run)


def test_pictures_are_in_the_folder_and_in_tensorboard(runs):
    run, _, _ = runs
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name in ("map", "neighbors", "pca"):
        assert [event.step for event in events.Images(name)] == [0, 2]
        for step in (0, 2):
            with Image.open(run / f"pictures/step_{step:08d}/{name}.png") as picture:
                assert min(picture.size) > 100


def test_test_images_that_are_trained_on_are_said(images, tmp_path):
    changes = {"eval.every": "2 steps", "eval.root": str(images / "images"), "eval.k": "1"}
    assert run_on_ranks(train_tiny, images / "images", tmp_path / "run", max_steps=1, changes=changes, world=1) == [
        None
    ]
    said = [line for line in log_of(tmp_path / "run").splitlines() if "training images too" in line]
    assert len(said) == 2 and "evals    24 of 24 test images looked at are" in said[0] and "with eval.root" in said[0]

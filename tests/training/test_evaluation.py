"""Evaluations and pictures in the middle of training: what they give, and that training does not notice."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dino_ds
from dino_ds.data.sources import build_source
from dino_ds.evals.context import EvalContext, Settings
from dino_ds.evals.results import read_results
from dino_ds.evals.suite import evaluate
from dino_ds.weights.load import Backbone
from tests.ranks import run_on_ranks
from tests.training.harness import image_folder, log_of, losses_of, read_metrics, train_tiny, whole_tensors

FROM_FEATURES = ("knn", "linear", "ridge", "few-shot", "retrieval", "statistics")
K = 5


def _train(root, run, ds, changes):
    """Its message, what the generators give next, and how many images the teacher has described each time."""
    seen, original = [], Backbone.features
    Backbone.features = lambda self, images: (seen.append(len(images)), original(self, images))[1]
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    try:
        message = train_tiny(root, run, ds, changes={"length": "4 steps", **changes})
    finally:
        Backbone.features = original
    return message, (float(torch.rand(1)), float(np.random.rand()), random.random()), sum(seen)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    image_folder(folder / "images", 24, 3), image_folder(folder / "test", 9, 3, seed=1)
    return folder


FULL = [pytest.param(ds, marks=pytest.mark.full) for ds in ("zero0_fp32.json", "zero2_bf16.json", "zero1_fp16.json")]
DS_CONFIGS = [*FULL, "zero3_fp32.json"]


@pytest.fixture(scope="module", params=DS_CONFIGS)
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
    """24 training and 9 test images at steps 0, 2 and 4, on either rank; statistics take two more crops of 9."""
    watched, alone = runs[3]
    assert sum(seen for _, _, seen in watched) == 3 * (24 + 9 + 2 * 9) and sum(seen for _, _, seen in alone) == 0


def test_results_are_those_of_the_saved_teacher(runs, images):
    """What training writes is what `dino-ds eval` finds with the same settings on the run's file, in any precision."""
    _, run, _, _ = runs
    kept = read_results(run / "evaluations.json")
    assert list(kept) == list(FROM_FEATURES)
    sources = tuple(build_source("folder", str(images / part), "train", False) for part in ("images", "test"))
    subject = EvalContext(dino_ds.load(run), Settings(ks=(K,), workers=0), torch.device("cpu"), lambda: sources)
    for name, result in kept.items():
        assert (result["step"], result["images"], result["train_images"] or 24, result["test_images"]) == (4, 32, 24, 9)
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

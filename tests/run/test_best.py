"""The best teacher is kept, a run without progress ends, and a held-out loss changes nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dino_ds.checkpoint.opening import open_checkpoint
from dino_ds.evals import suite
from dino_ds.weights.sidecar import read_sidecar
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, log_of, losses_of, read_manifest, read_metrics, train_tiny, whole_tensors

VALUES = {0: 30.0, 2: 40.0, 4: 70.0, 6: 60.0, 8: 69.0, 10: 50.0, 12: 20.0}
"""k-NN by step, of a run that gets worse."""
EVERY_TWO = {"eval.every": "2 steps", "eval.k": "5", "eval.bank_images": "5"}


def _train(values, root, run, ds="zero0_fp32.json", **how):
    """`train_tiny` with k-NN accuracies as given by step; raw pixels have 25 %."""
    original, runner = suite.EVALUATIONS["knn"], __import__("dino_ds.evals.runner", fromlist=["EvalRunner"]).EvalRunner
    evaluate, now = runner.evaluate, [0]

    def at(self, moment):
        now[0] = moment.step
        return evaluate(self, moment)

    def knn(context):
        return {"knn_5": 25.0 if not hasattr(context.backbone, "network") else values[now[0]]} if context.device else {}

    def preflight(context):
        return original(context) if type(context).__name__ == "_Preflight" else knn(context)

    suite.EVALUATIONS["knn"], runner.evaluate = preflight, at
    try:
        return train_tiny(root, run, ds, **how)
    finally:
        suite.EVALUATIONS["knn"], runner.evaluate = original, evaluate


def train(root, run, values=VALUES, world=1, ds="zero0_fp32.json", changes=None, **how):
    known = EVERY_TWO | {"eval.root": str(root)} | (changes or {})
    said = run_on_ranks(_train, values, root, run, ds, changes=known, world=world, **how)
    assert len(set(said)) == 1
    return said[0]


def best_of(run):
    return read_sidecar(run / "best_teacher.safetensors")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("best") / "images", 20, 2)


@pytest.fixture(scope="module")
def straight(root, tmp_path_factory):
    """A run that gets worse after step 4."""
    run = tmp_path_factory.mktemp("best") / "straight"
    assert train(root, run, changes={"keep_checkpoints": "1"}) is None
    return run


def test_a_run_that_gets_worse_keeps_its_best_teacher(straight):
    """Its weights are those of the checkpoint of its step, which stays though the newest alone is to be kept."""
    assert sorted(path.name for path in (straight / "checkpoints").glob("step_*")) == ["step_00000004", "step_00000012"]
    about, tensors = best_of(straight), load_file(straight / "best_teacher.safetensors")
    assert about["step"] == 4 and about["best"] == {"metric": "knn", "value": 70.0, "start": 30.0}
    whole = whole_tensors(straight, 4)
    assert all(torch.equal(tensor, whole[f"teacher.backbone.{name}"]) for name, tensor in tensors.items())
    assert "best     step 4: knn 70; newest 20; start 30" in log_of(straight)

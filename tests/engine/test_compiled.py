"""Compiled blocks of the large recipes of DINOv2 and DINOv3, with few weights: number of programs, and same losses."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from dino_ds.config.loading import load_recipe
from dino_ds.models.base import Backbone
from dino_ds.planning.measure import build_trial, resolve
from tests.engine.harness import run_step
from tests.planning.measure.tiny import TINY, tiny_ds
from tests.ranks import run_on_ranks

# KoLeo, which is not compiled, takes the logarithm of distances between the nearly equal features of four images: it
# makes of a rounding half a percent of the loss.
CHANGES = {
    "data.source": "photos",
    "ibot_head.prototypes": "48",
    "ibot_head.hidden": "48",
    "ibot_head.bottleneck": "16",
    "objective.koleo_weight": "0",
}


def _steps(name: str, stage: int, backend: str) -> tuple[list[float], list[int], dict[str, int]]:
    """Losses of three steps, graphs of Dynamo after each, and graph breaks; without `backend` nothing is compiled."""
    torch._dynamo.reset()
    counters.clear()
    recipe = load_recipe(name, TINY | CHANGES)
    ds = tiny_ds(stage, dino_ds={"compile": "default" if backend else "off"})
    compiled = functools.partialmethod(Backbone.compile_segments, backend=backend)
    with mock.patch.object(Backbone, "compile_segments", compiled):
        trial = build_trial(*resolve(recipe, ds, "test.json", 4))
    losses, graphs = [], []
    for window in range(3):
        losses += [float(out.loss) for out in run_step(trial.step, recipe, window, 4)]
        graphs.append(counters["stats"]["unique_graphs"])
    return losses, graphs, dict(counters["graph_break"])


@pytest.mark.parametrize(
    ("name", "stage"),
    [("dinov3_vitl16", 2), *(pytest.param("dinov2_vitl14", stage, marks=pytest.mark.full) for stage in (0, 1))],
)
def test_compiled_blocks(name, stage):
    """All are made in the first step, whatever masks and crops the next ones have.

    Losses to 1e-5: FP32 sums in another order, which Adam makes larger in three steps.
    """
    ((plain, *_),) = run_on_ranks(_steps, name, stage, "", world=1)
    ((losses, graphs, breaks),) = run_on_ranks(_steps, name, stage, "aot_eager", world=1)
    assert graphs == [graphs[0]] * 3 and graphs[0] <= 4 and not breaks
    assert losses == pytest.approx(plain, rel=1e-5)

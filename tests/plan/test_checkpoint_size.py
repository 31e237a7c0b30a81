"""A checkpoint is as large as planned."""

from __future__ import annotations

import pytest

from dino_ds.costs.memory import count_parameters
from dino_ds.measure.trial import build_trial, resolve
from dino_ds.plan.host import checkpoint_bytes
from tests.measure.tiny import tiny_ds, tiny_recipe
from tests.ranks import run_on_ranks


def _saved_bytes(stage: int) -> int:
    """What this rank has for a checkpoint: its part of the engine's state, and half of what both ranks hold."""
    trial = build_trial(*resolve(tiny_recipe(), tiny_ds(stage), "test.json", 2))
    trial.run()
    step = trial.step
    shared = sum(tensor.nbytes for tensor in step.state().values())
    return sum(tensor.nbytes for tensor in step.engine.state().tensors.values()) + shared // 2


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_all_ranks_tensors_make_up_the_checkpoint(stage):
    """Within 0.5 %: shards are padded."""
    recipe = tiny_recipe()
    saved = sum(run_on_ranks(_saved_bytes, stage))
    assert saved == pytest.approx(checkpoint_bytes(recipe), rel=0.005)
    assert count_parameters(recipe) * 16 < saved

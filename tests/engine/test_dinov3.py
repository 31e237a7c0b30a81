"""A narrow ViT of DINOv3's kind: stages, ranks, micro-batches and recomputation change nothing."""

from __future__ import annotations

import pytest

from dino_ds.engine.engine import Progress
from dino_ds.method.build import build_network, build_step
from tests.engine.harness import ds_config, max_difference, mean_over_ranks, run_step
from tests.engine.test_dinov2 import BATCH, dinov2_recipe
from tests.ranks import run_on_ranks
from tests.reference import copied

WINDOWS = 4
# Each weight is whole only while its module works.
GATHERED = {"zero": {"stage3_param_persistence_threshold": 0}}
MODEL = {
    "model__backbone": "vit_small_plus_patch16_dinov3_qkvb", "model__registers": "2", "model__local_cls_norm": "true",
    "model__rope_rescale": "2", "model__depth": "2", "crops__mask": "dinov3",
    "objective__koleo_weight": "0",  # it sees a micro-batch
}  # fmt: skip


def _train(stage, accumulation=1, **sections):
    """Losses, the teacher and what the weights were, with the norm of the last gradient."""
    recipe = dinov2_recipe(**MODEL)
    config = ds_config(stage, "fp32", BATCH, accumulation, gradient_clipping=1.0, **sections)
    step = build_step(recipe, config, 10)
    results = [run_step(step, recipe, window) for window in range(WINDOWS)]
    assert all(outs[-1].progress is Progress.STEPPED for outs in results)
    return (
        [mean_over_ranks([out.loss for out in outs]) for outs in results],
        copied(step.teachers["ema"].state()),
        step.engine.grad_norm,
    )


def test_two_ranks_equal_one_process():
    """FP32 1e-5: sums in another order. All weights move, those of the norm of local crops too."""
    losses, teacher, norm = run_on_ranks(_train, 0, world=1)[0]
    start = dict(build_network(dinov2_recipe(**MODEL), ds_config(0, "fp32", BATCH).performance).state_dict())
    still = [name for name in start if max_difference({name: start[name]}, {name: teacher[name]}) == 0]
    assert not still
    for rank_losses, rank_teacher, rank_norm in run_on_ranks(_train, 3, 2, **GATHERED, activation_checkpointing={}):
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        assert max_difference(rank_teacher, teacher) < 1e-5
        assert rank_norm == pytest.approx(norm, rel=1e-4)

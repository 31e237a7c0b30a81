"""Gram anchoring through the engine: stages, precisions, ranks and micro-batches change nothing; who moves and when."""

from __future__ import annotations

import pytest
import torch

from dino_ds.config.recipe import Recipe
from dino_ds.engine.engine import Progress
from dino_ds.method.build import build_step
from tests.engine.harness import ds_config, max_difference, mean_over_ranks, run_step
from tests.planning.measure.tiny import tiny_recipe
from tests.ranks import run_on_ranks
from tests.reference import copied

WINDOWS, BATCH = 4, 8
SNAPSHOT = {"gram__start": "1 steps", "gram__refresh_every": "2 steps", "gram__refreshes": "1"}
"""It is taken before the second step and replaced before the fourth."""


def gram_recipe(**changes: str) -> Recipe:
    """With masks, crops of its own (a grid of 6 x 6 for one of 4 x 4), free prototypes and lighter local crops."""
    return tiny_recipe(**{
        "data__global_batch": str(BATCH), "length": "20 steps", "crops__mask": "dinov3", "model__layer_scale": "0.1",
        "model__drop_path": "0.2", "head__free_prototypes": "true", "objective__ibot_head": "shared",
        "objective__centering": "sinkhorn", "objective__ibot_weight": "1",
        "objective__dino_local_weight": "1..0.5 over 3",
        "objective__freeze_prototypes": "1 steps", "optimizer__warmup": "2 steps", "optimizer__lr": "0.05",
        "optimizer__lr_scaling": "sqrt", "optimizer__eps": "1e-2", "teacher__momentum": "0.9",
        "gram__weight": "1..2 over 3", "gram__crop_size": "48", **changes,
    })  # fmt: skip


def _train(stage, precision, accumulation=1, **changes):
    recipe = gram_recipe(**changes)
    step = build_step(recipe, ds_config(stage, precision, BATCH, accumulation, gradient_clipping=1.0), 10)
    before, losses = [], []
    for window in range(WINDOWS):
        before.append(copied(step.teachers["ema"].network.backbone.state_dict()))
        outs = run_step(step, recipe, window)
        assert outs[-1].progress is Progress.STEPPED
        values = {"loss": [out.loss for out in outs], "gram": [out.scalars["gram_loss"] for out in outs]}
        losses.append({name: mean_over_ranks(value) for name, value in values.items()})
    own = {} if recipe.gram.teacher == "ema" else copied(step.teachers["gram"].network.backbone.state_dict())
    return losses, copied(step.teachers["ema"].state()), own, before


@pytest.fixture(scope="module")
def references():
    stages = {"fp32": 0, "bf16": 1}
    return {p: run_on_ranks(_train, stage, p, world=1, **SNAPSHOT)[0] for p, stage in stages.items()}


def test_the_snapshot_is_taken_and_replaced_when_it_should(references):
    """The first of four steps has no Gram loss; then the teacher is the EMA teacher of the second, and from the
    fourth step on that of the fourth."""
    losses, _, gram, before = references["fp32"]
    assert [loss["gram"] > 0 for loss in losses] == [False] + [True] * 3
    assert all(torch.equal(gram[name], before[3][name]) for name in gram)
    assert max_difference(before[3], before[1]) > 1e-4


@pytest.mark.parametrize(("stage", "precision"), [(2, "fp32"), (3, "bf16")])
def test_two_ranks_equal_one_process(stage, precision, references):
    """Tolerances as in test_dinov2.py. In bf16 Gram's teacher keeps its matrices in bf16, the others in FP32."""
    losses, teacher, gram, _ = references[precision]
    rtol, atol = (1e-5, 1e-5) if precision == "fp32" else (2e-2, 8e-4)
    results = run_on_ranks(_train, stage, precision, **SNAPSHOT)
    for rank_losses, rank_teacher, rank_gram, rank_before in results:
        for ours, theirs in zip(rank_losses, losses, strict=True):
            assert ours == pytest.approx(theirs, rel=rtol, abs=1e-7)
        assert max_difference(rank_teacher, teacher) < atol
        assert max_difference(rank_gram, gram) < (atol if precision == "fp32" else 8e-3)
        low = {"blocks.0.attn.qkv.weight", "blocks.2.mlp.fc2.bias", "patch_embed.proj.weight"}
        for name, tensor in rank_gram.items():
            assert torch.equal(tensor, rank_before[3][name].to(tensor.dtype))
            if name in low or name in ("norm.weight", "cls_token"):
                assert (tensor.dtype == torch.bfloat16) == (precision == "bf16" and name in low), name
    assert all(torch.equal(results[0][2][name], results[1][2][name]) for name in gram), "bit-identical on all ranks"


@pytest.mark.parametrize("kind", ["snapshot", "ema"])
def test_micro_batches_equal_one_batch(kind):
    """On two ranks; Sinkhorn's targets and Gram's too: losses to 2e-6, weights to 2e-6, sums in another order."""
    changes = SNAPSHOT if kind == "snapshot" else {"gram__teacher": "ema", "gram__crop_size": "none"}
    (whole,) = run_on_ranks(_train, 0, "fp32", world=1, **changes)
    for losses, teacher, _, _ in run_on_ranks(_train, 1, "fp32", 2, **changes):
        for ours, theirs in zip(losses, whole[0], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-7)
        assert max_difference(teacher, whole[1]) < 2e-6

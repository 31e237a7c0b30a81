"""DINO, iBOT, KoLeo and Gram anchoring with ViTs: stages, precisions, ranks, micro-batches change nothing."""

from __future__ import annotations

import pytest
import torch

from dino_ds.config.recipe import Recipe
from dino_ds.engine.engine import Progress
from dino_ds.method.build import build_network, build_step
from tests.engine.harness import ds_config, fp32_student, max_difference, mean_over_ranks, run_step
from tests.planning.measure.tiny import tiny_recipe
from tests.ranks import run_on_ranks
from tests.reference import copied

WINDOWS, BATCH = 5, 8


def dinov2_recipe(**changes: str) -> Recipe:
    """All of it, small; the prototypes of both heads move from the second step on. KoLeo's nearest images are nearer
    than the next ones by 3e-4 of a cosine in every step with this seed and scale: with others by less than what another
    CPU's sums differ, which then choose another image."""
    own = {"prototypes": "48", "hidden": "48", "bottleneck": "16", "learned_lengths": "true"}
    shared = changes.get("objective__ibot_head") == "shared"
    heads = {} if shared else {f"ibot_head__{key}": value for key, value in own.items()}
    return tiny_recipe(**{
        "data__global_batch": str(BATCH), "length": "20 steps", "crops__mask": "dinov2", "model__layer_scale": "1",
        "seed": "1", "model__drop_path": "0.2", "head__learned_lengths": "true", **heads,
        "objective__centering": "sinkhorn", "objective__ibot_weight": "1", "objective__koleo_weight": "0.1",
        "objective__koleo_ranks": "all", "objective__freeze_prototypes": "1 steps", "optimizer__warmup": "2 steps",
        "optimizer__lr": "0.05", "optimizer__lr_scaling": "sqrt", "optimizer__eps": "1e-2",
        "optimizer__clip_by": "part", "optimizer__layer_decay": "0.8", "teacher__momentum": "0.9", **changes,
    })  # fmt: skip


def _train(stage, precision, accumulation=1, sections=None, **changes):
    recipe = dinov2_recipe(**changes)
    config = ds_config(stage, precision, BATCH, accumulation, gradient_clipping=1.0, **(sections or {}))
    step = build_step(recipe, config, 10)
    results = [run_step(step, recipe, window) for window in range(WINDOWS)]
    assert all(outs[-1].progress is Progress.STEPPED for outs in results)
    losses = [mean_over_ranks([out.loss for out in outs]) for outs in results]
    centers = {name: statistic.value.clone() for name, statistic in step.objective.statistics.items()}
    return losses, copied(step.teachers["ema"].state()), centers, step.engine.grad_norm


def _start(**changes):
    return dict(build_network(dinov2_recipe(**changes), ds_config(0, "fp32", BATCH).performance).state_dict())


@pytest.fixture(scope="module")
def references():
    stages = {"fp32": 0, "bf16": 1}
    return {precision: run_on_ranks(_train, stage, precision, world=1)[0] for precision, stage in stages.items()}


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "fp32"), (3, "fp32")])
def test_two_ranks_equal_one_process(stage, precision, references):
    """Tolerances as in test_matrix.py: fp32 1e-5, sums in another order; bf16 rounds weights, gradients and cosines."""
    losses, teacher, _, norm = references[precision]
    rtol, atol = (1e-5, 1e-5) if precision == "fp32" else (2e-2, 8e-4)
    moved = max_difference(teacher, _start())
    assert moved > 4 * atol, f"the teacher has moved by {moved}"
    results = run_on_ranks(_train, stage, precision)
    for rank_losses, rank_teacher, _, rank_norm in results:
        assert rank_losses == pytest.approx(losses, rel=rtol)
        assert max_difference(rank_teacher, teacher) < atol
        assert rank_norm == pytest.approx(norm, rel=10 * rtol)
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in teacher), "bit-identical on all ranks"


DINOV3 = {
    "model__backbone": "vit_small_plus_patch16_dinov3_qkvb", "model__registers": "2", "model__local_cls_norm": "true",
    "model__rope_rescale": "2", "model__depth": "2", "crops__mask": "dinov3",
    "objective__koleo_weight": "0",  # it sees a micro-batch
}  # fmt: skip


def test_dinov3_on_two_ranks_equals_one_process():
    """In two micro-batches of recomputed blocks; FP32 1e-5: sums in another order. All weights move."""
    losses, teacher, _, norm = run_on_ranks(_train, 0, "fp32", world=1, **DINOV3)[0]
    start = _start(**DINOV3)
    assert not [name for name in start if torch.equal(start[name], teacher[name])]
    sections = {"zero": {"stage3_param_persistence_threshold": 0}, "activation_checkpointing": {}}
    for rank_losses, rank_teacher, _, rank_norm in run_on_ranks(_train, 3, "fp32", 2, sections, **DINOV3):
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        assert max_difference(rank_teacher, teacher) < 1e-5
        assert rank_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("centering", ["softmax", "sinkhorn"])
def test_micro_batches_equal_one_batch(centering):
    """1 = 2 = 4: targets are those of the whole step, centers move once. KoLeo sees a micro-batch and is left out.
    Losses and centers to 1e-6, the teacher's weights to 2e-6: sums in another order."""
    changes = {"objective__centering": centering, "objective__koleo_weight": "0"}
    (whole,) = run_on_ranks(_train, 0, "fp32", world=1, **changes)
    for stage, accumulation, world in ((2, 4, 1), (1, 2, 2)):
        for losses, teacher, centers, norm in run_on_ranks(_train, stage, "fp32", accumulation, world=world, **changes):
            assert losses == pytest.approx(whole[0], rel=2e-6)
            assert max_difference(teacher, whole[1]) < 2e-6
            assert norm == pytest.approx(whole[3], rel=1e-5)
            assert centers.keys() == ({"center", "ibot_center"} if centering == "softmax" else set())
            for name, center in centers.items():
                torch.testing.assert_close(center, whole[2][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "objective__dino_weight": "0", "crops__num_local": "0", "objective__centering": "softmax",
            "model__registers": "2", "model__drop_path_growth": "uniform", "model__stochastic_depth": "batched",
        },
        {
            "objective__ibot_head": "shared", "crops__mask": "dinov3",
            "objective__koleo_weight": "0..0.1 over 4 steps", "objective__koleo_ranks": "own",
        },
    ],
    ids=["iBOT alone, no local crops, registers", "one head, KoLeo ramp"],
)  # fmt: skip
def test_variants_train_at_stage_3(changes):
    run_on_ranks(_moves, changes)


def _moves(changes):
    recipe = dinov2_recipe(**changes)
    config = ds_config(3, "fp32", BATCH, 2, gradient_clipping=1.0)
    step = build_step(recipe, config, 10)
    start = fp32_student(step.engine, build_network(recipe, config.performance))
    for window in range(3):
        outs = run_step(step, recipe, window)
        assert outs[-1].progress is Progress.STEPPED and all(out.loss > 0 for out in outs)
    end = fp32_student(step.engine, build_network(recipe, config.performance))
    assert not [name for name in start if torch.equal(start[name], end[name])]


GRAM_WINDOWS, EIGHT = 4, 8
SNAPSHOT = {"gram__start": "1 steps", "gram__refresh_every": "2 steps", "gram__refreshes": "1"}
"""It is taken before the second step and replaced before the fourth."""


def gram_recipe(**changes: str) -> Recipe:
    """With masks, crops of its own (a grid of 6 x 6 for one of 4 x 4), free prototypes and lighter local crops."""
    return tiny_recipe(**{
        "data__global_batch": str(EIGHT), "length": "20 steps", "crops__mask": "dinov3", "model__layer_scale": "0.1",
        "model__drop_path": "0.2", "head__free_prototypes": "true", "objective__ibot_head": "shared",
        "objective__centering": "sinkhorn", "objective__ibot_weight": "1",
        "objective__dino_local_weight": "1..0.5 over 3",
        "objective__freeze_prototypes": "1 steps", "optimizer__warmup": "2 steps", "optimizer__lr": "0.05",
        "optimizer__lr_scaling": "sqrt", "optimizer__eps": "1e-2", "teacher__momentum": "0.9",
        "gram__weight": "1..2 over 3", "gram__crop_size": "48", **changes,
    })  # fmt: skip


def _train_gram(stage, precision, accumulation=1, **changes):
    recipe = gram_recipe(**changes)
    step = build_step(recipe, ds_config(stage, precision, EIGHT, accumulation, gradient_clipping=1.0), 10)
    before, losses = [], []
    for window in range(GRAM_WINDOWS):
        before.append(copied(step.teachers["ema"].network.backbone.state_dict()))
        outs = run_step(step, recipe, window)
        assert outs[-1].progress is Progress.STEPPED
        values = {"loss": [out.loss for out in outs], "gram": [out.scalars["gram_loss"] for out in outs]}
        losses.append({name: mean_over_ranks(value) for name, value in values.items()})
    own = {} if recipe.gram.teacher == "ema" else copied(step.teachers["gram"].network.backbone.state_dict())
    return losses, copied(step.teachers["ema"].state()), own, before


@pytest.fixture(scope="module")
def gram_references():
    stages = {"fp32": 0, "bf16": 1}
    return {p: run_on_ranks(_train_gram, stage, p, world=1, **SNAPSHOT)[0] for p, stage in stages.items()}


def test_the_snapshot_is_taken_and_replaced_when_it_should(gram_references):
    """Not in the first of four steps; then it is the EMA teacher of the second, in the fourth that of the fourth."""
    losses, _, gram, before = gram_references["fp32"]
    assert [loss["gram"] > 0 for loss in losses] == [False] + [True] * 3
    assert all(torch.equal(gram[name], before[3][name]) for name in gram)
    assert max_difference(before[3], before[1]) > 1e-4


@pytest.mark.parametrize(("stage", "precision"), [(2, "fp32"), (3, "bf16")])
def test_gram_on_two_ranks_equals_one_process(stage, precision, gram_references):
    """Tolerances as in test_dinov2.py. In bf16 Gram's teacher keeps its matrices in bf16, the others in FP32."""
    losses, teacher, gram, _ = gram_references[precision]
    rtol, atol = (1e-5, 1e-5) if precision == "fp32" else (2e-2, 8e-4)
    results = run_on_ranks(_train_gram, stage, precision, **SNAPSHOT)
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
def test_gram_in_micro_batches_equals_one_batch(kind):
    """On two ranks; Sinkhorn's targets and Gram's too: losses to 2e-6, weights to 2e-6, sums in another order."""
    changes = SNAPSHOT if kind == "snapshot" else {"gram__teacher": "ema", "gram__crop_size": "none"}
    (whole,) = run_on_ranks(_train_gram, 0, "fp32", world=1, **changes)
    for losses, teacher, _, _ in run_on_ranks(_train_gram, 1, "fp32", 2, **changes):
        for ours, theirs in zip(losses, whole[0], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-7)
        assert max_difference(teacher, whole[1]) < 2e-6

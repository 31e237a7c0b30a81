"""DINO, iBOT, KoLeo, Gram anchoring and frozen teachers with ViTs: stages, precisions and ranks change nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dino_ds.config.recipe import Recipe
from dino_ds.engine.engine import Progress
from dino_ds.method.build import build_network, build_step
from dino_ds.weights.frozen import digest
from tests.engine.harness import ds_config, max_difference, mean_over_ranks, run_step
from tests.planning.measure.tiny import tiny_recipe
from tests.ranks import run_on_ranks
from tests.reference import copied
from tests.run.harness import image_folder, train_tiny

WINDOWS, BATCH = 5, 8
HEAD = {"prototypes": "48", "hidden": "48", "bottleneck": "16"}
IBOT_HEAD = {f"ibot_head__{key}": value for key, value in HEAD.items()}
COMMON = {
    "data__global_batch": str(BATCH), "length": "20 steps", "model__drop_path": "0.2", "objective__ibot_weight": "1",
    "objective__centering": "sinkhorn", "objective__freeze_prototypes": "1 steps", "optimizer__warmup": "2 steps",
    "optimizer__lr": "0.05", "optimizer__lr_scaling": "sqrt", "optimizer__eps": "1e-2", "teacher__momentum": "0.9",
}  # fmt: skip


def dinov2_recipe(**changes: str) -> Recipe:
    """All of it, small; the prototypes of both heads move from the second step on. KoLeo's nearest images are nearer
    than the next ones by 3e-4 of a cosine in every step with this seed and scale: with others by less than what another
    CPU's sums differ, which then choose another image."""
    return tiny_recipe(**{
        **COMMON, "crops__mask": "dinov2", "model__layer_scale": "1", "seed": "1", "head__learned_lengths": "true",
        **IBOT_HEAD, "ibot_head__learned_lengths": "true", "objective__koleo_weight": "0.1",
        "objective__koleo_ranks": "all", "optimizer__clip_by": "part", "optimizer__layer_decay": "0.8", **changes,
    })  # fmt: skip


def gram_recipe(**changes: str) -> Recipe:
    """With masks, crops of its own (a grid of 6 x 6 for one of 4 x 4), free prototypes and lighter local crops."""
    return tiny_recipe(**{
        **COMMON, "crops__mask": "dinov3", "model__layer_scale": "0.1", "head__free_prototypes": "true",
        "objective__ibot_head": "shared", "objective__dino_local_weight": "1..0.5 over 3",
        "gram__weight": "1..2 over 3", "gram__crop_size": "48", **changes,
    })  # fmt: skip


class Trained(NamedTuple):
    """Losses, DINO's and Gram's, by window; teachers at the end; the teacher's backbone before each window."""

    losses: list[dict[str, float]]
    teacher: dict[str, Tensor]
    centers: dict[str, Tensor]
    norm: float | None
    gram: dict[str, Tensor]
    before: list[dict[str, Tensor]]


def _train(
    stage: int,
    precision: str,
    accumulation: int = 1,
    sections: dict[str, Any] | None = None,
    recipe_of: Any = dinov2_recipe,
    **changes: str,
) -> Trained:
    recipe = recipe_of(**changes)
    config = ds_config(stage, precision, BATCH, accumulation, gradient_clipping=1.0, **(sections or {}))
    step = build_step(recipe, config, 10)
    before, losses = [], []
    for window in range(WINDOWS):
        before.append(copied(step.teachers["ema"].network.backbone.state_dict()))
        outs = run_step(step, recipe, window)
        assert outs[-1].progress is Progress.STEPPED
        grams = [out.scalars["gram_loss"] for out in outs if "gram_loss" in out.scalars]
        values = {"loss": [out.loss for out in outs], **({"gram": grams} if grams else {})}
        losses.append({name: mean_over_ranks(value) for name, value in values.items()})
    centers = {name: statistic.value.clone() for name, statistic in step.objective.statistics.items()}
    teacher, snapshot = copied(step.teachers["ema"].state()), step.teachers.get("gram")
    gram = {} if snapshot is None else copied(snapshot.network.backbone.state_dict())
    return Trained(losses, teacher, centers, step.engine.grad_norm, gram, before)


@pytest.fixture(scope="module")
def reference():
    """One process: FP32 at stage 0, bf16 at stage 1."""
    known: dict[tuple[Any, ...], Trained] = {}

    def of(recipe_of: Any, precision: str, changes: dict[str, str]) -> Trained:
        key = (recipe_of, precision, *changes.items())
        if key not in known:
            stage = 0 if precision == "fp32" else 1
            (known[key],) = run_on_ranks(_train, stage, precision, world=1, recipe_of=recipe_of, **changes)
        return known[key]

    return of


# It is taken before the second step and replaced before the fourth.
SNAPSHOT = {"gram__start": "1 steps", "gram__refresh_every": "2 steps", "gram__refreshes": "1"}
DINOV3 = {
    "model__backbone": "vit_small_plus_patch16_dinov3_qkvb", "model__registers": "2", "model__local_cls_norm": "true",
    "model__rope_rescale": "2", "model__depth": "2", "crops__mask": "dinov3",
    "objective__koleo_weight": "0",  # it sees a micro-batch
}  # fmt: skip
RECOMPUTED = {"zero": {"stage3_param_persistence_threshold": 0}, "activation_checkpointing": {}}
CELLS = [
    *((dinov2_recipe, {}, *cell, 1, {}) for cell in ((1, "bf16"), (2, "fp32"), (3, "fp32"))),
    *((gram_recipe, SNAPSHOT, *cell, 1, {}) for cell in ((2, "fp32"), (3, "bf16"))),
    (dinov2_recipe, DINOV3, 3, "fp32", 2, RECOMPUTED),
]


@pytest.mark.parametrize(("recipe_of", "changes", "stage", "precision", "accumulation", "sections"), CELLS)
def test_two_ranks_equal_one_process(recipe_of, changes, stage, precision, accumulation, sections, reference):
    """Tolerances as in test_matrix.py: fp32 1e-5, sums in another order; bf16 rounds weights, gradients and cosines. In
    bf16 Gram's teacher keeps its matrices in bf16, the others in FP32."""
    whole = reference(recipe_of, precision, changes)
    rtol, atol = (1e-5, 1e-5) if precision == "fp32" else (2e-2, 8e-4)
    start = build_network(recipe_of(**changes), ds_config(0, "fp32", BATCH).performance).state_dict()
    assert max_difference(whole.teacher, dict(start)) > 4 * atol, "the teacher has moved"
    assert not sections or not [name for name in start if torch.equal(start[name], whole.teacher[name])]
    ranks = run_on_ranks(_train, stage, precision, accumulation, sections, recipe_of, **changes)
    if changes == SNAPSHOT:  # there is no Gram teacher in the first step
        assert [loss["gram"] > 0 for loss in whole.losses] == [False] + [True] * (WINDOWS - 1)
    for found in ranks:
        for ours, theirs in zip(found.losses, whole.losses, strict=True):
            assert ours == pytest.approx(theirs, rel=rtol, abs=1e-7)
        assert max_difference(found.teacher, whole.teacher) < atol
        assert found.norm == pytest.approx(whole.norm, rel=10 * rtol)
        assert max_difference(found.gram, whole.gram) < (atol if precision == "fp32" else 8e-3)
        low = {"blocks.0.attn.qkv.weight", "blocks.2.mlp.fc2.bias", "patch_embed.proj.weight"}
        for name, tensor in found.gram.items():
            assert torch.equal(tensor, found.before[3][name].to(tensor.dtype))
            if name in low or name in ("norm.weight", "cls_token"):
                assert (tensor.dtype == torch.bfloat16) == (precision == "bf16" and name in low), name
    for one, other in ((ranks[0].teacher, ranks[1].teacher), (ranks[0].gram, ranks[1].gram)):
        assert all(torch.equal(one[name], other[name]) for name in one), "bit-identical on all ranks"


GRAM_OF_EMA = {"gram__teacher": "ema", "gram__crop_size": "none"}
PARTS = [
    *((dinov2_recipe, {"objective__centering": c, "objective__koleo_weight": "0"}) for c in ("softmax", "sinkhorn")),
    *((gram_recipe, changes) for changes in (SNAPSHOT, GRAM_OF_EMA)),
]


@pytest.mark.parametrize(("recipe_of", "changes"), PARTS)
def test_micro_batches_equal_one_batch(recipe_of, changes, reference):
    """1 = 2 = 4: targets are those of the whole step, centers move once. KoLeo sees a micro-batch and is left out.
    Losses, centers and weights to 2e-6: sums in another order."""
    whole = reference(recipe_of, "fp32", changes)
    for stage, accumulation, world in ((2, 4, 1), (1, 2, 2)) if recipe_of is dinov2_recipe else ((1, 2, 2),):
        ranks = run_on_ranks(_train, stage, "fp32", accumulation, None, recipe_of, world=world, **changes)
        for found in ranks:
            for ours, theirs in zip(found.losses, whole.losses, strict=True):
                assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-7)
            assert max_difference(found.teacher, whole.teacher) < 2e-6
            assert found.norm == pytest.approx(whole.norm, rel=1e-5)
            softmax = changes.get("objective__centering") == "softmax"
            assert found.centers.keys() == ({"center", "ibot_center"} if softmax else set())
            for name, center in found.centers.items():
                torch.testing.assert_close(center, whole.centers[name], rtol=0, atol=1e-6)


def test_a_variant_trains_at_stage_3():
    """iBOT alone, without local crops."""
    changes = {
        "objective__dino_weight": "0", "crops__num_local": "0", "objective__centering": "softmax",
        "model__registers": "2", "model__drop_path_growth": "uniform", "model__stochastic_depth": "batched",
    }  # fmt: skip
    found, _ = run_on_ranks(_train, 3, "fp32", 2, None, dinov2_recipe, **changes)
    start = build_network(dinov2_recipe(**changes), ds_config(0, "fp32", BATCH).performance).state_dict()
    assert not [name for name in start if torch.equal(start[name], found.teacher[name])]
    assert all(loss["loss"] > 0 for loss in found.losses)


@pytest.fixture(scope="module")
def frozen_teacher(tmp_path_factory):
    place = tmp_path_factory.mktemp("frozen")
    changes = {"model__width": "64", "model__depth": "3", "model__heads": "4", "crops__mask": "dinov2"}
    heads = {f"head__{key}": value for key, value in HEAD.items()} | IBOT_HEAD | {"objective__ibot_weight": "1"}
    changes = {key.replace("__", "."): value for key, value in (changes | heads).items()}
    assert train_tiny(image_folder(place / "root"), place / "run", max_steps=2, changes=changes) is None
    return str(place / "run")


def frozen_recipe(source: str, **changes: str) -> Recipe:
    return tiny_recipe(**{
        **COMMON, "crops__mask": "dinov2", "crops__mask_hides": "false", "model__drop_path": "0",
        "objective__koleo_weight": "0.1", "objective__koleo_ranks": "all", "objective__freeze_prototypes": "0 steps",
        "optimizer__warmup": "1 steps", "teacher__source": source, "head__prototypes": HEAD["prototypes"],
        **IBOT_HEAD, **changes,
    })  # fmt: skip


def _distil(source, stage, **changes):
    recipe = frozen_recipe(source, **changes)
    step = build_step(recipe, ds_config(stage, "fp32", BATCH, gradient_clipping=1.0), 10)
    network = step.teachers["frozen"].network
    losses = [mean_over_ranks([out.loss for out in run_step(step, recipe, window)]) for window in range(2)]
    trained = {id(p) for group in step.engine._optimizer.param_groups for p in group["params"]}
    assert not any(id(p) in trained or p.requires_grad for p in network.parameters())
    assert digest(network.state_dict()) == step.teachers["frozen"].about["digest"]
    return losses, copied(step.teachers["ema"].state())


FEATURES = {"teacher__distill": "features", "crops__mask": "none", "crops__mask_hides": "true"}
FEATURES |= {"ibot_head__prototypes": "65536", "ibot_head__hidden": "2048", "ibot_head__bottleneck": "256"}


@pytest.mark.parametrize(("stage", "changes"), [(0, {}), (3, {}), (2, FEATURES)])
def test_two_ranks_equal_one_process_under_a_frozen_teacher(frozen_teacher, stage, changes):
    """By heads and by features; FP32, 1e-5: sums in another order."""
    (alone,) = run_on_ranks(_distil, frozen_teacher, 0, world=1, **changes)
    for losses, ema in run_on_ranks(_distil, frozen_teacher, stage, **changes):
        assert losses == pytest.approx(alone[0], rel=1e-5)
        assert max_difference(ema, alone[1]) < 1e-5

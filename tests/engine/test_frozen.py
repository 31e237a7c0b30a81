"""A frozen teacher on two ranks: whole, in ZeRO 3's partitions or on the host, under every stage of the student."""

from __future__ import annotations

import pytest
import torch

from dino_ds.engine import placement
from dino_ds.method.build import build_step
from dino_ds.weights.frozen import digest
from tests.engine.harness import ds_config, inputs_of, max_difference, mean_over_ranks, run_step
from tests.planning.measure.tiny import tiny_recipe
from tests.ranks import run_on_ranks
from tests.reference import copied
from tests.run.harness import image_folder, train_tiny

STEPS, BATCH = 2, 8
HEAD = {"prototypes": "48", "hidden": "48", "bottleneck": "16"}
SHAPES = {f"{head}.{key}": value for head in ("head", "ibot_head") for key, value in HEAD.items()}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    place = tmp_path_factory.mktemp("frozen")
    wide = {"model.width": "64", "model.depth": "3", "model.heads": "4", "crops.mask": "dinov2"}
    changes = {**wide, **SHAPES, "objective.ibot_weight": "1"}
    assert train_tiny(image_folder(place / "root"), place / "run", max_steps=2, changes=changes) is None
    return str(place / "run")


def _recipe(source, **changes):
    return tiny_recipe(**{
        "data__global_batch": str(BATCH), "length": "20 steps", "crops__mask": "dinov2",
        "crops__mask_hides": "false", "model__drop_path": "0",
        "objective__centering": "sinkhorn", "objective__ibot_weight": "1", "objective__koleo_weight": "0.1",
        "objective__koleo_ranks": "all", "objective__freeze_prototypes": "0 steps", "optimizer__warmup": "1 steps",
        "optimizer__lr": "0.05", "optimizer__eps": "1e-2", "teacher__momentum": "0.9", "teacher__source": source,
        **{key.replace(".", "__"): value for key, value in SHAPES.items()}, **changes,
    })  # fmt: skip


def _distil(source, stage, precision="fp32", kind="whole", persistent=0, **changes):
    """Losses of each step, the EMA teacher, whether the frozen one is as it was, and bytes of its backbone here."""
    placement.PERSISTENT_BELOW = persistent
    recipe = _recipe(source, **changes)
    config = ds_config(stage, precision, BATCH, dino_ds={"frozen_teacher": kind}, gradient_clipping=1.0)
    step = build_step(recipe, config, 10)
    frozen = step.teachers["frozen"].network
    before = copied(frozen.state_dict()) if kind == "whole" else {}
    losses = [mean_over_ranks([out.loss for out in run_step(step, recipe, window)]) for window in range(STEPS)]
    ids = {id(p) for p in frozen.parameters()}
    trained = [p for group in step.engine._optimizer.param_groups for p in group["params"]]
    assert not ids & {id(p) for p in trained} and not any(p.requires_grad for p in frozen.parameters())
    same = all(torch.equal(before[name], tensor) for name, tensor in frozen.state_dict().items()) if before else None
    if precision == "fp32" and before:
        assert digest(frozen.state_dict()) == step.teachers["frozen"].about["digest"]
    here = [p.ds_tensor if hasattr(p, "ds_tensor") else p for p in frozen.backbone.parameters()]
    held = sum(p.data.numel() for p in frozen.backbone.parameters() if hasattr(p, "ds_tensor"))
    return losses, copied(step.teachers["ema"].state()), same, sum(p.nbytes for p in here), held


@pytest.fixture(scope="module")
def alone(teacher):
    return run_on_ranks(_distil, teacher, 0, world=1)[0]


@pytest.mark.parametrize(
    ("stage", "kind", "precision"), [(0, "sharded", "fp32"), (2, "offloaded", "bf16"), (3, "sharded", "fp32")]
)
def test_two_ranks_equal_one_process_and_a_sharded_teacher_gives_the_same(teacher, alone, stage, kind, precision):
    """FP32, 1e-5: sums in another order. Sharded bit for bit what the whole one gives; each rank keeps its half of the
    backbone, and nothing gathered."""
    whole = run_on_ranks(_distil, teacher, stage, precision)
    sharded = run_on_ranks(_distil, teacher, stage, precision, kind)
    for (losses, ema, same, bytes_whole, _), (losses2, ema2, _, bytes_here, held) in zip(whole, sharded, strict=True):
        assert same
        if precision == "fp32":
            assert losses == pytest.approx(alone[0], rel=1e-5)
            assert max_difference(ema, alone[1]) < 1e-5
        assert losses == losses2
        assert all(torch.equal(ema[name], ema2[name]) for name in ema)
        assert bytes_here == pytest.approx(bytes_whole / 2, rel=0.01)
        assert held == 0


def test_features_on_two_ranks(teacher):
    changes = {"teacher__distill": "features", "crops__mask": "none", "crops__mask_hides": "true"}
    changes |= {f"ibot_head__{key}": value for key, value in
                {"prototypes": "65536", "hidden": "2048", "bottleneck": "256"}.items()}  # fmt: skip
    (one,) = run_on_ranks(_distil, teacher, 0, world=1, **changes)
    for losses, ema, _, _, _ in run_on_ranks(_distil, teacher, 2, kind="sharded", **changes):
        assert losses == pytest.approx(one[0], rel=1e-5)
        assert max_difference(ema, one[1]) < 1e-5


def test_low_precision_is_stored_and_equal_to_autocast(teacher):
    """The matrices lie in bf16: what FP32 ones under autocast give, bit for bit, in half the memory."""
    outputs, sizes = [], []
    for stored in (True, False):
        (found,) = run_on_ranks(_bf16_outputs, teacher, stored, world=1)
        outputs.append(found[0])
        sizes.append(found[1])
    assert all(torch.equal(outputs[0][name], outputs[1][name]) for name in outputs[0])
    assert sizes[0] < 0.6 * sizes[1]


def _bf16_outputs(source, stored):
    is_cast = placement.is_cast
    placement.is_cast = is_cast if stored else lambda module: False
    try:
        recipe = _recipe(source)
        step = build_step(recipe, ds_config(1, "bf16", BATCH), 10)
    finally:
        placement.is_cast = is_cast
    frozen, inputs = step.teachers["frozen"], inputs_of(recipe, torch.arange(4))
    seen = {"global": inputs.crops["global"]}
    found = {name: logits.rows for name, logits in frozen(seen, inputs.masks).items()}
    return found, sum(p.nbytes for p in frozen.backbone.parameters())

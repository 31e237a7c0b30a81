"""A frozen teacher on two ranks, under every stage of the student."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from dino_ds.method import frozen
from dino_ds.method.build import build_step
from dino_ds.models.base import is_cast
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


def _distil(source, stage, precision="fp32", **changes):
    recipe = _recipe(source, **changes)
    step = build_step(recipe, ds_config(stage, precision, BATCH, gradient_clipping=1.0), 10)
    network = step.teachers["frozen"].network
    before = copied(network.state_dict())
    losses = [mean_over_ranks([out.loss for out in run_step(step, recipe, window)]) for window in range(STEPS)]
    trained = {id(p) for group in step.engine._optimizer.param_groups for p in group["params"]}
    assert not any(id(p) in trained or p.requires_grad for p in network.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    if precision == "fp32":
        assert digest(network.state_dict()) == step.teachers["frozen"].about["digest"]
    return losses, copied(step.teachers["ema"].state())


FEATURES = {"teacher__distill": "features", "crops__mask": "none", "crops__mask_hides": "true"}
FEATURES |= {"ibot_head__prototypes": "65536", "ibot_head__hidden": "2048", "ibot_head__bottleneck": "256"}


@pytest.mark.parametrize(("stage", "changes"), [(0, {}), (3, {}), (2, FEATURES)])
def test_two_ranks_equal_one_process(teacher, stage, changes):
    """By heads and by features; FP32, 1e-5: sums in another order."""
    (alone,) = run_on_ranks(_distil, teacher, 0, world=1, **changes)
    for losses, ema in run_on_ranks(_distil, teacher, stage, **changes):
        assert losses == pytest.approx(alone[0], rel=1e-5)
        assert max_difference(ema, alone[1]) < 1e-5


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
    recipe = _recipe(source)
    with mock.patch.object(frozen, "is_cast", is_cast if stored else lambda module: False):
        step = build_step(recipe, ds_config(1, "bf16", BATCH), 10)
    teacher, inputs = step.teachers["frozen"], inputs_of(recipe, torch.arange(4))
    seen = {"global": inputs.crops["global"]}
    outputs = {name: logits.rows for name, logits in teacher(seen, inputs.masks).items()}
    return outputs, sum(p.nbytes for p in teacher.backbone.parameters())

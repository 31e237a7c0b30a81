"""Schedules at their edges; their values are in test_golden.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from dino_ds.config.loading import load_recipe
from dino_ds.engine.optim import DECAY, NO_DECAY, PROTOTYPES, _group_of, group_settings
from dino_ds.engine.schedules import WeightSchedule, cosine_schedule, warmup_schedule
from dino_ds.method.build import build_schedules
from tests.engine.harness import tiny_schedules
from tests.reference_v2 import golden_v2_meta


def test_a_schedule_stays_at_its_end():
    assert [cosine_schedule(i, 1.0, 0.1, 20, warmup_steps=6) for i in (20, 25)] == pytest.approx([0.1, 0.1])


def test_staircase_with_one_stair_an_epoch():
    values = [warmup_schedule(i, 0.04, 0.07, warmup=3, stair=2) for i in range(8)]
    assert values == pytest.approx([0.04, 0.04, 0.055, 0.055, 0.07, 0.07, 0.07, 0.07])


def test_no_warmup():
    assert warmup_schedule(0, 0.04, 0.07, warmup=0) == 0.07
    assert cosine_schedule(0, 1.0, 0.0, 10) == 1.0


def test_prototypes_are_frozen_then_released_once():
    values = [tiny_schedules(freeze_steps=3).at(i) for i in range(6)]
    assert [k.prototypes_frozen for k in values] == [True] * 3 + [False] * 3
    assert [k.unfreeze_prototypes for k in values] == [False] * 3 + [True] + [False] * 2
    assert [k.prototypes_gradient for k in values] == [False] * 3 + [True] * 3
    never = [dataclasses.replace(tiny_schedules(), freeze_steps=0).at(i) for i in range(3)]
    assert not any(k.unfreeze_prototypes or k.unfreeze_backbone for k in never)


def test_weights_ramp_as_the_reference_s():
    """meta.json of tests/golden_v2: DINOv3's schedule after its own warm-up, in which it differs from a Ramp."""
    recorded = golden_v2_meta()["schedules"]["dinov3.linear_warmup_cosine_decay"]
    for run, (start, end) in zip(recorded[1:], ((0.0, 2.0), (0.07, 0.01)), strict=True):
        weight = WeightSchedule(start, end, run["cosine_iterations"])
        expected = run["values"][run["warmup_iterations"] :]
        assert [weight.at(i) for i in range(len(expected))] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_weights_of_a_recipe():
    changes = {"objective.koleo_weight": "0.1", "objective.dino_weight": "1..0.5 over 2 epochs"}
    schedules = build_schedules(load_recipe("vits16", changes), epoch_steps=3)
    assert schedules.at(0).weights == {"dino": 1.0, "koleo": 0.1, "dino_local": 1.0}
    assert schedules.at(5).weights["dino"] == schedules.at(100).weights["dino"] == pytest.approx(0.5)
    assert tiny_schedules().at(3).weights == {"dino": 1.0}


DINOV2 = {
    "data.global_batch": "4", "length": "6 steps", "optimizer.lr": "0.032", "optimizer.lr_scaling": "sqrt",
    "optimizer.warmup": "2 steps", "optimizer.min_lr": "1e-6", "teacher.momentum": "0.9",
    "objective.teacher_temp": "0.07", "objective.teacher_temp_warmup": "4 steps",
    "objective.freeze_prototypes": "4 steps", "objective.frozen_prototypes": "zero_lr",
}  # fmt: skip


def test_a_recipe_s_schedules_are_those_of_dinov2():
    """Recorded by its own training loop (tests/golden_v2); FP64 on both sides: 1e-9."""
    recorded = golden_v2_meta()["trajectory_dinov2"]["runs"]["sinkhorn_untied"]["schedules"]
    schedules = build_schedules(load_recipe("vits16", DINOV2), epoch_steps=2)
    values = [schedules.at(i) for i in range(6)]
    for name in ("lr", "weight_decay", "teacher_momentum", "teacher_temp"):
        assert [getattr(v, name) for v in values] == pytest.approx(recorded[name], rel=1e-9, abs=1e-12), name
    assert all(v.prototypes_gradient for v in values)
    prototypes = [group_settings(v)[PROTOTYPES]["lr"] for v in values]
    assert prototypes == pytest.approx(recorded["last_layer_lr"], rel=1e-9, abs=1e-12)


def test_cosines_are_dinov2_s():
    for run in golden_v2_meta()["schedules"]["dinov2.CosineScheduler"]:
        ends, steps = (run["base_value"], run["final_value"]), run["total_iters"]
        warmup = run.get("warmup_iters", 0), run.get("start_warmup_value", 0.0)
        values = [cosine_schedule(i, *ends, steps, *warmup) for i in range(len(run["values"]))]
        assert values == pytest.approx(run["values"], rel=1e-9, abs=1e-12)


def test_what_is_decayed():
    shapes = {"norm.weight": (4,), "fc.bias": (4,), "fc.weight": (4, 4), "pos_embed": (1, 5, 4)}
    groups = {name: _group_of(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()}
    assert groups == {"norm.weight": NO_DECAY, "fc.bias": NO_DECAY, "fc.weight": DECAY, "pos_embed": DECAY}
    for name in ("head.prototypes.weight", "ibot_head.prototypes.lengths"):
        assert _group_of(name, nn.Parameter(torch.zeros(4, 1))) == PROTOTYPES


def test_group_settings_freeze_by_zero_lr_and_decay():
    frozen, free = (group_settings(tiny_schedules(freeze_steps=3).at(i)) for i in (2, 4))
    assert frozen["prototypes"] == {"lr": 0.0, "weight_decay": 0.0}
    assert free["prototypes"] == free["decay"] != frozen["decay"]
    assert free["no_decay"] == {"lr": free["decay"]["lr"], "weight_decay": 0.0}

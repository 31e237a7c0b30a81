"""Schedules at their edges; their values are in test_golden.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from dino_ds.engine.optim import DECAY, NO_DECAY, PROTOTYPES, _group_of, group_settings
from dino_ds.schedules import cosine_schedule, warmup_schedule
from tests.engine.harness import tiny_schedules


def test_warmup_starts_at_zero_and_ends_at_the_base():
    values = [cosine_schedule(i, 1.0, 0.1, 20, warmup_steps=5) for i in range(20)]
    assert values[0] == 0 and values[4] == values[5] == 1.0
    assert values == values[:5] + sorted(values[5:], reverse=True)
    assert values[-1] > 0.1
    half, end, later = (cosine_schedule(i, 1.0, 0.1, 20, warmup_steps=6) for i in (13, 20, 25))
    assert (half, end, later) == pytest.approx((0.55, 0.1, 0.1))


def test_weight_decay_and_momentum_go_from_one_end_to_the_other():
    ends = {"weight_decay": 0.04, "weight_decay_end": 0.4, "momentum": 0.9, "momentum_end": 1.0}
    schedules = dataclasses.replace(tiny_schedules(), **ends)
    first, last = schedules.at(0), schedules.at(schedules.steps)
    assert (first.weight_decay, last.weight_decay) == pytest.approx((0.04, 0.4))
    assert (first.teacher_momentum, last.teacher_momentum) == pytest.approx((0.9, 1.0))


def test_staircase_with_treads_of_an_epoch():
    values = [warmup_schedule(i, 0.04, 0.07, warmup=3, tread=2) for i in range(8)]
    assert values == pytest.approx([0.04, 0.04, 0.055, 0.055, 0.07, 0.07, 0.07, 0.07])


def test_no_warmup():
    assert warmup_schedule(0, 0.04, 0.07, warmup=0) == 0.07
    assert cosine_schedule(0, 1.0, 0.0, 10) == 1.0


def test_prototypes_are_frozen_then_released_once():
    knobs = [tiny_schedules(freeze_steps=3).at(i) for i in range(6)]
    assert [k.prototypes_frozen for k in knobs] == [True] * 3 + [False] * 3
    assert [k.unfreeze_prototypes for k in knobs] == [False] * 3 + [True] + [False] * 2
    never = [dataclasses.replace(tiny_schedules(), freeze_steps=0).at(i) for i in range(3)]
    assert not any(k.unfreeze_prototypes or k.unfreeze_backbone for k in never)


def test_what_is_decayed():
    """Matrices, tokens and positions; neither biases nor what has one dimension."""
    shapes = {"norm.weight": (4,), "fc.bias": (4,), "fc.weight": (4, 4), "pos_embed": (1, 5, 4)}
    groups = {name: _group_of(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()}
    assert groups == {"norm.weight": NO_DECAY, "fc.bias": NO_DECAY, "fc.weight": DECAY, "pos_embed": DECAY}
    assert _group_of("head.prototypes.weight", nn.Parameter(torch.zeros(4, 4))) == PROTOTYPES


def test_group_settings_freeze_by_zero_lr_and_decay():
    frozen, free = (group_settings(tiny_schedules(freeze_steps=3).at(i)) for i in (2, 4))
    assert frozen["prototypes"] == {"lr": 0.0, "weight_decay": 0.0}
    assert free["prototypes"] == free["decay"] != frozen["decay"]
    assert free["no_decay"] == {"lr": free["decay"]["lr"], "weight_decay": 0.0}

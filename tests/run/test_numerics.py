"""Numbers that go wrong stop a run after three steps and nothing has moved; collapses and constant images are said."""

from __future__ import annotations

import json
import math
import os
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from dino_ds.method.step import TrainingStep
from dino_ds.run.loop import constant_images
from dino_ds.run.metrics import FAR, NEAR, NO_KL, WINDOWS, CollapseAlarm, DriftAlarm, SpreadAlarm
from tests.ranks import run_on_ranks
from tests.reference import copied
from tests.run.drawing_parts import drawing
from tests.run.harness import image_folder, log_of, losses_of, read_metrics, train_tiny

GOOD_STEPS = 2
KEPT = drawing("Buffer", "Mixed")
SCALE = {"fp16.initial_scale_power": "4", "fp16.hysteresis": "1"}


def _dynamic_state(step):
    """Everything that a skipped step must leave alone, on this rank."""
    state = {f"engine.{name}": tensor for name, tensor in step.engine.state().tensors.items()}
    state.update({f"teacher.{name}": tensor for name, tensor in copied(step.teachers["ema"].state()).items()})
    state |= step.objective.own.copy()  # of users' terms
    return {"center": step.objective.statistics["center"].value, **state, "clock": torch.tensor(step.applied_steps)}


def _train_with_bad_numbers(root, run, ds, kind):
    """After two good steps rank 1's images are NaN, or all gradients overflow; what is said and has moved since."""
    original, before, bad = TrainingStep.micro_batch, {}, []

    def micro_batch(step, inputs, *others):
        if step.applied_steps < GOOD_STEPS:
            return original(step, inputs, *others)
        if not before:
            before.update({name: tensor.clone() for name, tensor in _dynamic_state(step).items()})
        bad.append(step)
        if kind == "nan" and os.environ["RANK"] == "1":
            spoilt = {name: [crop * math.nan for crop in group] for name, group in inputs.crops.items()}
            inputs = inputs._replace(crops=spoilt)
        backward, factor = step.engine.backward, 1e30 if kind == "overflow" else 1
        with mock.patch.object(step.engine, "backward", lambda loss: backward(loss * factor)):
            return original(step, inputs, *others)

    with mock.patch.object(TrainingStep, "micro_batch", micro_batch):
        message = train_tiny(root, run, ds, changes=KEPT, ds_changes=SCALE if "fp16" in ds else {})
    after = _dynamic_state(bad[-1])
    return message, len(bad), [name for name in before if not torch.equal(before[name], after[name])]


@pytest.mark.parametrize(
    ("ds", "kind"), [("zero1_fp16.json", "nan"), ("zero2_fp16.json", "overflow"), ("zero3_bf16.json", "nan")]
)
def test_bad_numbers_stop_the_run_and_move_nothing(ds, kind, tmp_path):
    root, run = image_folder(tmp_path / "images"), tmp_path / "run"
    for message, bad, moved in run_on_ranks(_train_with_bad_numbers, root, run, ds, kind):
        assert moved == []
        if kind == "nan":
            assert bad == 3
            assert f"the loss is NaN or infinite after step {GOOD_STEPS}, on images of ranks 1: " in message
            assert "bad_batches.jsonl" in message
        else:
            assert 3 < bad < 10  # the scale is halved from 16 to its minimum of 1
            assert "smallest loss scale" in message
    assert [step for step, _ in losses_of(run)] == list(range(1, GOOD_STEPS + 1))
    if kind == "nan":
        lines = [json.loads(line) for line in (run / "bad_batches.jsonl").read_text().splitlines()]
        assert [(line["step"], line["ranks"], line["in_a_row"]) for line in lines] == [(2, [1], n) for n in (1, 2, 3)]
        assert all(len(line["images"]) == 4 and line["images"][0].endswith(".png") for line in lines)


MOST = math.log(4096)
FLAT, ONE, FINE = (MOST * (1 - NEAR / 2), 0.0), (MOST * NEAR / 2, MOST * NO_KL / 2), (MOST / 2, 1.0)


def _said(alarm, values, first=101):
    return [(step, text) for step, value in enumerate(values, first) if (text := alarm.look(step, *value))]


@pytest.mark.parametrize(
    ("values", "words"), [(FLAT, ["uniform", "lower objective.t"]), (ONE, ["one prototype", "raise"])]
)
def test_a_collapse_is_said_once_with_a_hint_and_again_after_a_recovery(values, words):
    alarm = CollapseAlarm(4096, 100, "masked patch")
    said = _said(alarm, [*[values] * (3 * WINDOWS), FINE, *[values] * (2 * WINDOWS)])
    assert [step for step, _ in said] == [100 + WINDOWS, 101 + 4 * WINDOWS]
    for word in (*words, "figure 7", f"step {100 + WINDOWS}: the teacher gives every masked patch the same target"):
        assert word in said[0][1]


@pytest.mark.parametrize(
    ("values", "warmup"),
    [
        ([FLAT] * (WINDOWS - 1) + [FINE], 100),
        ([FLAT, ONE] * WINDOWS, 100),
        ([(MOST * (1 - NEAR / 2), 1.0)] * 30, 100),  # the student does not follow: no collapse
        ([(MOST * (1 - 2 * NEAR), 0.0)] * 30, 100),
        ([(math.nan, math.nan)] * 30, 100),
        ([FLAT] * 30, 1000),  # nearly uniform targets are how every run starts
    ],
)
def test_what_is_no_collapse_raises_no_alarm(values, warmup):
    assert _said(CollapseAlarm(4096, warmup), values) == []


def test_a_start_that_is_left_is_said_once_and_again_after_a_return():
    """Without labels; a distance at the limit, or none that can be read, is no warning."""
    said = _said(DriftAlarm(), [(value,) for value in (0.0, FAR, 2 * FAR, 3 * FAR, FAR / 2, math.nan, 2 * FAR)])
    assert len(said) == 2 and "preserve_loss 0.200 of 2" in said[0][1] and "raise objective.preserve" in said[0][1]


def test_features_that_do_not_spread_are_a_collapse_after_the_warmup():
    alike = [(NEAR / 2,)] * (2 * WINDOWS)
    ((step, text),) = _said(SpreadAlarm("coding_spread", warmup_steps=104), [*alike, (0.5,)])
    assert step == 104 + WINDOWS and "coding_spread 0.010 of 1" in text and "lower optimizer.lr" in text
    for values in ([(2 * NEAR,)] * 30, [(math.nan,)] * 30, [*alike[: WINDOWS - 1], (0.5,)] * 3):
        assert _said(SpreadAlarm("coding_spread", 0), values) == []


def test_crops_without_contrast():
    """Every channel of both global crops counts; the noise of float arithmetic is no contrast."""
    noise = torch.rand(5, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    flat = torch.full((5, 3, 64, 64), -2.1) + 1e-6 * noise
    one, two = noise.clone(), noise.clone()
    one[:3], two[:2] = flat[:3], flat[:2]
    two[1, 2] = noise[1, 2]  # one channel
    assert constant_images([one, two]).tolist() == [True, False, False, False, False]


def test_a_few_are_said_once(tmp_path):
    root = image_folder(tmp_path / "images")
    for i, path in enumerate(sorted(root.iterdir())[:3]):
        Image.fromarray(np.zeros((40 + i, 48, 3), np.uint8)).save(path)
    changes = {"length": f"{WINDOWS + 2} steps", "objective.freeze_prototypes": "2 steps"}
    assert run_on_ranks(train_tiny, root, tmp_path / "few", changes=changes) == [None, None]
    assert log_of(tmp_path / "few").count("of the images are of one color (constant_images of metrics.jsonl)") == 1
    parts = [record["constant_images"] for record in read_metrics(tmp_path / "few")]
    assert 0 < sum(parts) / len(parts) < 0.4

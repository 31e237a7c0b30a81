"""A skipped step changes nothing: fp16 overflow, NaN on one rank, at every stage."""

from __future__ import annotations

import pytest
import torch

from dino_ds.engine import distributed
from dino_ds.engine.engine import Progress
from dino_ds.method.step import Inputs
from tests.engine.harness import (
    OPTIMIZERS,
    build_step,
    crops,
    ds_config,
    fp32_student,
    max_difference,
    run_windows,
    tiny_network,
)
from tests.ranks import run_on_ranks
from tests.reference import copied
from tests.sample import sampled

BATCH = 8


def _state(step):
    student = fp32_student(step.engine, tiny_network())
    state = {f"student.{name}": tensor for name, tensor in student.items()}
    state.update({f"teacher.{name}": tensor for name, tensor in copied(step.teachers["ema"].state()).items()})
    state.update({name: tensor.clone() for name, tensor in step.engine.state().tensors.items()})  # moments too
    state["center"] = step.objective.statistics["center"].value.clone()
    return state


def _fp16_run(stage, initial_scale_power):
    settings = {"initial_scale_power": initial_scale_power, "hysteresis": 1, "loss_scale_window": 1000}
    step = build_step(ds_config(stage, "fp16", BATCH, 2, fp16_settings=settings))
    before, schedule, scales, skipped = _state(step), step.schedule, [step.engine.loss_scale], 0
    window = 0
    while step.applied_steps == 0 and window < 40:
        at_rest = step.applied_steps
        for m in range(2):
            indices = torch.arange(2) + window * BATCH + 4 * m + 2 * distributed.rank()
            out = step.micro_batch(Inputs(crops(indices)))
        if out.progress is Progress.SKIPPED:
            skipped += 1
            assert step.applied_steps == at_rest == 0 and step.schedule == schedule
            assert max_difference(before, _state(step)) == 0.0
            assert not step.objective.statistics["center"].pending().any()
        scales.append(step.engine.loss_scale)
        window += 1
    losses = run_windows(step, window, 2, BATCH)
    after = {name: tensor for name, tensor in _state(step).items() if name in before}  # without moments, as yet
    return skipped, scales, losses, step.applied_steps, max_difference(before, after)


@pytest.mark.parametrize("stage", [2, 3, pytest.param(1, marks=pytest.mark.full)])
def test_fp16_overflow_moves_nothing_then_training_goes_on(stage):
    for skipped, scales, losses, applied, moved in run_on_ranks(_fp16_run, stage, 12):
        assert skipped >= 2
        assert scales[0] == 2.0**12 and scales[-1] < scales[0]
        assert applied == 3 and moved > 0
        assert all(loss == loss for loss in losses)


def _fp16_equals_fp32(stage):
    losses = []
    for precision in ("fp16", "fp32"):
        # The first gradients are near 1e3: a larger scale would skip the first windows, and compare other data.
        sections = {"fp16_settings": {"initial_scale_power": 2}} if precision == "fp16" else {}
        step = build_step(ds_config(stage, precision, BATCH, **sections))
        losses.append(run_windows(step, 0, 5, BATCH))
    return losses


def test_fp16_trains_as_fp32_does():
    """Ten bits of mantissa in weights and activations: losses within 0.5 %."""
    for fp16, fp32 in run_on_ranks(_fp16_equals_fp32, 2):
        assert fp16 == pytest.approx(fp32, rel=5e-3)


def _nan_on_rank_one(stage, precision, kind="adamw", **sections):
    options = OPTIMIZERS[kind]
    step = build_step(ds_config(stage, precision, BATCH, 2, gradient_clipping=1.0, **sections), options=options)
    run_windows(step, 0, 1, BATCH)
    before, schedule = _state(step), step.schedule
    for m in range(2):
        views = crops(torch.arange(2) + 100 + 2 * distributed.rank())
        if m == 0 and distributed.rank() == 1:
            views["local"][0][0, 0, 0, 0] = float("nan")
        out = step.micro_batch(Inputs(views))
    skipped = out.progress is Progress.SKIPPED
    unmoved = max_difference(before, _state(step)) == 0.0 and step.schedule == schedule and step.applied_steps == 1
    after = run_windows(step, 1, 2, BATCH)
    # The same run without the bad window in between.
    clean = build_step(ds_config(stage, precision, BATCH, 2, gradient_clipping=1.0, **sections), options=options)
    straight = run_windows(clean, 0, 3, BATCH)[1:]
    return skipped, unmoved, after, straight


# DeepSpeed's BF16_Optimizer has a way of its own to skip.
BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}
NAN_CELLS = [
    (0, "fp32", "sgd", {}),
    (1, "bf16", "adamw", {}),
    (1, "bf16", "adamw", BF16_OPTIMIZER),
    (2, "bf16", "lars", {}),
    (0, "fp32", "muon", {}),
    (3, "bf16", "muon", {}),
    (3, "fp32", "adamw", {}),
]


@pytest.mark.parametrize(
    ("stage", "precision", "kind", "sections"), sampled(NAN_CELLS, lambda cell: (cell[0], cell[2], [*cell[3]]))
)
def test_nan_on_one_rank_skips_on_all_and_leaves_no_trace(stage, precision, kind, sections):
    """The run after the bad window equals a run that never met it, bit for bit, momentum included."""
    for skipped, unmoved, after, straight in run_on_ranks(_nan_on_rank_one, stage, precision, kind, **sections):
        assert skipped and unmoved
        assert after == straight


def _overflow_for_ever():
    settings = {"initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 1}
    step = build_step(ds_config(2, "fp16", BATCH, fp16_settings=settings))
    views = crops(torch.arange(8))
    views["global"][0][:] = float("inf")
    told = []
    for _ in range(4):
        step.micro_batch(Inputs(views))
        told.append((step.engine.loss_scale, step.engine.scale_is_exhausted))
    return told


def test_a_loss_scale_that_cannot_fall_any_more_is_told():
    """From 4 to 1; what follows overflows at 1. tests/faults has the error that a run makes of it."""
    assert run_on_ranks(_overflow_for_ever, world=1)[0] == [(2.0, False), (1.0, False), (1.0, True), (1.0, True)]

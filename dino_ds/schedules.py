"""What moves during training, as pure functions of the number of applied optimizer steps.

Source: facebookresearch/dino `cosine_scheduler`: warm-up starts at its start value at step 0 and reaches the base
value at its last step; the cosine approaches its final value and never reaches it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def cosine_schedule(
    step: int, base: float, final: float, steps: int, warmup_steps: int = 0, warmup_start: float = 0.0
) -> float:
    """The value at `step` of [0, steps): linear warm-up to `base`, then half a cosine towards `final`."""
    if step < warmup_steps:
        return _linear(step, warmup_start, base, warmup_steps)
    progress = (step - warmup_steps) / max(steps - warmup_steps, 1)
    return final + 0.5 * (base - final) * (1 + math.cos(math.pi * min(progress, 1.0)))


def warmup_schedule(step: int, start: float, final: float, warmup: int, tread: int = 1) -> float:
    """A staircase of `warmup` treads of `tread` steps from `start` to `final`, then constant.

    DINO raises the teacher's temperature once an epoch: tread = steps of an epoch.
    """
    i = step // tread
    return _linear(i, start, final, warmup) if i < warmup else final


def _linear(i: int, start: float, final: float, points: int) -> float:
    """The i-th of `points` values from `start` to `final`, both included."""
    return start + (final - start) * i / (points - 1) if points > 1 else start


@dataclass(frozen=True)
class ScheduleValues:
    """The values in force during one optimizer step."""

    lr: float
    weight_decay: float
    teacher_momentum: float
    teacher_temp: float
    prototypes_frozen: bool
    unfreeze_prototypes: bool
    backbone_frozen: bool
    unfreeze_backbone: bool


@dataclass(frozen=True)
class Schedules:
    """All lengths in optimizer steps; `lr` is the peak after scaling with the batch."""

    steps: int
    lr: float
    min_lr: float
    warmup_steps: int
    weight_decay: float
    weight_decay_end: float
    momentum: float
    momentum_end: float
    teacher_temp: float
    warmup_teacher_temp: float
    teacher_temp_treads: int
    teacher_temp_tread_steps: int
    freeze_steps: int
    freeze_backbone_steps: int = 0

    def at(self, step: int) -> ScheduleValues:
        """The knobs after `step` applied optimizer steps."""
        return ScheduleValues(
            lr=cosine_schedule(step, self.lr, self.min_lr, self.steps, self.warmup_steps),
            weight_decay=cosine_schedule(step, self.weight_decay, self.weight_decay_end, self.steps),
            teacher_momentum=cosine_schedule(step, self.momentum, self.momentum_end, self.steps),
            teacher_temp=warmup_schedule(
                step,
                self.warmup_teacher_temp,
                self.teacher_temp,
                self.teacher_temp_treads,
                self.teacher_temp_tread_steps,
            ),
            prototypes_frozen=step < self.freeze_steps,
            unfreeze_prototypes=0 < self.freeze_steps == step,
            backbone_frozen=step < self.freeze_backbone_steps,
            unfreeze_backbone=0 < self.freeze_backbone_steps == step,
        )

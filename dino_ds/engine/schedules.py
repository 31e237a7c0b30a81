"""Schedules: pure functions of the number of applied optimizer steps. Source: facebookresearch/dino `cosine_scheduler`:
warm-up starts at its start value at step 0 and reaches the base value at its last step; the cosine never reaches its
final value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


def cosine_schedule(
    step: int, base: float, final: float, steps: int, warmup_steps: int = 0, warmup_start: float = 0.0
) -> float:
    """The value at `step` of [0, steps): linear warm-up to `base`, then half a cosine towards `final`."""
    if step < warmup_steps:
        return _linear(step, warmup_start, base, warmup_steps)
    progress = (step - warmup_steps) / max(steps - warmup_steps, 1)
    return final + 0.5 * (base - final) * (1 + math.cos(math.pi * min(progress, 1.0)))


def warmup_schedule(step: int, start: float, final: float, warmup: int, stair: int = 1) -> float:
    """`warmup` levels from `start` to `final`, each kept for `stair` optimizer steps; then constant. DINO raises the
    teacher's temperature once an epoch: stair = steps of an epoch."""
    i = step // stair
    return _linear(i, start, final, warmup) if i < warmup else final


def _linear(i: int, start: float, final: float, points: int) -> float:
    """The i-th of `points` values from `start` to `final`, both included."""
    return start + (final - start) * i / (points - 1) if points > 1 else start


@dataclass(frozen=True)
class WeightSchedule:
    """The weight of a loss term: half a cosine of `steps` points from `start` to `end`, both included, then constant.
    The first point is step `begin`; before step `start_at` the weight is 0. Source: facebookresearch/dinov3."""

    start: float
    end: float
    steps: int
    begin: int = 0
    start_at: int = 0

    @property
    def moves(self) -> bool:
        return self.start != self.end or self.start_at > 0

    def at(self, step: int) -> float:
        if step < self.start_at:
            return 0.0
        progress = min(max(step - self.begin, 0) / (self.steps - 1), 1.0) if self.steps > 1 else 1.0
        return self.start + (self.end - self.start) * 0.5 * (1 - math.cos(math.pi * progress))


@dataclass(frozen=True)
class Replacements:
    """The steps at which a teacher is replaced by the EMA teacher: step `start` if `at_start`, and after it up to
    `most` times, `every` steps apart. Source: facebookresearch/dinov3."""

    start: int = 0
    at_start: bool = False
    every: int = 0
    most: int = 0

    def due(self, steps: int) -> bool:
        """Whether the teacher is replaced after `steps` applied steps; the next step sees the new teacher."""
        past = steps - self.start
        again = self.every > 0 and 0 < past <= self.every * self.most and past % self.every == 0
        return again or (self.at_start and past == 0)


@dataclass(frozen=True)
class ScheduleValues:
    lr: float
    weight_decay: float
    teacher_momentum: float
    teacher_temp: float
    prototypes_frozen: bool  # whether the prototypes' learning rate and weight decay are 0
    prototypes_gradient: bool  # whether the clipping norm and Adam's moments see the prototypes' gradient
    unfreeze_prototypes: bool
    """Whether the prototypes get their first gradient in this step: their Adam state starts afresh."""
    backbone_frozen: bool
    unfreeze_backbone: bool
    weights: Mapping[str, float]  # the weights of the loss terms, by name
    momenta: Mapping[str, float] = field(default_factory=dict)  # the momenta of further EMA teachers, by name
    replaced: frozenset[str] = frozenset()  # the teachers that become equal to the EMA teacher before this step


@dataclass(frozen=True)
class Schedules:
    """All schedules of a run, with lengths in optimizer steps; `lr` is the peak after scaling with the batch.
    frozen_prototypes: "no_gradient": clipping and Adam don't see their gradient (DINO); "zero_lr": they do (DINOv2).
    warmup_shape: of the learning rate, "linear" or "cosine" (DINOv3). constant: after warm-up the learning rate stays
    at its peak. The teacher's temperature has `teacher_temp_treads` levels of `teacher_temp_tread_steps` steps each."""

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
    frozen_prototypes: str = "no_gradient"
    warmup_shape: str = "linear"
    constant: bool = False
    weights: Mapping[str, WeightSchedule] = field(default_factory=lambda: {"dino": WeightSchedule(1.0, 1.0, 1)})
    momenta: Mapping[str, Callable[[int], float]] = field(default_factory=dict)
    replacements: Mapping[str, Replacements] = field(default_factory=dict)

    def at(self, step: int) -> ScheduleValues:
        absent = self.frozen_prototypes == "no_gradient"
        lr = cosine_schedule(step, self.lr, self.lr if self.constant else self.min_lr, self.steps, self.warmup_steps)
        if step < self.warmup_steps and self.warmup_shape == "cosine":
            lr = WeightSchedule(0.0, self.lr, self.warmup_steps).at(step)
        return ScheduleValues(
            lr=lr,
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
            prototypes_gradient=not (absent and step < self.freeze_steps),
            unfreeze_prototypes=absent and 0 < self.freeze_steps == step,
            backbone_frozen=step < self.freeze_backbone_steps,
            unfreeze_backbone=0 < self.freeze_backbone_steps == step,
            weights={name: weight.at(step) for name, weight in self.weights.items()},
            momenta={name: momentum(step) for name, momentum in self.momenta.items()},
            replaced=frozenset(name for name, replacements in self.replacements.items() if replacements.due(step)),
        )

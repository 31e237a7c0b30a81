"""The algorithm on one screen: what one micro-batch does, and what changes when its window ends. Teachers, running
statistics and schedules advance once per *applied* optimizer step. So gradient accumulation and fp16 overflow are right
by construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dino_ds.basics.ranges import named_range
from dino_ds.basics.seeds import crop_seed, seed_generators
from dino_ds.config.crops import CropGroup, student_masks
from dino_ds.data.feed import Batch
from dino_ds.engine.distributed import RankFlags, rank, sum_across_ranks, world_size
from dino_ds.engine.engine import Engine, Progress
from dino_ds.engine.optim import BACKBONE, DECAY, NO_DECAY, PROTOTYPES
from dino_ds.engine.schedules import Schedules, ScheduleValues
from dino_ds.method.objective import Objective
from dino_ds.method.teacher import Teachers
from dino_ds.models.drop_path import step_key
from dino_ds.models.fused import uncompiled

FLAGS = ("stop", "saved", "save_failed")
"""Flags that ranks send each other with every step; see `dino_ds.engine.distributed.RankFlags`."""
_SCHEDULE, _TARGETS, _LOSS, _UPDATE = range(-5, -9, -1)
"""The parts of a step that draw random numbers independently of each other."""


@dataclass(frozen=True)
class MicroStep:
    """One micro-batch on this rank: loss and scalars (on the device), whether the engine stepped, and the schedule."""

    loss: Tensor
    scalars: dict[str, Tensor]
    progress: Progress
    schedule: ScheduleValues


class TrainingStep:
    """Trains the student and advances teachers, objective and schedules with it; `applied_steps` is the run's clock.

    Args:
        groups: the crop groups of a micro-batch.
        seed: of the random choices that all images of a step share.

    Attributes:
        flags: FLAGS of this rank, which travel with the all-reduce of the objective's running statistics.
    """

    def __init__(
        self,
        engine: Engine,
        teachers: Teachers,
        objective: Objective,
        schedules: Schedules,
        groups: Sequence[CropGroup],
        seed: int = 0,
    ) -> None:
        self.engine, self.teachers, self.objective, self.schedules = engine, teachers, objective, schedules
        self._seed, self._groups = seed, groups
        self._student_groups = [group.name for group in groups if group.student]
        self.applied_steps, self._micro_batches = 0, 0
        self._targets: list[dict[str, Any]] = []
        self._buffers: list[Tensor] = []
        self._own_states: dict[str, Tensor] = {}
        self.flags = RankFlags(FLAGS, engine.device)
        self.window = engine.config.accumulation if objective.whole_step else 1
        self._begin_step()

    def prepare(self, window: Sequence[Batch]) -> None:
        """Make the targets of the next micro-batches; call it at the beginning of a step if `window` is more than 1."""
        assert len(window) == self.window and not self._targets
        self._seed_draws(_TARGETS, rank())
        with named_range("teacher"):
            outputs = [self.teachers(batch.crops, batch.masks, self.schedule) for batch in window]
        with named_range("targets"):
            self._targets = self.objective.targets(outputs, [batch.masks for batch in window], self.schedule)

    def micro_batch(self, batch: Batch, after_backward: Callable[[], None] | None = None) -> MicroStep:
        """Run one micro-batch, after making its targets unless `prepare` has made them. after_backward: called while
        the device works, before the optimizer's results are read."""
        schedule = self.schedule
        if not self._targets:
            self.prepare([batch])
        targets = self._targets.pop(0)
        self._seed_draws(_LOSS, rank())
        self._micro_batches += 1
        with named_range("student"):
            seen = {name: batch.crops[name] for name in self._student_groups}
            hidden = student_masks(self._groups, batch.masks)
            outputs = self.engine(seen, batch.drop_keys, hidden, self.objective.comparisons(targets), self._step_key)
        with named_range("loss"):
            loss, scalars = self.objective.loss(outputs, targets, schedule)
        with named_range("backward"):
            self.engine.backward(loss)
        if after_backward:
            after_backward()
        with named_range("optimizer"):
            progress = self.engine.step()
        if progress is Progress.STEPPED:
            self._finish_step()
        elif progress is Progress.SKIPPED:
            self.objective.drop()
            self._restore_buffers()
            self._micro_batches = 0
        return MicroStep(loss.detach(), scalars, progress, schedule)

    def _finish_step(self) -> None:
        with named_range("center"):
            buffers = [*self.engine.unsynced_statistics(), *self.teachers.unsynced_statistics()]
            flat = torch.cat([tensor.view(-1) for tensor in buffers]) if buffers else self.flags.tensor_to_sum()[:0]
            total = sum_across_ranks(torch.cat((*self.objective.pending(), flat, self.flags.tensor_to_sum())))
            statistics, means, flags = total.split((len(total) - len(flat) - len(FLAGS), len(flat), len(FLAGS)))
            self.objective.commit(statistics)
            self.flags.push(flags)
            if buffers:
                _copy(buffers, (means / world_size()).split([tensor.numel() for tensor in buffers]))
        with named_range("ema"):
            self._seed_draws(_UPDATE)
            self.teachers.update(self.schedule)
        self.applied_steps += 1
        self._begin_step()

    @torch.no_grad()
    def measure(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and scalars of a micro-batch with the schedule of the next step; call it between steps.
        Nothing is dropped at random, and no statistic, buffer or counter changes. Every rank must call it."""
        schedule, crops, masks = self.schedule, batch.crops, batch.masks
        with self.engine.evaluating(), uncompiled():
            outputs = self.teachers(crops, masks, schedule)
            (targets,) = self.objective.targets([outputs], [masks], schedule)
            seen = {name: crops[name] for name in self._student_groups}
            hidden = student_masks(self._groups, masks)
            student = self.engine(seen, None, hidden, self.objective.comparisons(targets), None)
            loss, scalars = self.objective.loss(student, targets, schedule)
        self.objective.drop()
        self._restore_buffers()
        return loss, scalars

    def _moving_buffers(self) -> list[Tensor]:
        return [*self.engine.buffers().values(), *self.teachers.moving_buffers().values()]

    def _restore_buffers(self) -> None:
        """Restore the buffers and users' terms that forward passes have changed: a skipped step must change nothing."""
        _copy(self._moving_buffers(), self._buffers)
        self.objective.own.load(self._own_states)

    def _seed_draws(self, part: int, of_rank: int = -1) -> None:
        """Seed the global generators, from which users' terms and teachers may draw."""
        place = crop_seed(self.applied_steps, self._micro_batches, of_rank)
        seed_generators(crop_seed(self._seed, place, part), self.engine.device)

    def state(self) -> dict[str, Tensor]:
        """The part of the training state that is whole on every rank, by reference; the engine saves its own shards."""
        buffers = {f"student.{name}": tensor for name, tensor in self.engine.buffers(saved=True).items()}
        return {**self.teachers.state(), **self.objective.state(), **buffers}

    def restore(self, state: Mapping[str, Tensor], applied_steps: int) -> None:
        """Restore what `state` returned after `applied_steps` steps, once the engine's shards are loaded. Raises
        KeyError for a tensor that `state` lacks."""
        self.teachers.load_state(state)
        self.objective.load_state(state)
        for name, tensor in self.engine.buffers(saved=True).items():
            tensor.copy_(state[f"student.{name}"])
        self.applied_steps = applied_steps
        self._begin_step()

    def _begin_step(self) -> None:
        self._micro_batches = 0
        self._seed_draws(_SCHEDULE)
        schedule = self.schedule = self.schedules.at(self.applied_steps)
        self.teachers.begin_step(schedule)
        self._step_key = step_key(self._seed, self.applied_steps)
        buffers = self._moving_buffers()
        if len(self._buffers) != len(buffers):
            self._buffers = [buffer.clone() for buffer in buffers]
        else:
            _copy(self._buffers, buffers)
        self._own_states = self.objective.own.copy()
        self.engine.set_groups(schedule)
        self.engine.freeze_prototypes(not schedule.prototypes_gradient)
        self.engine.freeze_backbone(schedule.backbone_frozen)
        # In the reference a frozen layer has no gradient at all, so its Adam state begins here.
        if schedule.unfreeze_prototypes:
            self.engine.reset_optimizer_state(PROTOTYPES)
        if schedule.unfreeze_backbone:
            for name in (DECAY, NO_DECAY):
                self.engine.reset_optimizer_state(BACKBONE + name)


def _copy(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy `values` into `to`, one kernel per dtype: given several dtypes, torch would copy one by one."""
    for dtype in {tensor.dtype for tensor in to}:
        pairs = [pair for pair in zip(to, values, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([target for target, _ in pairs], [other for _, other in pairs])

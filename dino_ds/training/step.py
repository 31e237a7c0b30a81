"""The algorithm on one screen: what one micro-batch does, and what moves when its window ends.

EMA teacher, center and schedules move once per *applied* optimizer step. Accumulation and fp16 overflow are then
right by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dino_ds.config.crops import all_crops
from dino_ds.distributed import RankFlags, sum_across_ranks
from dino_ds.engine.engine import Engine, Progress
from dino_ds.engine.optim import BACKBONE, DECAY, NO_DECAY, PROTOTYPES, group_settings
from dino_ds.objective.dino import DinoLoss
from dino_ds.ranges import named_range
from dino_ds.schedules import Schedules, ScheduleValues
from dino_ds.teacher import Teacher

VOTES = ("stop", "saved", "save_failed")
"""What ranks tell each other with every step; see `dino_ds.distributed.RankFlags`."""


@dataclass(frozen=True)
class MicroStep:
    """Of one micro-batch on this rank: loss and teacher entropy (scalars on the device), and what the step did."""

    loss: Tensor
    teacher_entropy: Tensor
    progress: Progress
    knobs: ScheduleValues


class DinoStep:
    """Student, teacher, objective and schedules moving together; `applied_steps` is the clock of the run.

    `votes` (VOTES) travel with the center's all-reduce.
    """

    def __init__(self, engine: Engine, teacher: Teacher, objective: DinoLoss, schedules: Schedules) -> None:
        self.engine = engine
        self.teacher = teacher
        self.objective = objective
        self.schedules = schedules
        self.applied_steps = 0
        self.flags = RankFlags(VOTES, engine.device)
        self._set_knobs()

    def micro_batch(
        self, crops: dict[str, list[Tensor]], drop_keys: Tensor | None, after_backward: Callable[[], None] | None = None
    ) -> MicroStep:
        """Crops (b, 3, h, w) by group on the device; drop_keys (b,) int64 for stochastic depth.

        after_backward: what the host does while the device works, before the optimizer's results are read.
        """
        knobs = self.knobs
        if self.engine.config.performance.compile == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()  # what graphs gave before may be overwritten now
        with named_range("teacher"):
            teacher_logits = self.teacher(crops["global"])
        with named_range("student"):
            student_logits = self.engine(all_crops(crops), drop_keys)
        with named_range("loss"):
            loss, entropy = self.objective(student_logits, teacher_logits, knobs.teacher_temp)
        with named_range("backward"):
            self.engine.backward(loss)
        if after_backward:
            after_backward()
        with named_range("optimizer"):
            progress = self.engine.step()
        if progress is Progress.STEPPED:
            self._commit(knobs)
        elif progress is Progress.SKIPPED:
            self.objective.center.drop()
        return MicroStep(loss.detach(), entropy, progress, knobs)

    def _commit(self, knobs: ScheduleValues) -> None:
        center = self.objective.center
        with named_range("center"):
            pending = center.pending()
            total = sum_across_ranks(torch.cat((pending, self.flags.tensor_to_sum())))
            center.commit(total[: len(pending)])
            self.flags.push(total[len(pending) :])
        with named_range("ema"):
            self.teacher.update(knobs.teacher_momentum)
        self.applied_steps += 1
        self._set_knobs()

    def restore(self, applied_steps: int) -> None:
        """Set the clock, after student, teacher and center were loaded."""
        self.applied_steps = applied_steps
        self._set_knobs()

    def _set_knobs(self) -> None:
        self.knobs = self.schedules.at(self.applied_steps)
        self.engine.set_groups(group_settings(self.knobs))
        self.engine.freeze_prototypes(self.knobs.prototypes_frozen)
        self.engine.freeze_backbone(self.knobs.backbone_frozen)
        # The reference gives a frozen layer no gradient at all, so its Adam state begins here.
        if self.knobs.unfreeze_prototypes:
            self.engine.reset_optimizer_state(PROTOTYPES)
        if self.knobs.unfreeze_backbone:
            for name in (DECAY, NO_DECAY):
                self.engine.reset_optimizer_state(BACKBONE + name)

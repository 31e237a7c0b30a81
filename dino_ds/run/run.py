"""A run as its loop sees it: the parts that `dino_ds.train` has built, and the state of training.

The loop knows evaluations and pictures only as `PeriodicTask`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from dino_ds.data.feed import Position
from dino_ds.engine import distributed
from dino_ds.method.step import TrainingStep
from dino_ds.method.teacher import Teacher
from dino_ds.run.metrics import RunLog


@dataclass(frozen=True)
class StepContext:
    """The state of a run between two steps; images: number of images in all steps so far.

    Long work calls `stop_requested` every few seconds, which also shows its progress to the watchdog. at_start: the run
    or stage has made no step yet; training: the whole training step, for tasks that need more than the teacher.
    """

    teacher: Teacher
    device: torch.device
    step: int
    images: int
    run_dir: Path
    log: RunLog
    stop_requested: Callable[[], bool]
    at_start: bool = False
    training: TrainingStep | None = None


class PeriodicTask(Protocol):
    """A task that runs after some of the steps, perhaps after step 0 and the last. Every rank calls every method."""

    def due(self, step: int, last: bool) -> bool:
        """Whether to run after `step`, 0 for the untrained network."""
        ...

    def run(self, moment: StepContext) -> bool:
        """Run the task and write down its results; False if a stop was requested before its end."""
        ...

    def missed(self, step: int, at_start: bool) -> bool:
        """Whether the task is due at `step`, and an earlier start reached that step without running the task."""
        return False

    def improved(self) -> bool:
        """Whether the newest result is the best so far: a checkpoint then keeps its weights."""
        return False

    def finished(self) -> str:
        """Why the run is finished before its last step, or ""."""
        return ""

    def ending(self, run_dir: Path, cut: bool) -> list[str]:
        """Lines for the end of the run, the most important one last; cut: whether `--max_steps` has shortened it."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` of an earlier start returned."""


@dataclass
class RunState:
    """The state of a run besides its tensors and its step, which a checkpoint keeps."""

    position: Position = field(default_factory=Position)
    skipped_steps: int = 0
    bad_images: set[str] = field(default_factory=set)

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": asdict(self.position),
            "skipped_steps": self.skipped_steps,
            "bad_images": sorted(self.bad_images),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`. Raises LookupError, TypeError or ValueError if it is not from `state_dict`."""
        self.position = Position(int(state["position"]["epoch"]), int(state["position"]["samples"]))
        self.skipped_steps = int(state["skipped_steps"])
        self.bad_images = {str(name) for name in state["bad_images"]}


@dataclass(frozen=True)
class LoopOptions:
    """Plain values that the loop needs from a recipe and its images, so that it depends on neither.

    images, epoch_steps: number of training images, and optimizer steps of one pass over them. save_every: in steps, or
    None to let `SaveClock` decide. teacher_groups: names of the crop groups whose outputs are the targets.
    predicted_gib: of a rank, or None. part_ends: by source, images up to its last. most_drift: the distance to the
    start's features above which the run ends, or None.
    """

    images: int
    global_batch: int
    epoch_steps: int
    last_step: int
    log_every: int
    save_every: int | None
    max_bad_fraction: float
    teacher_groups: tuple[str, ...]
    predicted_gib: float | None
    part_ends: Mapping[str, int] = field(default_factory=dict)
    most_drift: float | None = None


@dataclass(frozen=True)
class Run:
    path: Path
    options: LoopOptions
    step: TrainingStep
    state: RunState
    evaluations: PeriodicTask | None
    pictures: PeriodicTask | None
    log: RunLog

    def advance(self) -> None:
        """Advance the position by one micro-batch of every rank."""
        consumed = self.step.engine.config.micro_batch * distributed.world_size()
        per_epoch = self.options.epoch_steps * self.options.global_batch
        self.state.position = self.state.position.advance(consumed, per_epoch)

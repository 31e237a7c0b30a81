"""A run as its loop sees it: the parts that `dino_ds.train` has built, the state of training, and the saving of both.

The loop knows evaluations and pictures only as `PeriodicTask`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dino_ds.basics.files import is_gone
from dino_ds.checkpoint.folder import Checkpoints, Saving
from dino_ds.checkpoint.manifest import KEPT, SavedCheckpoint, read_manifest
from dino_ds.data.feed import Position
from dino_ds.engine import distributed
from dino_ds.errors import CheckpointError, StorageError
from dino_ds.method.step import TrainingStep
from dino_ds.method.teacher import Teacher
from dino_ds.run.metrics import RunLog


@dataclass(frozen=True)
class StepContext:
    """The state of a run between two steps; images: of all steps so far; at_start: the run or stage has made no step
    yet. Long work calls `stop_requested` every few seconds, which also shows its progress to the watchdog."""

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

    def run(self, moment: StepContext) -> bool:
        """Run the task and write down its results; False if a stop was requested before its end."""

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
        return asdict(self) | {"bad_images": sorted(self.bad_images)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`. Raises LookupError, TypeError or ValueError if it is not from `state_dict`."""
        self.position = Position(int(state["position"]["epoch"]), int(state["position"]["samples"]))
        self.skipped_steps = int(state["skipped_steps"])
        self.bad_images = {str(name) for name in state["bad_images"]}


@dataclass(frozen=True)
class LoopOptions:
    """Plain values that the loop needs from a recipe and its images, so that it depends on neither.
    epoch_steps: optimizer steps of one pass over the `images`. save_every: in steps, or None to let `SaveClock` decide.
    teacher_groups: names of the crop groups whose outputs are the targets. part_ends: source of a mixture -> index
    after its last image. most_drift: the distance to the start's features above which the run ends, or None."""

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


FIRST_SAVE_AFTER = 5  # steps of this process before its first save, which shows a broken disk early
_OWN = "own."  # prefix of the states of users' terms, in the file of each rank
SAVE_SECONDS = 600.0  # time between later saves, which a run that dies loses at most


@dataclass
class Saver:
    """Saves and loads `step`, `state` and the newest results of `evaluations`; every rank calls every method.

    Lines that methods return are for the log. `saving` commits saves.

    Attributes:
        description: fields of Manifest that are the same in all checkpoints of this start.
        files: the run's `TeacherFiles`, which writes the teacher's backbone to the run folder.
    """

    checkpoints: Checkpoints
    step: TrainingStep
    state: RunState
    evaluations: PeriodicTask | None
    description: Mapping[str, Any]
    files: Any
    background: bool

    def __post_init__(self) -> None:
        self.saved_step = 0  # of the newest checkpoint that this start has loaded or saved
        self._unwritten: list[str] = []  # reasons, not yet logged, why the best teacher could not be written
        self.saving = Saving(self.checkpoints, self.step.flags, self.background, self._write_teacher)

    def check_space(self) -> None:
        """Raises StorageError where the disk has no room for one checkpoint."""
        teacher = sum(tensor.nbytes for tensor in self.step.teachers.exported.backbone.state_dict().values())
        files = 1 if self._best() is None else 2
        self.saving.check_space(self.step.engine.state().tensors, self.step.state(), files * teacher)

    def tidy(self) -> list[str]:
        """Remove what earlier starts wrote after the step to continue from. Raises StorageError."""
        with distributed.raise_on_all_ranks():
            try:
                notes, best = self.checkpoints.tidy(self.saved_step), self._best()
                if best is not None and distributed.rank() == 0:
                    notes += self.files.settle(best, self.saved_step, self._exported)
                return notes
            except OSError as error:
                raise StorageError(f"{error.filename}: {error.strerror}: the run cannot be resumed") from None

    def check_folder(self) -> None:
        """Raises CheckpointError, on all ranks, where the run folder was removed or renamed during the run."""
        with distributed.raise_on_all_ranks():
            run_dir = self.checkpoints.folder.parent
            if distributed.rank() == 0 and is_gone(run_dir / "config.yaml"):
                gone = f"{run_dir} is gone, removed or renamed while the run was at work"
                remedy = "If it was renamed, give --run_dir its new path, and --resume"
                raise CheckpointError(f"{gone}: training ends, and nothing more is saved. {remedy}")

    def save(self, wait: bool) -> list[str]:
        """Write a checkpoint, and the teacher as one file that timm reads, while training continues; with `wait` it is
        complete on return. Raises StorageError on all ranks where that fails, or three saves in a row have failed."""
        step, part = self.step, self.step.engine.state()
        state = {**self.state.state_dict(), "evaluations": self.evaluations.state_dict() if self.evaluations else {}}
        state |= {KEPT: best["step"]} if (best := self._best()) and best["step"] else {}
        manifest = {**self.description, "step": step.applied_steps, "state": state}
        self.saved_step = step.applied_steps
        of_users = step.objective.own
        tensors = part.tensors | {f"{_OWN}{name}": tensor for name, tensor in of_users.moved().items()}
        lines = of_users.unsaved() + self.saving.save(tensors, part.layout, self.step.state(), manifest, wait)
        reasons, self._unwritten = self._unwritten, []
        return lines + [f"warning  the best teacher can't be written: {reason}" for reason in reasons]

    def restore(self, saved: SavedCheckpoint, whole: Mapping[str, Tensor]) -> None:
        """Load a checkpoint, with the tensors `whole`, into the run's parts. Raises CheckpointError if it lacks
        some."""
        state = saved.manifest.state
        try:
            self.step.engine.load_state(saved)
            self.step.objective.own.load(saved.of_rank(distributed.rank(), _OWN))
            self.step.restore(whole, saved.manifest.step)
            self.state.load_state_dict(state)
            if self.evaluations and state["evaluations"]:
                self.evaluations.load_state_dict(state["evaluations"])
        except (LookupError, TypeError, ValueError) as error:  # undamaged, and yet not written by a run
            raise CheckpointError(f"{saved.folder} lacks what a run needs: {error!r}") from error

    def _write_teacher(self, folder: Path) -> None:
        """Write RUN/teacher.safetensors and RUN/teacher.json from a checkpoint, and the best teacher if it is new."""
        saved = SavedCheckpoint(folder, read_manifest(folder))
        step, best = saved.manifest.step, saved.manifest.state["evaluations"].get("best")
        self.files.write(self._exported(saved.whole()), step)
        if best:
            try:
                self.files.settle(best, step, self._exported)
            except OSError as error:  # no reason to end a run: its checkpoint is kept
                self._unwritten.append(f"{error.strerror or error}; its checkpoint stays, the next save tries again")

    def _exported(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The teacher's backbone among the tensors of a state, without those of use in training only."""
        prefix, left_out = "teacher.backbone.", self.step.teachers.exported.backbone.training_only
        backbone = {name.removeprefix(prefix): t for name, t in whole.items() if name.startswith(prefix)}
        return {name: tensor for name, tensor in backbone.items() if name not in left_out}

    def _best(self) -> dict[str, Any] | None:
        """The facts of the best teacher so far, with step None before the first; None if no best teacher is kept."""
        return self.evaluations.state_dict().get("best") if self.evaluations else None

    def save_best(self) -> list[str]:
        """Write the present teacher as the best one, at a step without a checkpoint; returns lines for the log."""
        lines, best = list[str](), self._best()
        if distributed.rank() == 0 and best is not None:
            try:
                self.files.write(self._exported(self.step.state()), self.step.applied_steps, best)
            except OSError as error:
                lines = [f"warning  the best teacher can't be written: {error.strerror or error}; training continues"]
        return lines


class SaveClock:
    """Decides after which optimizer steps a checkpoint is written, the same on all ranks.
    every: steps, 0 for never, or None for a save FIRST_SAVE_AFTER steps after step `start`, with which this process
    began, and then one every SAVE_SECONDS: the slowest rank's first steps say how many steps these are."""

    def __init__(self, every: int | None, start: int) -> None:
        self._every, self._start, self._began = every, start, 0.0

    def due(self, done: int) -> bool:
        """Whether to save after step `done`; every rank asks once after every step."""
        if self._every is not None:
            return self._every > 0 and done % self._every == 0
        steps = done - self._start
        if steps == 1:  # the first step warms up
            self._began = time.monotonic()
        if steps < FIRST_SAVE_AFTER:
            return False
        seconds = max(distributed.gather_objects(time.monotonic() - self._began)) / (FIRST_SAVE_AFTER - 1)
        self._every = max(1, round(SAVE_SECONDS / max(seconds, 1e-6)))
        return True

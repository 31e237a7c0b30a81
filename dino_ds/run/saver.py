"""Collects a checkpoint's contents from the parts of a run, decides when to save, and restores them on a resume."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dino_ds.basics.files import is_gone
from dino_ds.checkpoint.folder import Checkpoints
from dino_ds.checkpoint.manifest import KEPT, SavedCheckpoint, read_manifest
from dino_ds.checkpoint.saving import Saving
from dino_ds.engine import distributed
from dino_ds.errors import CheckpointError, StorageError
from dino_ds.method.step import TrainingStep
from dino_ds.run.run import PeriodicTask, RunState

FIRST_SAVE_AFTER = 5
"""Steps of this process before its first save, which shows a broken disk early."""
_OWN = "own."
"""Prefix of the states of users' terms, in the file of each rank."""
SAVE_SECONDS = 600.0
"""Time between later saves, which a run that dies loses at most."""


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
        self._run_dir = self.checkpoints.folder.parent
        self.saved_step = 0
        """Step of the newest checkpoint that this start has loaded or saved."""
        self._unwritten: list[str] = []
        """Reasons, not yet logged, why the best teacher could not be written after a save."""
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
            if distributed.rank() == 0 and is_gone(self._run_dir / "config.yaml"):
                raise CheckpointError(
                    f"{self._run_dir} is gone, removed or renamed while the run was at work: training ends, and "
                    "nothing more is saved. If it was renamed, give --run_dir its new path, and --resume"
                )

    def save(self, wait: bool) -> list[str]:
        """Write a checkpoint, and the teacher as one file that timm reads.

        Training continues meanwhile, and the checkpoint counts once `saving.poll` has found it complete; with `wait` it
        is complete on return. Raises StorageError on all ranks where that fails, or three saves in a row have failed.
        """
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

    def metrics(self) -> dict[str, float]:
        """Time and size of the last checkpoint of this process, for metrics.jsonl."""
        cost = self.saving.cost
        if cost is None:
            return {}
        return {
            "save_seconds": cost.seconds,
            "save_stall_seconds": cost.stall_seconds,
            "checkpoint_gib": cost.bytes / 2**30,
        }

    def load(self, saved: SavedCheckpoint) -> None:
        """Load a checkpoint of this run into the run's parts. Raises CheckpointError where it lacks something."""
        self._load(saved, saved.whole())
        self.saved_step = saved.manifest.step

    def continue_from(self, saved: SavedCheckpoint) -> list[str]:
        """Load a checkpoint of the previous stage; tensors that it lacks keep their initial values, and are named.

        A teacher that becomes a copy of another one now or later keeps its initial values in any case.
        """
        initial = self.step.state()
        replaced = self.step.schedules.replacements.items()
        begin = tuple(f"teachers.{name}." for name, replacement in replaced if replacement.start >= saved.manifest.step)
        saved_tensors = {key: t for key, t in saved.whole().items() if not key.startswith(begin)}
        self._load(saved, {**initial, **saved_tensors})
        return _name_missing(saved, initial)

    def restart_from(self, saved: SavedCheckpoint) -> list[str]:
        """Load the objective's running statistics alone: the network was built with the teacher's weights."""
        objective = self.step.objective
        initial = objective.state()
        objective.load_state({**initial, **{name: t for name, t in saved.whole().items() if name in initial}})
        return _name_missing(saved, initial)

    def _load(self, saved: SavedCheckpoint, whole: Mapping[str, Tensor]) -> None:
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


def _name_missing(saved: SavedCheckpoint, initial: Mapping[str, Tensor]) -> list[str]:
    """A line on the tensors that a checkpoint lacks, by the first two parts of their names; [] if it has all."""
    missing = initial.keys() - saved.whole().keys()
    names = sorted({".".join(name.split(".")[:2]) for name in missing})
    return [f"it has no {', '.join(names)}: as at the beginning of a run"] if names else []


class SaveClock:
    """Decides after which optimizer steps a checkpoint is written, the same on all ranks.

    every: steps, 0 for never, or None for a save FIRST_SAVE_AFTER steps after step `start`, with which this process
    began, and then one every SAVE_SECONDS: the slowest rank's first steps say how many steps these are.
    """

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

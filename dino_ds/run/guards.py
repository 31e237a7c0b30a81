"""Watches over a run from its first moment: hangs, failures, stop requests, memory, and the run folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from dino_ds.config.ds_schema import COMMUNICATES_IN_STEP, DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.engine import distributed
from dino_ds.engine.process import free_memory
from dino_ds.errors import OutOfMemory, UserError, is_out_of_memory, unwritable
from dino_ds.health.beat import Beat, Heartbeats
from dino_ds.health.monitor import Failures, Watchdog
from dino_ds.health.processes import RunLock
from dino_ds.run.stop import Caller, StopRequests

_PARTS = {
    **dict.fromkeys(("teacher", "targets", "student", "loss", "step"), "the forward pass"),
    "backward": "the backward pass",
    **dict.fromkeys(("optimizer", "center", "ema"), "the optimizer"),
    "evaluate": "evaluation",
    "save": "saving",
    "data": "loading",
    "start": "building the model",
    "end": "the end",
}
"""`Beat.where` in words."""


class Guards(NamedTuple):
    """The guards of one rank; `beat` tells the monitor process what the rank is doing."""

    beat: Beat
    failures: Failures
    stop: StopRequests
    memory: MemoryGuard


@contextmanager
def guarded(run_dir: Path, hang_seconds: float, caller: Caller | None) -> Iterator[Guards]:
    """Watch over the block: an error that ends it is reported once, by the rank on which it began."""
    rank, ranks = distributed.rank(), distributed.world_size()
    with Watchdog(run_dir, rank, ranks, 0.0 if caller else hang_seconds) as watchdog:
        beat = watchdog.beat
        failures, memory = Failures(run_dir, rank, ranks, beat), MemoryGuard(beat)
        stop = StopRequests(beat, failures.stopped_early, failures.ended_at_once)
        if caller:
            stop = caller.stop_requests(beat)
        with failures.reported(), stop, memory.explain():
            yield Guards(beat, failures, stop, memory)


class FolderLock:
    """The lock of a run folder and the heartbeats of this start in it, held from the start's first moment to its end.

    `notes` has a line if the last holder has died. A refused start leaves no trace in the run of another start.
    """

    def __init__(self, run_dir: Path, guards: Guards) -> None:
        self._lock, self._heartbeats = RunLock(run_dir), Heartbeats(run_dir)
        self._beat, self._failures = guards.beat, guards.failures
        self._first, self._prepared = distributed.rank() == 0, False
        self.notes: list[str] = []

    @contextmanager
    def held(self) -> Iterator[FolderLock]:
        """Hold the lock during the block. Raises ConfigError or StorageError, on all ranks, where it can't be taken."""
        try:
            with distributed.raise_on_all_ranks():
                if self._first:
                    self._take()
            self._beat.listed = True
            yield self
        finally:
            if self._first:
                self._release()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Wrap the code that may still refuse this start, by a UserError that all ranks raise."""
        try:
            yield
        except UserError as error:
            if self._lock.guards_a_run:
                self._beat.listed = False  # the run in the folder is another start's
            else:
                self._failures.settle(error)
            raise
        if self._first:
            self._heartbeats.forget_earlier()

    def _take(self) -> None:
        note = self._lock.acquire()
        self.notes = [note] if note else []
        try:
            self._heartbeats.prepare()
        except OSError as error:
            raise unwritable(f"run folder {self._lock.run_dir}", error) from None
        self._prepared = True

    def _release(self) -> None:
        if self._prepared and not self._lock.guards_a_run:
            self._heartbeats.remove()
        elif self._prepared and not self._beat.listed:
            self._heartbeats.bring_back_earlier()
        self._lock.release()


class MemoryGuard:
    """Turns this rank's allocator errors into OutOfMemory, with advice for the run that `expect` was called with."""

    def __init__(self, beat: Beat) -> None:
        self._beat = beat
        self._run: tuple[Recipe, DsConfig, float | None] | None = None

    def expect(self, recipe: Recipe, config: DsConfig, predicted_gib: float | None) -> None:
        self._run = recipe, config, predicted_gib

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Raise OutOfMemory instead of an allocator's error."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(self._text(error)) from error

    def _text(self, error: Exception) -> str:
        part = _PARTS.get(self._beat.where, self._beat.where)
        predicted, cure = "", "take a smaller model, or one more GPU"
        if self._run is not None:
            recipe, config, gib = self._run
            predicted = f"{gib:.2f} GiB were predicted, " if gib is not None else ""
            cure = _cure(part, recipe, config, on_gpu=type(error).__name__ == "OutOfMemoryError")
        request = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        asked = f" ({request[1]} more)" if request else ""
        where = f"out of memory in {part} after step {self._beat.step}{asked}"
        return f"{where}: {predicted}{free_memory()}. To continue with --resume: {cure}"


def _cure(part: str, recipe: Recipe, config: DsConfig, on_gpu: bool) -> str:
    """The setting to change after running out of memory in `part`."""
    if part == "saving" and recipe.save_in_background:
        return "--save_in_background false, which needs no second copy of a checkpoint in host memory"
    if part == "evaluation":
        return f'--eval.bank_images {max(1, recipe.eval.bank_images // 2)}, or --eval.every "0 steps" for none'
    if part == "loading" and not on_gpu:
        return "fewer --data.workers, or a smaller micro-batch"
    if part in ("the optimizer", "building the model", "saving", "the end"):
        more, ds = (
            ("shard", "zero3_bf16")
            if recipe.optimizer.kind in COMMUNICATES_IN_STEP
            else ("shard or offload", "zero2_bf16_offload")
        )
        return f"{more} more, such as --ds_config ds_configs/{ds}.json, or take a smaller model"
    images = config.micro_batch * config.accumulation
    size = next((size for size in range(config.micro_batch // 2, 0, -1) if images % size == 0), 0)
    if size:
        low = config.stage == 1 and config.precision != "fp32"  # stage 1 would accumulate in low precision
        return (
            f"--ds.train_micro_batch_size_per_gpu {size} --ds.gradient_accumulation_steps {images // size}"
            f"{' --ds.zero_optimization.stage 2' if low else ''}, the same global batch in smaller parts"
        )
    return "--ds.activation_checkpointing.number_checkpoints auto, or a smaller model"

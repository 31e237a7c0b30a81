"""Everything that watches over a run from its first moment: hangs, failures, requests to stop, memory, its folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from dino_ds.engine import distributed
from dino_ds.errors import UserError, unwritable
from dino_ds.health.beat import Beat
from dino_ds.health.lock import RunLock
from dino_ds.health.records import Heartbeats
from dino_ds.health.watchdog import Failures, Watchdog
from dino_ds.run.caller import Caller
from dino_ds.run.memory_guard import MemoryGuard
from dino_ds.run.stop import StopRequests


class Guards(NamedTuple):
    """The guards of one rank; `beat` tells its monitor process where it is."""

    beat: Beat
    failures: Failures
    stop: StopRequests
    memory: MemoryGuard


@contextmanager
def guarded(run_dir: Path, hang_seconds: float, caller: Caller | None) -> Iterator[Guards]:
    """Watch over the block: whatever ends it is reported once, by the rank that it began with."""
    rank, ranks = distributed.rank(), distributed.world_size()
    with Watchdog(run_dir, rank, ranks, hang_seconds, ends_hangs=caller is None) as watchdog:
        beat = watchdog.beat
        failures, memory = Failures(run_dir, rank, ranks, beat), MemoryGuard(beat)
        stop = StopRequests(beat, failures.stopped_early, failures.ended_at_once)
        if caller:
            stop = caller.stop_requests(beat)
        with failures.reported(), stop, memory.explain():
            yield Guards(beat, failures, stop, memory)


class FolderLock:
    """The lock of a run folder, with this start's heartbeats in it, held from the start's first moment to its end.

    `notes` has a line if the last holder is gone. A start that was refused leaves no trace in another start's run.
    """

    def __init__(self, run_dir: Path, guards: Guards) -> None:
        self._lock, self._heartbeats = RunLock(run_dir), Heartbeats(run_dir)
        self._beat, self._failures = guards.beat, guards.failures
        self._first = distributed.rank() == 0
        self.notes: list[str] = []

    @contextmanager
    def held(self) -> Iterator[FolderLock]:
        """Hold the lock during the block. Raises ConfigError or StorageError, on all ranks, where it can't be had."""
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
        """Wrap all that may still refuse this start: a UserError in it, which all ranks raise."""
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

    def _release(self) -> None:
        if self._heartbeats.prepared and not self._lock.guards_a_run:
            self._heartbeats.remove()
        elif self._heartbeats.prepared and not self._beat.listed:
            self._heartbeats.bring_back_earlier()
        self._lock.release()

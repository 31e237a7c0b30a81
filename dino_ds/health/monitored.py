"""A rank as its monitor sees it: how long it has made no progress, and its process, from outside."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from typing import Any

import psutil

from dino_ds.health.beat import Beat
from dino_ds.health.processes import find_process

PATIENCE = 3
"""Factor on `hang_seconds` for start-up, the first step, saves and evaluations."""
STACKS_SIGNAL = signal.SIGQUIT
END_SIGNAL = signal.SIGABRT
_STACKS_SECONDS = 2.0


class Standstill:
    """The standstill of a rank: `seconds` since `moves`, its counts of moves and ticks, last changed.

    slowest: the longest wait for a move on a step so far; reported: whether this standstill was reported.
    """

    def __init__(self, beat: Beat) -> None:
        self._beat = beat
        self.moves, self.seconds, self.slowest, self.reported = (-1, 0), 0.0, 0.0, False

    def add(self, seconds: float) -> None:
        """Take a look at the rank, `seconds` after the last one."""
        if self.moved():
            if self._beat.warm and self._beat.phase in ("data", "step"):
                self.slowest = max(self.slowest, self.seconds)
            self.moves, self.seconds, self.reported = (self._beat.moves, self._beat.ticks), 0.0, False
        else:
            self.seconds += seconds

    def moved(self) -> bool:
        """Whether the rank has made progress since the last look."""
        return self.moves != (self._beat.moves, self._beat.ticks)

    def limit(self, hang_seconds: float) -> float:
        """Seconds without progress after which the rank counts as hanging in its phase."""
        patient = not self._beat.warm or self._beat.phase in ("start", "save", "evaluate")
        return hang_seconds * (PATIENCE if patient else 1)


class RankProcess:
    """The process of a rank, seen from outside: its end, its state, its stacks."""

    def __init__(self, pid: int, beat: Beat, stacks: int) -> None:
        self.pid, self._beat, self._stacks = pid, beat, stacks
        self._process = find_process(pid)
        self._ends: list[Any] = [sys.stdin]
        with contextlib.suppress(OSError, AttributeError):  # old kernels
            # Noticed at once, how it ended can still be read: not once its launcher has waited for it.
            self._ends.append(os.pidfd_open(pid))

    def is_gone(self, seconds: float) -> bool:
        """Whether it ends within `seconds`. A forked child of the rank may hold the pipe open, which is not enough."""
        if select.select(self._ends, [], [], seconds)[0] or self._beat.left:
            return True
        return not self._process.alive

    @property
    def state(self) -> str:
        """As psutil says it: "stopped" by a signal, "tracing-stop" by a debugger, "disk-sleep" in the kernel, ..."""
        try:
            return str(psutil.Process(self.pid).status())
        except psutil.Error:
            return "gone"

    @property
    def stopped(self) -> bool:
        return self.state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    def send(self, *signals: int) -> None:
        for number in signals:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def read_stacks(self) -> str:
        """The stacks of all its threads, or a line with its state if it does not give any."""
        before = os.fstat(self._stacks).st_size
        self.send(STACKS_SIGNAL)
        end = time.monotonic() + (0.0 if self.stopped else _STACKS_SECONDS)
        size = before
        while time.monotonic() < end:
            time.sleep(0.1)
            previous, size = size, os.fstat(self._stacks).st_size
            if before < size == previous:
                break
        text = os.pread(self._stacks, size - before, before).decode(errors="replace")
        return text or f"it gave no stacks; its state is {self.state}"

    def end(self) -> None:
        """End it with exit code 6 (see `dino_ds.health.watchdog`), or else by SIGKILL."""
        self.send(END_SIGNAL, signal.SIGCONT)
        if not self.is_gone(3.0):
            self.send(signal.SIGKILL)
            self.is_gone(3.0)

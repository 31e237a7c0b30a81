"""One page of shared memory, through which a rank tells its monitor process where it is without a system call; and the
small files that several processes write.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dino_ds.basics.files import append_whole, discard
from dino_ds.basics.ranges import PARTS

T = TypeVar("T")
LIMIT_SECONDS = 5.0
"""Longest time that a file operation may hold up a process: a dead disk is a common cause of a hang."""


class Event(str):
    """A line of a run's log that also tells programs what happened: an object of events.jsonl.

    kind: what happened; by default the line's first word, if it is padded to nine letters as in "warning  ".
    detail: whether the screen shows the line only with --verbose; the run's files always have it.
    """

    def __new__(cls, line: str, kind: str = "", detail: bool = False, **facts: Any) -> Event:
        event = super().__new__(cls, line)
        word = line[:9].rstrip()
        event.kind = kind or (word if len(word) < min(len(line), 9) and " " not in word else "text")
        event.facts, event.detail = facts, detail
        return event

    kind: str
    detail: bool
    facts: dict[str, Any]

    @property
    def record(self) -> str:
        """The JSON object for events.jsonl, with the current time."""
        return json.dumps({"time": now(), "kind": self.kind, "line": self, **self.facts})


class Disk:
    """Runs file operations in a thread with a time limit. While one hangs, later ones are skipped at once."""

    def __init__(self, limit_seconds: float = LIMIT_SECONDS) -> None:
        self._limit_seconds = limit_seconds
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], T], otherwise: T) -> T:
        """The value of `work`, or `otherwise` if it raises OSError or takes too long, or an earlier one still hangs."""
        if self._thread is not None and self._thread.is_alive():
            return otherwise
        values: list[T] = []

        def keep_value() -> None:
            with contextlib.suppress(OSError):
                values.append(work())

        self._thread = threading.Thread(target=keep_value, daemon=True)
        self._thread.start()
        self._thread.join(self._limit_seconds)
        return values[0] if values else otherwise


def create_exclusively(path: Path, text: str) -> bool:
    """Create `path` with this text; returns False if another process or host was faster. Raises OSError."""
    try:
        with path.open("x") as file:  # a reader may see it empty for a moment
            file.write(text)
    except FileExistsError:
        return False
    except OSError:
        discard(path)
        raise
    return True


def append_line(path: Path, text: str) -> None:
    """Append a line in one write, so that lines of several processes don't mix. Does nothing if that fails."""
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        append_whole(file.fileno(), f"{text}\n".encode())


def log_event(run_dir: Path, event: Event) -> None:
    """Append an event to log.txt and events.jsonl of a run that has a log."""
    if (run_dir / "log.txt").exists():
        append_line(run_dir / "log.txt", stamped(event))
        append_line(run_dir / "events.jsonl", event.record)


def now() -> str:
    """The time, such as "2026-11-21T16:47:54Z": UTC, so that all machines agree and lines can be sorted."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def stamped(text: str) -> str:
    """Prefix each line with the time and a space, as in log.txt."""
    return "\n".join(f"{now()} {line}" for line in text.split("\n"))


PHASES = ("start", "data", "step", "save", "evaluate", "end")
ENDS = ("", "done", "stopped", "error")
STOP_REASONS = ("", "the stop file", "the end of the launcher", "the loss of the run folder")
"""Why a monitor process asks its rank to stop."""


class Beat(ctypes.Structure):
    """One rank's progress, in words of 8 bytes, each written and read atomically.

    moves: how often the phase, the step or its part has changed; ranks do the same things in the same order, so the
    rank with the fewest moves is behind. step: optimizer steps done. warm: the first step, with its longer time limit,
    is done. listed: the monitor may write this rank's heartbeat into the run folder. left: the rank no longer needs its
    monitor.
    """

    moves: int
    ticks: int
    step: int
    warm: int
    listed: int
    left: int
    _phase: int
    _part: int
    _stop_reason: int
    _end: int
    _words = ("moves", "ticks", "step", "warm", "listed", "left", "_phase", "_part", "_stop_reason", "_end")
    _fields_ = [(name, ctypes.c_uint64) for name in _words]
    descriptor: int

    @classmethod
    def shared(cls, descriptor: int | None = None) -> Beat:
        """A new page that other processes can open, or the existing page of a file descriptor."""
        number = os.memfd_create("dino_ds_beat") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(number, mmap.PAGESIZE)
        beat = cls.from_buffer(mmap.mmap(number, mmap.PAGESIZE))
        beat.descriptor = number
        return beat

    def enter(self, phase: str, step: int) -> None:
        """Note that the rank is now in `phase`, with `step` optimizer steps done."""
        self._phase, self.step, self._part = PHASES.index(phase), step, 0
        self.moves += 1

    def enter_part(self, name: str) -> None:
        """Note that the rank is now in part `name` of a step (dino_ds.basics.ranges)."""
        if not self._phase:
            self.tick()  # start-up rehearses a step, perhaps on one rank for all
            return
        self._part = PARTS.index(name) + 1 if name in PARTS else 0
        self.moves += 1

    def tick(self) -> None:
        """Note progress inside a phase; ranks may have different numbers of ticks."""
        self.ticks += 1

    def end(self, how: str) -> None:
        """Note that the rank is about to end, as one of ENDS; only the first call counts."""
        self._end = self._end or ENDS.index(how)

    def request_stop(self, reason: str) -> None:
        """Ask the rank to stop at its next step, for one of STOP_REASONS; called by the monitor."""
        self._stop_reason = STOP_REASONS.index(reason)

    @property
    def stop_reason(self) -> str:
        return STOP_REASONS[self._stop_reason]

    @property
    def phase(self) -> str:
        return PHASES[self._phase]

    @property
    def where(self) -> str:
        """The part of the step that the rank is in, or its phase outside of a step."""
        return PARTS[self._part - 1] if self._part else self.phase

    @property
    def ended(self) -> str:
        return ENDS[self._end]

"""Small files that several processes write, and a time limit for reading files on a disk that may hang."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dino_ds.basics.durable import append_whole, discard

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

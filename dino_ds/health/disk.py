"""A limit for every look at files by a process that must not hang with the disk: watchers, supervisors, dying ranks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LIMIT_SECONDS = 5.0
"""Longer than this no look at files may hold anybody up: a dead disk is a common reason of a hang."""


class Disk:
    """Runs file operations in a thread. While one does not come back, later ones are skipped, and so cost no time."""

    def __init__(self, limit_seconds: float = LIMIT_SECONDS) -> None:
        self._limit_seconds = limit_seconds
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], T], otherwise: T) -> T:
        """The value of `work`; `otherwise` where it raises OSError, takes too long, or an earlier one still does."""
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

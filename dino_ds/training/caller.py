"""The Python program that a run is part of: it is told of every line of metrics, and outlives the run.

What ends a process elsewhere is an exception there, and a run that hangs is not ended: the program's user sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dino_ds.health.beat import Beat
from dino_ds.training.stop import CallersStopRequests

Callback = Callable[[int, dict[str, Any]], object]
"""Gets the step and the line, as metrics.jsonl has it."""


class Caller:
    """`error`: what a callback has raised; the run then stops and saves, as at a signal."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self.error: Exception | None = None
        self._callbacks = tuple(callbacks)
        self._stop: CallersStopRequests | None = None

    def stop_requests(self, beat: Beat) -> CallersStopRequests:
        """Those of a run that begins."""
        self._stop = CallersStopRequests(beat)
        return self._stop

    def tell(self, line: dict[str, Any]) -> None:
        """Call every callback, until one has raised an error."""
        try:
            for callback in self._callbacks:
                callback(line["step"], dict(line))
        except Exception as error:
            self.error, self._callbacks = error, ()
            if self._stop is not None:
                self._stop.request(f"{type(error).__name__} of a callback")

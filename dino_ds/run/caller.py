"""The Python program that a run is part of: it is told of every line of metrics, and outlives the run.

There an exception takes the place of the end of the process, and a run that hangs is reported and goes on.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any

from dino_ds.basics.own_code import default_dtype, put_back
from dino_ds.errors import ConfigError
from dino_ds.health.beat import Beat
from dino_ds.run.stop import StopRequests, signals_to_handle

Callback = Callable[[int, dict[str, Any]], object]
"""Gets the step and the line, as metrics.jsonl has it."""


class Caller:
    """The program's callbacks. An `error` that one of them raises makes the run stop and save."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self.error: Exception | SystemExit | None = None
        self._callbacks = tuple(callbacks)
        self._stop: CallersStopRequests | None = None

    def stop_requests(self, beat: Beat) -> CallersStopRequests:
        """The stop requests of a run that begins."""
        self._stop = CallersStopRequests(beat)
        return self._stop

    def tell(self, line: dict[str, Any]) -> None:
        """Call every callback, until one has raised an error or changed torch's default dtype, which is an error."""
        before = default_dtype()
        try:
            for callback in self._callbacks:
                callback(line["step"], dict(line))
                if told := put_back(before):
                    raise ConfigError(f"callback {getattr(callback, '__name__', callback)} {told}")
        except (Exception, SystemExit) as error:
            self.error, self._callbacks = error, ()
            if self._stop is not None:
                self._stop.request(f"{type(error).__name__} of a callback")

    def let_go(self) -> None:
        """Free what the run had in memory: an error of a callback would keep it, by the frames that led to it."""
        if self.error is not None and self.error.__traceback__ is not None:
            for frame, _ in traceback.walk_stack(self.error.__traceback__.tb_frame):
                with suppress(RuntimeError):  # the frame is still at work
                    frame.clear()


class CallersStopRequests(StopRequests):
    """Stop requests in a program that goes on after the run, such as a notebook: nothing here ends the process.

    Before `install`, and from the second signal on, signals do what they do in that program: Ctrl-C is a
    KeyboardInterrupt. In a thread other than the main one they always do.
    """

    def __init__(self, beat: Beat) -> None:
        super().__init__(beat, lambda _: None, lambda *_: None)

    def __enter__(self) -> CallersStopRequests:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._ask = None  # it holds the engine, and this outlives the run

    def install(self, ask: Callable[[], None]) -> None:
        super().install(ask)
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._note) for number in signals_to_handle()}

    def _note(self, number: int, _frame: object) -> None:
        if not self._signal:
            self.request(signal.Signals(number).name)
        elif self._again() and not self._over:
            signal.signal(number, self._handlers[signal.Signals(number)])
            signal.raise_signal(number)

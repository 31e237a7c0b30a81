"""The Python program that has started a run: it gets every line of metrics, and outlives the run.

In such a program a run ends with an exception instead of the process, and a hanging run is not ended.
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
"""Called with a step and its line of metrics.jsonl."""


class Caller:
    """The program's callbacks. An `error` that one of them raises makes the run stop and save."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self.error: Exception | SystemExit | None = None
        self._callbacks = tuple(callbacks)
        self._stop: CallersStopRequests | None = None

    def stop_requests(self, beat: Beat) -> CallersStopRequests:
        """Create the stop requests of a run that begins."""
        self._stop = CallersStopRequests(beat)
        return self._stop

    def tell(self, line: dict[str, Any]) -> None:
        """Call the callbacks until one raises an error, or changes torch's default dtype, which counts as an error."""
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
        """Free the run's memory: a callback's error would keep it by the frames of the run that called the callback."""
        if self.error is not None and self.error.__traceback__ is not None:
            for frame, _ in traceback.walk_stack(self.error.__traceback__.tb_frame):
                with suppress(RuntimeError):  # the frame is still running
                    frame.clear()


class CallersStopRequests(StopRequests):
    """Stop requests in a program that goes on after the run, such as a notebook: nothing here ends the process.

    Before `install`, and from the second signal on, the program's own handlers act: Ctrl-C is a
    KeyboardInterrupt. If the run is not in the main thread, they always act.
    """

    def __init__(self, beat: Beat) -> None:
        super().__init__(beat, lambda _: None, lambda *_: None)

    def __enter__(self) -> CallersStopRequests:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._ask = None  # it holds the engine, and this object outlives the run

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

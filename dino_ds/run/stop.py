"""Requests to stop a run at its next step: signals, and what the monitor process sees (RUN/stop, a launcher's end); and
the Python program that has started a run, which gets every line of metrics and outlives the run.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any

from dino_ds.basics.own_code import default_dtype, restore_default_dtype
from dino_ds.engine.distributed import set_store_flag, store_flag_is_set
from dino_ds.errors import FORWARDED_SECONDS, STOP_SIGNALS, STOPPED, ConfigError
from dino_ds.health.beat import Beat


class StopRequests:
    """A `with` block in which the first signal asks for a stop, and a second one ends the process at once.

    Before `install` there is nothing to save: the first signal ends the process. `nothing_to_save` (reason) and
    `at_once` (exit code, message) are called before the process ends so. A thread does this, woken by Python's handler
    in C, so that it works while the main thread waits in a collective.
    """

    def __init__(self, beat: Beat, nothing_to_save: Callable[[str], None], at_once: Callable[[int, str], None]) -> None:
        self._beat, self._nothing_to_save, self._at_once = beat, nothing_to_save, at_once
        self._signal = ""
        self._first_at = 0.0
        self._ask: Callable[[], None] | None = None
        self._over = False
        self._handlers: dict[signal.Signals, Any] = {}
        self._name = f"dino_ds stop {next(_numbers)}"

    def __enter__(self) -> StopRequests:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # Python's part of a handler does nothing: the thread does the work.
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in signals_to_handle()}
        self._thread = threading.Thread(target=self._listen, name="dino_ds signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def install(self, ask: Callable[[], None]) -> None:
        """Let the first request call `ask`, from any thread: from now on there is something to save."""
        self._ask = ask

    def request(self, why: str) -> None:
        """Ask for a stop at the next step, as a first signal does; only after `install`."""
        assert self._ask is not None
        _let_go_of_a_closed_terminal()
        self._signal, self._first_at = why, time.monotonic()
        self._ask()

    def finish(self) -> None:
        """Ignore later signals, such as a launcher's SIGTERM to rank after rank: everything is saved."""
        self._over = True

    @property
    def why(self) -> str:
        """The reason for this rank to stop, such as "SIGTERM", "the stop file" or "the end of the launcher", or ""."""
        return self._signal or self._beat.stop_reason

    def requested_anywhere(self) -> bool:
        """Whether a stop was requested on any rank, for work between steps; asks rank 0's store, in 0.1 ms."""
        if self.why:
            set_store_flag(self._name)
        return bool(self.why) or store_flag_is_set(self._name)

    def _listen(self) -> None:
        while data := os.read(self._read, 64):
            for number in data:
                if number in self._handlers and not self._over:
                    self._hear(self._beat.stop_reason or signal.Signals(number).name, number)

    def _hear(self, name: str, number: int) -> None:
        if not self._signal:
            if self._ask is None:
                self._signal = name
                self._nothing_to_save(name)
                _leave(STOPPED)
            self.request(name)
        elif self._again():
            self._at_once(128 + number, f"ended at once by {self._signal} and {name}; what was not saved is lost")
            _leave(128 + number)

    def _again(self) -> bool:
        """Whether a signal that comes now is a second one, not the first one forwarded by a launcher."""
        return time.monotonic() - self._first_at > FORWARDED_SECONDS


def signals_to_handle() -> list[signal.Signals]:
    """The signals that make a run stop; under nohup the end of a terminal is not one of them."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    return [number for number in STOP_SIGNALS if number not in ignored]


def _let_go_of_a_closed_terminal() -> None:
    """Redirect output to a closed terminal to /dev/null: printing would raise an error before all is saved."""
    for output in (1, 2):
        poll = select.poll()
        poll.register(output, 0)
        if any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, output)
            os.close(nowhere)


_numbers = iter(range(sys.maxsize))


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


Callback = Callable[[int, dict[str, Any]], object]
"""Called with a step and its line of metrics.jsonl."""


class Caller:
    """The program's callbacks. An `error` that one of them raises makes the run stop and save."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self.error: Exception | SystemExit | None = None
        self._callbacks = tuple(callbacks)
        self._stop: CallersStopRequests | None = None

    def stop_requests(self, beat: Beat) -> CallersStopRequests:
        self._stop = CallersStopRequests(beat)
        return self._stop

    def tell(self, line: dict[str, Any]) -> None:
        """Call the callbacks until one raises an error, or changes torch's default dtype, which counts as an error."""
        before = default_dtype()
        try:
            for callback in self._callbacks:
                callback(line["step"], dict(line))
                if told := restore_default_dtype(before):
                    raise ConfigError(f"callback {getattr(callback, '__name__', callback)} {told}")
        except (Exception, SystemExit) as error:
            self.error, self._callbacks = error, ()
            if self._stop is not None:
                self._stop.request(f"{type(error).__name__} of a callback")

    def detach(self) -> None:
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

"""Faults, and when they happen: hooks that a test has run in each rank before it starts; the product knows of none.

A fault is a picklable function of the rank. `at_step` lets one happen in the middle of training, `now` before it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

Act = Callable[[], None]


def at_step(step: int, on: tuple[int, ...], do: Act) -> Callable[[int], None]:
    """`do` before the first micro-batch of optimizer step `step` (from 1 on), on the ranks `on`."""
    return functools.partial(_at_step, step, on, do)


def _at_step(step: int, on: tuple[int, ...], do: Act, rank: int) -> None:
    from dino_ds.step import DinoStep

    if rank not in on:
        return
    original, done = DinoStep.micro_batch, []

    def micro_batch(self, *args, **kwargs):
        if self.applied_steps == step - 1 and not done:
            done.append(True)
            mark()
            do()
        return original(self, *args, **kwargs)

    DinoStep.micro_batch = micro_batch


def mark() -> None:
    """The time of the fault, for `Outcome.seconds`: of the first, where several ranks have one."""
    if not Path("fault").exists():
        Path("fault").write_text(str(time.monotonic()))


def send(number: int, times: int = 1, pause: float = 0.0) -> Act:
    """A signal to this process."""
    return functools.partial(_send, number, times, pause)


def _send(number: int, times: int, pause: float) -> None:
    for _ in range(times):
        os.kill(os.getpid(), number)
        time.sleep(pause)


kill = send(signal.SIGKILL)
freeze = send(signal.SIGSTOP)


def fail() -> None:
    raise RuntimeError("planted by a test")


def leave() -> None:
    """End with code 0 while the others go on."""
    sys.stdout.flush()
    os._exit(0)


def sleep() -> None:
    time.sleep(3600)


def hold_gil() -> None:
    """A call into C that never gives the interpreter back: no thread and no signal handler of Python runs again."""
    ctypes.PyDLL(None).sleep(3600)

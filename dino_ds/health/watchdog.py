"""A rank's side of its monitor process: starts it, tells it where the rank is, and lets it end the rank."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import psutil

from dino_ds.basics.ranges import tell
from dino_ds.health.beat import Beat
from dino_ds.health.monitor import MonitorArguments
from dino_ds.health.monitored import END_SIGNAL, PATIENCE, STACKS_SIGNAL

_EXIT_SECONDS = 10.0
"""Time for a monitor to write the last heartbeat."""


def longest_wait(hang_seconds: float) -> float:
    """Seconds that an operation of a process group may take: longer than monitors wait, since they know more."""
    return PATIENCE * hang_seconds + 60 if hang_seconds else 1800.0


class Watchdog:
    """Lets a monitor process watch this rank while the `with` block runs; `beat` is what the rank tells its monitor.

    hang_seconds: see the recipe; with 0 hangs are not looked for, without `ends_hangs` only reported.
    """

    def __init__(self, run_dir: Path, rank: int, world_size: int, hang_seconds: float, ends_hangs: bool = True) -> None:
        self.beat = Beat.shared()
        self._stacks = os.fdopen(os.memfd_create("dino_ds_stacks"), "r+b")  # no disk can hold it up
        job = (rank, world_size, os.getpid(), str(run_dir.absolute()), hang_seconds, ends_hangs, time.time())
        self._arguments = MonitorArguments(*job, beat=self.beat.descriptor, stacks=self._stacks.fileno())
        self._c = ctypes.CDLL(None)
        self._c.signal.restype, self._c.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)

    def __enter__(self) -> Watchdog:
        # Both work in C, and so while another thread holds the GIL. The handler of signal 6 is libc's _exit itself: it
        # is called with the number of the signal, which is the exit code of a rank that hangs.
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True, chain=False)
        leave = ctypes.cast(self._c._exit, ctypes.c_void_p)
        self._previous_handler = self._c.signal(END_SIGNAL, leave)
        self._telling = contextlib.ExitStack()
        self._telling.enter_context(tell(self.beat.enter_part))
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        packages = str(Path(psutil.__file__).parents[1])
        code = f"import sys; sys.path.append({packages!r}); from dino_ds.health.monitor import main; main()"
        self._monitor = subprocess.Popen(
            [sys.executable, "-S", "-c", code, json.dumps(self._arguments)],  # -S: looking for packages takes time
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(self.beat.descriptor, self._stacks.fileno()),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # a signal to the group of the rank leaves it time for the last heartbeat
        )
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        assert self._monitor.stdin is not None
        self._telling.close()
        self.beat.left = True
        self._monitor.stdin.close()
        try:
            self._monitor.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._monitor.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._monitor.wait(1.0)  # one that waits in the kernel for a dead disk ends when that answers
        faulthandler.unregister(STACKS_SIGNAL)
        self._c.signal(END_SIGNAL, self._previous_handler)
        self._stacks.close()
        os.close(self.beat.descriptor)

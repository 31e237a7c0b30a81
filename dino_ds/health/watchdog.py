"""A rank's side of its watcher: it starts the process, tells it where the rank is, and lets itself be ended by it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from dino_ds.health.beat import Beat
from dino_ds.health.watcher import END_SIGNAL, PATIENCE, STACKS_SIGNAL, Orders
from dino_ds.ranges import tell

_LAST_LOOK_SECONDS = 10.0


def longest_wait(hang_seconds: float) -> float:
    """For an operation of a process group, in seconds: the watchers must be first, they know more."""
    return PATIENCE * hang_seconds + 60 if hang_seconds else 1800.0


class Watchdog:
    """A watcher for this rank while the `with` block runs; `beat` is what the rank tells it.

    hang_seconds: see the recipe; 0 leaves hangs alone, and the rest works all the same. Raises nothing: a rank that
    can't have a watcher runs without.
    """

    def __init__(self, run_dir: Path, rank: int, world_size: int, hang_seconds: float) -> None:
        self.beat = Beat()
        self._stacks = os.fdopen(os.memfd_create("dino_ds_stacks"), "r+b")  # no disk can hold it up
        self._orders = Orders(
            rank,
            world_size,
            os.getpid(),
            str(run_dir.absolute()),
            hang_seconds,
            time.time(),
            self.beat.descriptor,
            self._stacks.fileno(),
        )
        self._watcher: subprocess.Popen[bytes] | None = None
        self._c = ctypes.CDLL(None)
        self._c.signal.restype, self._c.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)

    def __enter__(self) -> Watchdog:
        # Both work in C, and so while another thread holds the GIL. The handler of signal 6 is libc's _exit itself: it
        # is called with the number of the signal, which is the exit code of a rank that hangs.
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True, chain=False)
        leave = ctypes.cast(self._c._exit, ctypes.c_void_p)
        self._before = self._c.signal(END_SIGNAL, leave)
        self._telling = contextlib.ExitStack()
        self._telling.enter_context(tell(self.beat.part))
        self._watcher = self._start()
        return self

    def _start(self) -> subprocess.Popen[bytes]:
        package = Path(__file__).parents[2]
        paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(
            # -S: no packages are needed, and looking for them takes time.
            [sys.executable, "-S", "-m", "dino_ds.health.watcher", self._orders.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(self.beat.descriptor, self._stacks.fileno()),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # what ends the group of the rank leaves it the time for the last heartbeat
        )

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        assert self._watcher is not None and self._watcher.stdin is not None
        self._telling.close()
        self.beat.leave()
        self._watcher.stdin.close()
        try:
            self._watcher.wait(_LAST_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            self._watcher.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._watcher.wait(1.0)  # one that waits in the kernel for a dead disk ends when that answers
        faulthandler.unregister(STACKS_SIGNAL)
        self._c.signal(END_SIGNAL, self._before)
        self._stacks.close()
        self.beat.close()

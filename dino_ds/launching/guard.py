"""Kills leftover processes if the supervisor dies: a small process that waits for its end.

Run as a script, with nothing but the standard library: python guard.py NAME=VALUE. Every process of the run carries
that variable in its environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

_GRACE_SECONDS = 4.0
"""For ranks, which see that their launcher is gone, to save and end by themselves."""
_KERNEL_SECONDS = 30.0


class Guard:
    """A `with` block around the run; every process of the run must be started with `environment`."""

    def __init__(self) -> None:
        self._name, self._value = "DINO_DS_SUPERVISOR", f"{os.getpid()}.{time.time_ns()}"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, self._name: self._value}

    @property
    def mark(self) -> str:
        return f"{self._name}={self._value}"

    def __enter__(self) -> Guard:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self.mark],
            stdin=subprocess.PIPE,
            start_new_session=True,  # not in the group that a terminal or killpg ends
        )
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"the end")
            self._process.stdin.close()
        self._process.wait()


def marked_processes(mark: str) -> Iterator[int]:
    """Living processes, but this one, with `mark` (NAME=VALUE) in the environment they were started with."""
    wanted = mark.encode()
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if pid != os.getpid():
            with contextlib.suppress(OSError):  # another user's, or gone
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    yield pid


def end_all(mark: str, grace_seconds: float) -> None:
    """Wait `grace_seconds` for the marked processes to end, then kill them; returns when there are none.

    A process that waits in the kernel for a dead disk can't be killed: it is left after half a minute.
    """
    kill_at = time.monotonic() + grace_seconds
    while (remaining := list(marked_processes(mark))) and time.monotonic() < kill_at + _KERNEL_SECONDS:
        if time.monotonic() > kill_at:
            for pid in remaining:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if not sys.stdin.buffer.read():
        end_all(sys.argv[1], _GRACE_SECONDS)


if __name__ == "__main__":
    main()

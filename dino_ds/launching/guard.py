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

_GRACE_SECONDS = 4.0
"""Time for ranks, which see that their launcher is gone, to save and end by themselves."""
_KERNEL_SECONDS = 30.0


@contextlib.contextmanager
def guard() -> Iterator[str]:
    """A `with` block around a run; yields NAME=VALUE, for the environment of every process of the run."""
    mark = f"DINO_DS_SUPERVISOR={os.getpid()}.{time.time_ns()}"
    # In a session of its own, not in the group that a terminal or killpg ends.
    command = [sys.executable, "-I", "-S", __file__, mark]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield mark
        finally:
            with contextlib.suppress(OSError):
                process.communicate(b"the end")


def marked_processes(mark: str) -> dict[int, dict[str, str]]:
    """Environments by pid: of all living processes, but this one, that were started with `mark` in theirs."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            variables = (folder / "environ").read_text(errors="replace").split("\0")
            if mark in variables and int(folder.name) != os.getpid():
                found[int(folder.name)] = dict(v.split("=", 1) for v in variables if "=" in v)
    return found


def end_all(mark: str, grace_seconds: float) -> None:
    """Wait `grace_seconds` for the marked processes to end, then kill them; returns when there are none.

    A process that waits in the kernel for a dead disk can't be killed: it is left after half a minute.
    """
    kill_at = time.monotonic() + grace_seconds
    while (remaining := marked_processes(mark)) and time.monotonic() < kill_at + _KERNEL_SECONDS:
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

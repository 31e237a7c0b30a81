"""Processes of this machine: a rank as its monitor sees it, what has started it, whether a process still runs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from dino_ds.health.beat import Beat

PATIENCE = 3
"""Factor on `hang_seconds` for start-up, the first step, saves and evaluations."""
STACKS_SIGNAL = signal.SIGQUIT
END_SIGNAL = signal.SIGABRT
_STACKS_SECONDS = 2.0
_SHELLS = ("sh", "bash", "dash", "zsh", "fish", "ksh", "csh", "tcsh")
_SSHD = ("sshd", "sshd-session")
_LEAVES_JOBS = (*_SHELLS, *_SSHD, "su", "sudo", "screen", "tmux: server")
"""Programs that may end and leave running what they have started."""


class Process(NamedTuple):
    """A process by its pid and `ticks`, its start time in clock ticks since boot: no later process has both."""

    pid: int
    ticks: int

    @property
    def alive(self) -> bool:
        """Whether this process is running: it is no zombie, and its pid has not been reused."""
        fields = _stat(self.pid)
        return bool(fields) and int(fields[19]) == self.ticks and fields[0] not in "ZX"


_NOBODY = Process(0, -1)
"""A process that has ended."""


def find_process(pid: int) -> Process:
    """The process of this pid, with 0 ticks if there is none."""
    fields = _stat(pid)
    return Process(pid, int(fields[19]) if fields else 0)


def send_signal(pid: int, *signals: int) -> None:
    """Send signals to a process, if there is one."""
    for number in signals:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may hold spaces and brackets; [] without such a process.

    psutil gives no exit code for another process's child, and its start times shift when the clock is set.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def machine() -> str:
    """The scope in which a pid is unique: this boot of this machine and the container's pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def death_of(pid: int) -> str:
    """How a process ended, while its parent has not waited for it: "by SIGKILL", "with exit code 0", or "" if it is
    too late to tell."""
    fields = _stat(pid)
    if len(fields) <= 49:
        return ""
    code = os.waitstatus_to_exitcode(int(fields[49]))
    if code >= 0:
        return f"with exit code {code}"
    known = -code in set(signal.Signals)  # real-time signals have no names
    return f"by {signal.Signals(-code).name}" if known else f"by signal {-code}"


@functools.cache
def starters() -> tuple[Process, ...]:
    """The processes that this rank must not outlive, found at the first call, which comes before slow imports.

    They are its parent, unless that may leave jobs running, and what started a parent that is DeepSpeed's launch.py:
    `deepspeed`, which dies of a signal without handing it on, or the session of ssh on another machine.
    """
    above: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):  # another user's process, which may be hidden
        parent = psutil.Process().parent()
        if "RANK" in os.environ and parent is not None and parent.pid != 1 and parent.name() not in _LEAVES_JOBS:
            above.append(parent)
            if "deepspeed.launcher.launch" in parent.cmdline():
                if _is_orphan(parent):
                    return (_NOBODY,)
                above += [*_started_launch(parent), *_pdsh_of(parent)]
    return tuple(find_process(process.pid) for process in above)


def _is_orphan(process: psutil.Process) -> bool:
    """Whether another process has adopted this one: it is in the session of its first parent, or began its own."""
    session = os.getsid(process.pid)
    return session != process.pid and os.getsid(process.ppid()) != session


def _started_launch(launch: psutil.Process) -> list[psutil.Process]:
    """`deepspeed`; or the remote shell and the session of ssh, but not a person's, which has a terminal."""
    above = launch.parents()
    if above[0].name() not in _LEAVES_JOBS:
        return above[:1]
    remote = [*itertools.takewhile(lambda process: process.name() in _SHELLS, above)]
    session = above[len(remote)] if len(remote) < len(above) else None
    if session is None or session.name() not in _SSHD or launch.terminal():
        return []
    return [*remote, session]


def _pdsh_of(launch: psutil.Process) -> Iterator[psutil.Process]:
    """The pdsh that started `launch`, with its own parent and every ssh that it runs, if they are on this machine."""
    options = ("--world_info=", "--master_addr=", "--master_port=")
    marks = {word for word in launch.cmdline() if word.startswith(options)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() == "pdsh" and marks <= set(process.cmdline()):
                yield from (process, *process.parents()[:1], *process.children())


class Standstill:
    """How long a rank has made no progress: `seconds` since `moves`, its counts (moves, ticks), last changed."""

    def __init__(self, beat: Beat) -> None:
        self._beat = beat
        self.moves, self.seconds = (-1, 0), 0.0

    def add(self, seconds: float) -> None:
        """Look at the rank again, `seconds` after the last look."""
        if self.moved():
            self.moves, self.seconds = (self._beat.moves, self._beat.ticks), 0.0
        else:
            self.seconds += seconds

    def moved(self) -> bool:
        """Whether the rank has made progress since the last look."""
        return self.moves != (self._beat.moves, self._beat.ticks)

    def limit(self, hang_seconds: float) -> float:
        """Seconds without progress after which the rank counts as hanging in its phase."""
        patient = not self._beat.warm or self._beat.phase in ("start", "save", "evaluate")
        return hang_seconds * (PATIENCE if patient else 1)


class RankProcess:
    """The process of a rank, seen from outside: its end, its state, its stacks."""

    def __init__(self, pid: int, beat: Beat, stacks: int) -> None:
        self.pid, self._beat, self._stacks = pid, beat, stacks
        self._process, self._ends = find_process(pid), [0]  # our standard input: the rank's end breaks the pipe
        with contextlib.suppress(OSError, AttributeError):  # missing on old kernels, and in Pythons built for them
            # Notices the end at once: after the launcher has waited for the rank, its exit code can't be read.
            self._ends.append(os.pidfd_open(pid))

    def is_gone(self, seconds: float) -> bool:
        """Whether the rank ends within `seconds`, also where a forked child of it still holds the pipe open."""
        if select.select(self._ends, [], [], seconds)[0] or self._beat.left:
            return True
        return not self._process.alive

    @property
    def state(self) -> str:
        """In psutil's words: "stopped" by a signal, "tracing-stop" by a debugger, "disk-sleep" in the kernel, ..."""
        try:
            return str(psutil.Process(self.pid).status())
        except psutil.Error:
            return "gone"

    @property
    def stopped(self) -> bool:
        return self.state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    def read_stacks(self) -> str:
        """The stacks of all the rank's threads, or a line with its state if it writes none."""
        before = os.fstat(self._stacks).st_size
        send_signal(self.pid, STACKS_SIGNAL)
        end = time.monotonic() + (0.0 if self.stopped else _STACKS_SECONDS)
        size = before
        while time.monotonic() < end:
            time.sleep(0.1)
            previous, size = size, os.fstat(self._stacks).st_size
            if before < size == previous:
                break
        text = os.pread(self._stacks, size - before, before).decode(errors="replace")
        return text or f"it gave no stacks; its state is {self.state}"

    def end(self) -> None:
        """End it with exit code 6 (see `dino_ds.health.watchdog`), or else by SIGKILL."""
        send_signal(self.pid, END_SIGNAL, signal.SIGCONT)
        if not self.is_gone(3.0):
            send_signal(self.pid, signal.SIGKILL)
            self.is_gone(3.0)

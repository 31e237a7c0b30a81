"""Processes of this machine: a rank as its monitor sees it, its launchers, whether a process is still the same one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from dino_ds.health.beat import Beat

SUPERVISOR = "DINO_DS_SUPERVISOR"
"""Environment variable of all processes of a run: names the `dino-ds launch` process that started them."""
PATIENCE = 3
"""Factor on `hang_seconds` for start-up, the first step, saves and evaluations."""
STACKS_SIGNAL = signal.SIGQUIT
END_SIGNAL = signal.SIGABRT
_STACKS_SECONDS = 2.0
_SHELLS = ("sh", "bash", "dash", "zsh", "fish", "ksh", "csh", "tcsh", "su", "sudo", "sshd", "screen", "tmux: server")


class Process(NamedTuple):
    """A process by its pid and `ticks`, its start time in clock ticks since boot: no later process has both."""

    pid: int
    ticks: int

    @property
    def alive(self) -> bool:
        """Whether this process is running: it is no zombie, and its pid has not been reused."""
        fields = _stat(self.pid)
        return bool(fields) and int(fields[19]) == self.ticks and fields[0] not in "ZX"


def find_process(pid: int) -> Process:
    """The process of this pid, with 0 ticks if there is none."""
    fields = _stat(pid)
    return Process(pid, int(fields[19]) if fields else 0)


def send_signal(pid: int, *signals: int) -> None:
    """Send signals to a process, if there is one."""
    for number in signals:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def own_mark() -> str:
    """The value of SUPERVISOR for processes that this one starts."""
    return "{}.{}".format(*find_process(os.getpid()))


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
    return death_by(-code) if code < 0 else f"with exit code {code}"


def death_by(number: int) -> str:
    """The text of `death_of` for a signal; real-time signals have no names."""
    return f"by {signal.Signals(number).name}" if number in set(signal.Signals) else f"by signal {number}"


def launchers_of(environment: dict[str, str], pid: int) -> list[Process]:
    """Processes that rank `pid`, with this environment, must not outlive: its parent, unless that is a shell, which may
    end and leave its jobs running, and the supervisor."""
    launchers: list[Process] = []
    with contextlib.suppress(psutil.Error):  # another user's process, which may be hidden
        parent = psutil.Process(pid).parent()
        if parent is not None and parent.pid != 1 and "RANK" in environment and parent.name() not in _SHELLS:
            launchers.append(find_process(parent.pid))
    supervisor = [int(part) for part in environment.get(SUPERVISOR, "").split(".") if part.isdecimal()]
    return [*launchers, Process(*supervisor)] if len(supervisor) == 2 else launchers


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

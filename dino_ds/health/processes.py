"""Processes as /proc describes them: their parents, whether they are running, how they ended."""

from __future__ import annotations

import itertools
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_LAUNCHERS = ("deepspeed", "torchrun", "dino-ds", "ds")
_SHELLS = ("sh", "bash", "dash", "zsh", "fish", "ksh", "csh", "tcsh", "su", "sudo", "sshd", "screen", "tmux: server")
_LAUNCHER_MODULES = (
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "torch.distributed.run",
    "torch.distributed.launch",
    "dino_ds",
    "dino_ds.cli.main",
)


@dataclass(frozen=True)
class Process:
    """One process. `ticks`: its start time since the machine's; with the pid it identifies a process for good."""

    pid: int
    parent: int
    state: str
    ticks: int

    @property
    def age(self) -> float:
        """Seconds since it was started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.ticks / os.sysconf("SC_CLK_TCK")


def find_process(pid: int) -> Process | None:
    """The process, or None if there is none, or no /proc."""
    fields = _stat(pid)
    return Process(pid, int(fields[1]), fields[0], int(fields[19])) if fields else None


def exit_status(pid: int) -> int | None:
    """The status, as os.waitpid has it, of a process that has ended and that nobody has waited for, or None."""
    fields = _stat(pid)
    return int(fields[49]) if len(fields) > 49 else None


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat from the state on, or []; the name before it may hold spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def alive(pid: int, ticks: int) -> bool:
    """Whether the process that started at `ticks` is running: not a zombie, and not a later one of that pid."""
    found = find_process(pid)
    return found is not None and found.ticks == ticks and found.state not in "ZX"


def machine() -> str:
    """The scope in which a pid is unique: this boot of this machine and the container's pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def death_of(pid: int) -> str:
    """The way a process has ended: "by SIGKILL", "with exit code 0", or "" if it is too late to tell."""
    status = exit_status(pid)
    if status is None:
        return ""
    return death_by(os.WTERMSIG(status)) if os.WTERMSIG(status) else f"with exit code {os.WEXITSTATUS(status)}"


def death_by(number: int) -> str:
    """The text of `death_of` for a signal; real-time signals have no names."""
    return f"by {signal.Signals(number).name}" if number in set(signal.Signals) else f"by signal {number}"


def launchers_above(pid: int, of_a_rank: bool) -> list[Process]:
    """The processes above `pid`, nearest first, that it must not outlive.

    These are launchers by name and, for a rank (the environment has RANK), its parent unless that is a shell: shells
    may end and leave their jobs behind.
    """
    found: list[Process] = []
    process = find_process(pid)
    while process is not None and process.parent > 1:
        process = find_process(process.parent)
        if process is None:
            break
        if not _is_launcher(process.pid) and (found or not of_a_rank or _is_shell(process.pid)):
            break
        found.append(process)
    return found


def _is_shell(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() in _SHELLS
    except OSError:
        return True


def _is_launcher(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False
    names = {os.path.basename(word) for word in words[:3]}
    modules = {module for flag, module in itertools.pairwise(words) if flag == "-m"}
    return bool(names & set(_LAUNCHERS)) or bool(modules & set(_LAUNCHER_MODULES))

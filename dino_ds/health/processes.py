"""Processes of this machine: the launchers of a rank, whether a process is still the same one, how it ended."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import NamedTuple

import psutil

SUPERVISOR = "DINO_DS_SUPERVISOR"
"""Names, in the environment of every process of a run, the `dino-ds launch` that has started it."""
_LAUNCHERS = ("deepspeed", "torchrun", "torchrun.py", "dino-ds", "ds")
_SHELLS = ("sh", "bash", "dash", "zsh", "fish", "ksh", "csh", "tcsh", "su", "sudo", "sshd", "screen", "tmux: server")
_LAUNCHER_MODULES = (
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "torch.distributed.run",
    "torch.distributed.launch",
    "dino_ds",
    "dino_ds.cli.main",
)


class Process(NamedTuple):
    """`ticks`: its start time since the machine's; with the pid it identifies a process for good."""

    pid: int
    ticks: int

    @property
    def alive(self) -> bool:
        """Whether it is running: not a zombie, and not a later one of that pid."""
        fields = _stat(self.pid)
        return bool(fields) and int(fields[19]) == self.ticks and fields[0] not in "ZX"


def find_process(pid: int) -> Process:
    """The process of this pid, with 0 ticks if there is none."""
    fields = _stat(pid)
    return Process(pid, int(fields[19]) if fields else 0)


def own_mark() -> str:
    """The value of SUPERVISOR for processes that this one starts."""
    return "{}.{}".format(*find_process(os.getpid()))


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat from the state on, or []; the name before it may hold spaces and brackets.

    psutil has neither the exit code of another's child nor a start time that stays when the clock is set.
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
    """The way a process has ended that nobody has waited for: "by SIGKILL", "with exit code 0", or "" if it is too
    late to tell."""
    fields = _stat(pid)
    if len(fields) <= 49:
        return ""
    code = os.waitstatus_to_exitcode(int(fields[49]))
    return death_by(-code) if code < 0 else f"with exit code {code}"


def death_by(number: int) -> str:
    """The text of `death_of` for a signal; real-time signals have no names."""
    return f"by {signal.Signals(number).name}" if number in set(signal.Signals) else f"by signal {number}"


def launchers_above(pid: int, environment: dict[str, str]) -> list[Process]:
    """The processes that `pid`, of this environment, must not outlive.

    These are launchers by name above it, nearest first, for a rank its parent unless that is a shell (shells may end
    and leave their jobs behind), and the supervisor.
    """
    found: list[Process] = []
    try:
        for process in psutil.Process(pid).parents():
            by_name = _is_launcher(process.cmdline())
            is_parent = not found and "RANK" in environment and process.name() not in _SHELLS
            if process.pid == 1 or not (by_name or is_parent):
                break
            found.append(find_process(process.pid))
    except psutil.Error:
        pass
    supervisor = [int(part) for part in environment.get(SUPERVISOR, "").split(".") if part.isdecimal()]
    return [*found, Process(*supervisor)] if len(supervisor) == 2 else found


def _is_launcher(words: list[str]) -> bool:
    names = {os.path.basename(word) for word in words[:3]}
    modules = {module for flag, module in itertools.pairwise(words) if flag == "-m"}
    return bool(names & set(_LAUNCHERS)) or bool(modules & set(_LAUNCHER_MODULES))

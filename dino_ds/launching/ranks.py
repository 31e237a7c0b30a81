"""Watches the processes of one start on this machine: which of them are ranks, and how each of them ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass

import psutil

from dino_ds.health.processes import exit_status, find_process

_SEARCH_SECONDS = 0.2
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class End:
    """`status` as os.waitpid gives it, None where the parent was faster; `rank` None: a launcher."""

    rank: int | None
    status: int | None

    @property
    def killed_by(self) -> int:
        """The signal that ended it, or 0."""
        return 0 if self.status is None else os.WTERMSIG(self.status)

    @property
    def code(self) -> int | None:
        """The exit code; None after a signal, or where nobody saw it."""
        return None if self.status is None or self.killed_by else os.WEXITSTATUS(self.status)


class _Process:
    """A process whose end is to be seen; `rank` as in End."""

    def __init__(self, pid: int, rank: int | None) -> None:
        self.pid, self.rank = pid, rank
        self.descriptor: int | None = None  # in old kernels
        with contextlib.suppress(OSError):
            # Readable at the very moment of the end, before the parent can look.
            self.descriptor = os.pidfd_open(pid)

    def ended(self) -> bool:
        found = find_process(self.pid)
        return found is None or found.state in "ZX"

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)


class LocalRanks:
    """The processes of a launcher (`root`) and its children; `ends` in order of time.

    Ranks are the topmost processes with RANK in their environment.
    """

    def __init__(self, root: subprocess.Popen[bytes]) -> None:
        self.ends: list[End] = []
        self._root, self._seen = root, {root.pid}
        self._watched = [_Process(root.pid, None)]
        self._ranks = set[int]()
        self._expected: int | None = None
        self._world_size = 0
        self._searched = 0.0

    @property
    def alive(self) -> dict[int, int]:
        """Rank -> pid."""
        return {w.rank: w.pid for w in self._watched if w.rank is not None}

    @property
    def launcher_alive(self) -> bool:
        return any(w.rank is None and w.pid == self._root.pid for w in self._watched)

    @property
    def over(self) -> bool:
        """Whether all ranks of the run were on this machine and have ended: the launchers wait for nothing."""
        return 0 < self._world_size == len(self._ranks) and not self.alive

    def poll(self, seconds: float) -> list[End]:
        """Wait at most `seconds` for processes to end; returns the new ends, killed ones first: they came before."""
        if self._expected is None or len(self._ranks) < self._expected:
            self._search()
        descriptors = [w.descriptor for w in self._watched if w.descriptor is not None]
        if len(descriptors) < len(self._watched):
            seconds = min(seconds, _POLL_SECONDS)
        ready = set(select.select(descriptors, [], [], seconds)[0])
        new = []
        for watched in list(self._watched):
            if watched.descriptor in ready or (watched.descriptor is None and watched.ended()):
                new.append(End(watched.rank, exit_status(watched.pid)))
                self._watched.remove(watched)
                watched.close()
                self._reap(watched.pid)
        new.sort(key=lambda end: not end.killed_by)
        self.ends += new
        return new

    def send(self, rank: int, number: int) -> None:
        """A signal to a living rank."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.alive[rank], number)

    def end_launchers(self) -> None:
        """Kill them; how they end no longer matters."""
        for watched in [w for w in self._watched if w.rank is None]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(watched.pid, signal.SIGKILL)
            self._watched.remove(watched)
            watched.close()

    def close(self) -> None:
        """Every process has been ended."""
        self.poll(0.0)
        for watched in self._watched:
            watched.close()
        for pid in self._seen:
            self._reap(pid)

    def _reap(self, pid: int) -> None:
        """Orphans become children of this process."""
        if pid == self._root.pid:
            self._root.poll()
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)

    def _search(self) -> None:
        now = time.monotonic()
        if now - self._searched < _SEARCH_SECONDS:
            return
        self._searched = now
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._root.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error, ValueError):
                    if process.pid not in self._seen:
                        self._register(process)

    def _register(self, process: psutil.Process) -> None:
        environment = process.environ()
        if process.ppid() in (os.getpid(), 1):
            return  # an orphan: what a rank has started that ended before it was looked at
        if "RANK" in environment:
            rank = int(environment["RANK"])
            if rank not in self._ranks:  # else a process that the rank has started
                self._ranks.add(rank)
                self._add(process.pid, rank)
                self._world_size = int(environment.get("WORLD_SIZE", 1))
                self._expected = int(environment.get("LOCAL_SIZE") or environment.get("LOCAL_WORLD_SIZE") or 1)
        elif process.create_time() < time.time() - 1.0:  # a younger one may still become a rank
            self._add(process.pid, None)

    def _add(self, pid: int, rank: int | None) -> None:
        self._seen.add(pid)
        self._watched.append(_Process(pid, rank))

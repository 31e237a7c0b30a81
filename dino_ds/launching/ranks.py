"""Watches the processes of one start on this machine: which of them are ranks, and how each of them ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from dataclasses import dataclass

from dino_ds.health.processes import exit_status, find_process
from dino_ds.launching.guard import marked_processes

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class End:
    """The end of a rank, or of a launcher (`rank` None). `status` as os.waitpid gives it, None if nobody saw it."""

    rank: int | None
    status: int | None

    @property
    def killed_by(self) -> int:
        """The signal that ended it, or 0."""
        return 0 if self.status is None else os.WTERMSIG(self.status)

    @property
    def code(self) -> int | None:
        """The exit code, or None after a signal, or if nobody saw it."""
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
    """The processes of a launcher (`root`) and its children, which carry `mark` (see `guard`); `ends` in order of time.

    Ranks are the topmost processes with RANK in their environment.
    """

    def __init__(self, root: subprocess.Popen[bytes], mark: str) -> None:
        self.ends: list[End] = []
        self._root, self._mark, self._seen = root, mark, {root.pid}
        self._watched = [_Process(root.pid, None)]
        self._ranks = set[int]()
        self._expected: int | None = None
        self._world_size = 0

    @property
    def alive(self) -> dict[int, int]:
        """Pids by rank."""
        return {w.rank: w.pid for w in self._watched if w.rank is not None}

    @property
    def launcher_alive(self) -> bool:
        return any(w.pid == self._root.pid for w in self._watched)

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
                self._forget(watched)
        new.sort(key=lambda end: not end.killed_by)
        self.ends += new
        return new

    def send(self, rank: int, number: int) -> None:
        """Send a signal to a living rank."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.alive[rank], number)

    def end_launchers(self) -> None:
        """Kill the launchers; how they end no longer matters."""
        for watched in [w for w in self._watched if w.rank is None]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(watched.pid, signal.SIGKILL)
            self._forget(watched)

    def close(self) -> None:
        """Clear up when every process has ended."""
        self.poll(0.0)
        for watched in list(self._watched):
            self._forget(watched)

    def _forget(self, watched: _Process) -> None:
        self._watched.remove(watched)
        watched.close()
        if watched.pid == self._root.pid:
            self._root.poll()

    def _search(self) -> None:
        marked = marked_processes(self._mark)
        for pid in marked.keys() - self._seen:
            process, own = find_process(pid), marked[pid]
            # An orphan is no rank, but what a rank has started that ended before it was looked at.
            above = marked.get(process.parent) if process else None
            if process is None or above is None:
                continue
            if "RANK" in own and "RANK" not in above:
                self._watch(pid, int(own["RANK"]))
                self._world_size = int(own.get("WORLD_SIZE", 1))
                self._expected = int(own.get("LOCAL_SIZE") or own.get("LOCAL_WORLD_SIZE") or 1)
            elif "RANK" not in own and process.age > 1.0:  # a younger one may still become a rank
                self._watch(pid, None)

    def _watch(self, pid: int, rank: int | None) -> None:
        self._seen.add(pid)
        self._watched.append(_Process(pid, rank))
        if rank is not None:
            self._ranks.add(rank)

"""The processes of one start on this machine: which of them are ranks, and how each ended, whoever its parent is."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass, field

import psutil

from dino_ds.health.processes import find_process

_SEARCH_SECONDS = 0.2
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class End:
    """`status` as os.waitpid gives it, None where the parent was faster; `rank` None: a launcher."""

    rank: int | None
    status: int | None

    @property
    def signal(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.alive[rank], number)

    def close(self) -> None:
        """Every process has been ended."""
        for watched in self._watched:
            watched.close()
        self._root.wait()
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
        try:
            processes = psutil.Process(self._root.pid).children(recursive=True)
        except psutil.Error:
            return
        for process in processes:
            with contextlib.suppress(psutil.Error, ValueError):
                if process.pid not in self._seen:
                    self._meet(process)

    def _meet(self, process: psutil.Process) -> None:
        environment = process.environ()
        if "RANK" in environment:
            rank = int(environment["RANK"])
            if rank not in self._ranks:
                self._watch(process.pid, rank)
                self._expected = int(environment.get("LOCAL_SIZE") or environment.get("LOCAL_WORLD_SIZE") or 1)
                self.world_size = int(environment.get("WORLD_SIZE", 1))
        elif process.create_time() < time.time() - 1.0:  # a younger one may still become a rank
            self._watch(process.pid, None)

    def _watch(self, pid: int, rank: int | None) -> None:
        self._seen.add(pid)
        self._watched.append(_Watched(pid, rank))
        if rank is not None:
            self._ranks.add(rank)

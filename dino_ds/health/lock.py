"""RUN/lock, which lets one run at a time write into a folder; the monitor of its holder keeps touching it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dino_ds.basics.durable import is_gone
from dino_ds.errors import NO_SPACE, ConfigError, unwritable
from dino_ds.health.files import create_exclusively
from dino_ds.health.processes import Process, find_process, machine

STALE_SECONDS = 60.0
"""A lock of another machine is stale if it has not been touched for this long."""
_TRIES = 20


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock; `machine` and `ticks` (see `processes`) tell it from later ones with this pid."""

    host: str
    pid: int
    started: float
    machine: str
    ticks: int


class RunLock:
    """The lock of one run folder, held by process `pid`: this one, or the rank that this process monitors."""

    def __init__(self, run_dir: Path, pid: int | None = None) -> None:
        self.run_dir, self._path = run_dir, run_dir / "lock"
        self._pid = os.getpid() if pid is None else pid
        self._made: list[Path] = []

    def acquire(self) -> str:
        """Take the lock, and make the folder if needed; returns a note if the last holder is gone, else "".

        Raises ConfigError if a running process holds it, or the folder can't be made or written to. Of several
        processes that try at the same moment exactly one succeeds.
        """
        mine = Holder(socket.gethostname(), self._pid, time.time(), machine(), find_process(self._pid).ticks)
        note = ""
        try:
            self._make_folder()
            for _ in range(_TRIES):
                with self._alone():
                    if create_exclusively(self._path, json.dumps(asdict(mine)) + "\n"):
                        return note
                    note = self._remove_stale() or note
        except OSError as error:
            self.release()
            if error.errno in NO_SPACE:
                raise unwritable(f"run folder {self.run_dir}", error) from None
            raise ConfigError(
                f"run folder {self.run_dir} can't be written to: {error.strerror or error}; fix --run_dir"
            ) from None
        raise ConfigError(
            f"{self._path} is not the lock of a run, which is a file, or several jobs fight for it: remove it, or give "
            "each its own --run_dir"
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let in one process of this machine at a time; on a disk without locks, all at once."""
        folder = os.open(self.run_dir, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def check_free(self, rank: int) -> None:
        """Raise ConfigError if a running process holds the folder. For use before slow imports; takes no lock.

        A rank > 0 judges holders on its own machine only: rank 0 may know that another machine's holder is gone.
        """
        text, holder = self._read(), self.holder()
        if text is None or (rank and holder is not None and holder.machine != machine()):
            return
        if problem := self._in_use(text):
            raise ConfigError(problem)

    def holder(self) -> Holder | None:
        """The process that holds the lock, or None if nobody does or the disk fails."""
        return _parse(self._read() or "")

    def refresh(self) -> bool:
        """Touch the lock; called by its holder's monitor. Returns False if another run has the lock now."""
        holder = self.holder()
        if holder is None or not self._is_mine(holder):
            return holder is None  # a disk that fails to answer is not another run
        with contextlib.suppress(OSError):
            os.utime(self._path)
        return True

    @property
    def guards_a_run(self) -> bool:
        """Whether the folder holds a run and not the lock alone; True if the disk fails."""
        return not (is_gone(self.run_dir / "config.yaml") and is_gone(self.run_dir / "checkpoints"))

    def release(self) -> None:
        """Remove the lock if it is ours, and folders that `acquire` has made and that are still empty."""
        holder = self.holder()
        with contextlib.suppress(OSError):
            if holder is not None and self._is_mine(holder):
                self._path.unlink()
            for folder in reversed(self._made):
                folder.rmdir()

    def _is_mine(self, holder: Holder) -> bool:
        return holder.pid == self._pid and holder.machine == machine() and holder.host == socket.gethostname()

    def _make_folder(self) -> None:
        for folder in (*reversed(self.run_dir.absolute().parents), self.run_dir.absolute()):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                self._made.append(folder)

    def _read(self) -> str | None:
        try:
            return self._path.read_text()
        except OSError:
            return None

    def _in_use(self, text: str) -> str:
        """Why the lock with this text can't be taken, or "" if its holder is gone."""
        age, holder = self._age(), _parse(text)
        if holder is None:  # its writer may not be done yet
            return f"{self.run_dir} has a lock that can't be read: remove {self._path}" if age < STALE_SECONDS else ""
        if holder.machine and holder.machine == machine():
            living, gone = Process(holder.pid, holder.ticks).alive, ""
        else:
            living = age < STALE_SECONDS
            gone = f"; if {holder.host} is gone, it is free in {STALE_SECONDS - age:.0f} s"
        if not living:
            return ""
        return (
            f"{self.run_dir} is in use by pid {holder.pid} on {holder.host} (heartbeat {age:.0f} s ago): "
            f"stop that run, or give another --run_dir{gone}"
        )

    def _age(self) -> float:
        """Seconds since the lock was touched, by the clock of the disk, which several machines share."""
        probe = self._path.with_name(f".clock.{socket.gethostname()}.{os.getpid()}")
        now = time.time()
        with contextlib.suppress(OSError):
            probe.touch()
            now = probe.stat().st_mtime
            probe.unlink()
        try:
            return abs(now - self._path.stat().st_mtime)  # in the future: a clock was wrong
        except OSError:
            return 0.0

    def _remove_stale(self) -> str:
        """Remove the lock of a holder that is gone, and return a note. Raises ConfigError if the holder is running.

        If another machine has just taken the lock, so that this removes its new one, `refresh` tells its holder.
        """
        text = self._read()
        if text is None:
            return ""
        if problem := self._in_use(text):
            raise ConfigError(problem)
        if self._read() != text:  # another machine was faster
            return ""
        self._path.unlink(missing_ok=True)
        holder = _parse(text)
        whose = f" of pid {holder.pid} on {holder.host}, which is gone," if holder else ", which could not be read,"
        return f"{self._path}{whose} was taken over"


def _parse(text: str) -> Holder | None:
    """The holder that a lock's text names, or None if it is not a lock's text."""
    try:
        return Holder(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None

"""Processes of this machine: a rank as its monitor sees it, what has started it, whether a process still runs; and
RUN/lock, by which one run at a time writes into a folder."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from dino_ds.basics.files import is_gone
from dino_ds.errors import NO_SPACE, ConfigError, unwritable
from dino_ds.health.beat import Beat, create_exclusively

PATIENCE = 3  # factor on `hang_seconds` for start-up, the first step, saves and evaluations
STACKS_SIGNAL = signal.SIGQUIT
END_SIGNAL = signal.SIGABRT
_SHELLS = ("sh", "bash", "dash", "zsh", "fish", "ksh", "csh", "tcsh")
_SSHD = ("sshd", "sshd-session")
_LEAVES_JOBS = (*_SHELLS, *_SSHD, "su", "sudo", "screen", "tmux: server")  # may end before what they have started


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
    for number in signals:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may hold spaces and brackets; [] without such a process."""
    # psutil gives no exit code for another process's child, and its start times shift when the clock is set.
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def machine() -> str:
    """The scope in which a pid is unique: this boot of this machine and the container's pid namespace."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def death_of(pid: int) -> str:
    """How a process ended: "by SIGKILL", "with exit code 0", or "" once its parent has waited for it."""
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
    """The processes that this rank must not outlive, found at the first call, which comes before slow imports: its
    parent, unless that may leave jobs running, as shells do; and if the parent is DeepSpeed's launch.py, what started
    it: `deepspeed`, which dies of a signal without passing it on, pdsh, or on another machine the ssh session."""
    above: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):  # another user's process, which may be hidden
        parent = psutil.Process().parent()
        if "RANK" in os.environ and parent is not None and parent.pid != 1 and parent.name() not in _LEAVES_JOBS:
            above.append(parent)
            if "deepspeed.launcher.launch" in parent.cmdline():
                session = os.getsid(parent.pid)  # that of its first parent, or its own
                if session != parent.pid and os.getsid(parent.ppid()) != session:  # another process has adopted it
                    return (Process(0, -1),)  # one that has ended
                above += _started_launch(parent)
                options = ("--world_info=", "--master_addr=", "--master_port=")
                marks = {word for word in parent.cmdline() if word.startswith(options)}
                for process in psutil.process_iter():  # the pdsh that started it, if that is on this machine
                    with contextlib.suppress(psutil.Error):
                        if process.name() == "pdsh" and marks <= set(process.cmdline()):
                            above += [process, *process.parents()[:1], *process.children()]  # with every ssh of it
    return tuple(find_process(process.pid) for process in above)


def _started_launch(launch: psutil.Process) -> list[psutil.Process]:
    """Processes that started launch.py: `deepspeed`, or an ssh session's shells and sshd; [] if it has a terminal."""
    above = launch.parents()
    if above[0].name() not in _LEAVES_JOBS:
        return above[:1]
    remote = [*itertools.takewhile(lambda process: process.name() in _SHELLS, above)]
    session = above[len(remote)] if len(remote) < len(above) else None
    if session is None or session.name() not in _SSHD or launch.terminal():
        return []
    return [*remote, session]


class Standstill:
    """How long a rank has made no progress: `seconds` since `moves`, its counts (moves, ticks), last changed."""

    def __init__(self, beat: Beat) -> None:
        self._beat = beat
        self.moves, self.seconds = (-1, 0), 0.0

    def add(self, seconds: float) -> None:
        if self.moved():
            self.moves, self.seconds = (self._beat.moves, self._beat.ticks), 0.0
        else:
            self.seconds += seconds

    def moved(self) -> bool:
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
        ended = select.select(self._ends, [], [], seconds)[0]
        return bool(ended) or bool(self._beat.left) or not self._process.alive

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
        end, size = time.monotonic() + (0.0 if self.stopped else 2.0), before
        while time.monotonic() < end:
            time.sleep(0.1)
            previous, size = size, os.fstat(self._stacks).st_size
            if before < size == previous:
                break
        text = os.pread(self._stacks, size - before, before).decode(errors="replace")
        return text or f"it gave no stacks; its state is {self.state}"

    def end(self) -> None:
        """End it with exit code 6 (see `dino_ds.health.monitor`), or else by SIGKILL."""
        send_signal(self.pid, END_SIGNAL, signal.SIGCONT)
        if not self.is_gone(3.0):
            send_signal(self.pid, signal.SIGKILL)
            self.is_gone(3.0)


STALE_SECONDS = 60.0  # a lock of another machine is stale if it has not been touched for this long


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock; `machine()` and `Process.ticks` tell it from later ones with this pid."""

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
        """Take the lock, and make the folder if needed; returns a note if the last holder is gone, else "". Of several
        processes one succeeds. Raises ConfigError if a running one holds it, or the folder can't be written to."""
        mine = Holder(socket.gethostname(), self._pid, time.time(), machine(), find_process(self._pid).ticks)
        note = ""
        try:
            for folder in (*reversed(self.run_dir.absolute().parents), self.run_dir.absolute()):
                with contextlib.suppress(FileExistsError):
                    folder.mkdir()
                    self._made.append(folder)
            for _ in range(20):
                with self._alone():
                    if create_exclusively(self._path, json.dumps(asdict(mine)) + "\n"):
                        return note
                    note = self._remove_stale() or note
        except OSError as error:
            self.release()
            if error.errno in NO_SPACE:
                raise unwritable(f"run folder {self.run_dir}", error) from None
            why = f"can't be written to: {error.strerror or error}; fix --run_dir"
            raise ConfigError(f"run folder {self.run_dir} {why}") from None
        why = "is not the lock of a run, which is a file, or several jobs fight for it"
        raise ConfigError(f"{self._path} {why}: remove it, or give each its own --run_dir")

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
        """Raise ConfigError if a running process holds the folder. For use before slow imports; takes no lock. A rank >
        0 judges holders on its own machine only: rank 0 may know that another machine's holder is gone."""
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

    def _read(self) -> str | None:
        with contextlib.suppress(OSError):
            return self._path.read_text()
        return None

    def _in_use(self, text: str) -> str:
        """Why the lock with this text can't be taken, or "" if its holder is gone."""
        # Seconds since the lock was touched, by the clock of the disk, which several machines share.
        probe = self._path.with_name(f".clock.{socket.gethostname()}.{os.getpid()}")
        now, age, holder = time.time(), 0.0, _parse(text)
        with contextlib.suppress(OSError):
            probe.touch()
            now = probe.stat().st_mtime
            probe.unlink()
        with contextlib.suppress(OSError):
            age = abs(now - self._path.stat().st_mtime)  # in the future: a clock was wrong
        if holder is None:  # its writer may not be done yet
            return f"{self.run_dir} has a lock that can't be read: remove {self._path}" if age < STALE_SECONDS else ""
        if holder.machine and holder.machine == machine():
            living, gone = Process(holder.pid, holder.ticks).alive, ""
        else:
            living = age < STALE_SECONDS
            gone = f"; if {holder.host} is gone, it is free in {STALE_SECONDS - age:.0f} s"
        if not living:
            return ""
        who = f"pid {holder.pid} on {holder.host} (heartbeat {age:.0f} s ago)"
        return f"{self.run_dir} is in use by {who}: stop that run, or give another --run_dir{gone}"

    def _remove_stale(self) -> str:
        """Remove the lock of a holder that is gone, and return a note. Raises ConfigError if the holder is running. If
        another machine has just taken the lock, so that this removes its new one, `refresh` tells its holder."""
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
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        return Holder(**json.loads(text))
    return None

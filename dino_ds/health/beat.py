"""The step, the phase and the end of each rank: a page of shared memory by which a rank tells its monitor without a
system call, and the files that the monitors write into RUN/heartbeats."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from dino_ds.basics.files import append_whole, discard, replacing
from dino_ds.basics.ranges import PARTS

T = TypeVar("T")
LIMIT_SECONDS = 5.0  # longest time that a file operation may hold up a process: a dead disk is a common cause of a hang


class Event(str):
    """A line of a run's log that also tells programs what happened: an object of events.jsonl.

    kind: what happened; by default the line's first word, if it is padded to nine letters as in "warning  ".
    detail: whether the screen shows the line only with --verbose; the run's files always have it.
    """

    def __new__(cls, line: str, kind: str = "", detail: bool = False, **facts: Any) -> Event:
        event = super().__new__(cls, line)
        word = line[:9].rstrip()
        event.kind = kind or (word if len(word) < min(len(line), 9) and " " not in word else "text")
        event.facts, event.detail = facts, detail
        return event

    kind: str
    detail: bool
    facts: dict[str, Any]

    @property
    def record(self) -> str:
        """The JSON object for events.jsonl, with the current time."""
        return json.dumps({"time": now(), "kind": self.kind, "line": self, **self.facts})


class Disk:
    """Runs file operations in a thread with a time limit. While one hangs, later ones are skipped at once."""

    def __init__(self, limit_seconds: float = LIMIT_SECONDS) -> None:
        self._limit_seconds = limit_seconds
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], T], otherwise: T) -> T:
        """The value of `work`, or `otherwise` if it raises OSError or takes too long, or an earlier one still hangs."""
        if self._thread is not None and self._thread.is_alive():
            return otherwise
        values: list[T] = []

        def keep_value() -> None:
            with contextlib.suppress(OSError):
                values.append(work())

        self._thread = threading.Thread(target=keep_value, daemon=True)
        self._thread.start()
        self._thread.join(self._limit_seconds)
        return next(iter(values), otherwise)


def create_exclusively(path: Path, text: str) -> bool:
    """Create `path` with this text; returns False if another process or host was faster. Raises OSError."""
    try:
        with path.open("x") as file:  # a reader may see it empty for a moment
            file.write(text)
    except FileExistsError:
        return False
    except OSError:
        discard(path)
        raise
    return True


def append_line(path: Path, text: str) -> None:
    """Append a line in one write, so that lines of several processes don't mix. Does nothing if that fails."""
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        append_whole(file.fileno(), f"{text}\n".encode())


def now() -> str:
    """The time, such as "2026-11-21T16:47:54Z": UTC, so that all machines agree and lines can be sorted."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def stamped(text: str) -> str:
    """Prefix each line with the time and a space, as in log.txt."""
    return "\n".join(f"{now()} {line}" for line in text.split("\n"))


PHASES = ("start", "data", "step", "save", "evaluate", "end")
ENDS = ("", "done", "stopped", "error")
STOP_REASONS = ("", "the stop file", "the end of the launcher", "the loss of the run folder")  # asked by the monitor


class Beat(ctypes.Structure):
    """One rank's progress, in words of 8 bytes, each written and read atomically. moves: how often the phase, the step
    or its part has changed; ranks do the same things in the same order, so the rank with the fewest moves is behind.
    step: optimizer steps done. warm: the first step, with its longer time limit, is done. listed: the monitor may write
    this rank's heartbeat into the run folder. left: the rank no longer needs its monitor."""

    moves: int
    ticks: int
    step: int
    warm: int
    listed: int
    left: int
    _phase: int
    _part: int
    _stop_reason: int
    _end: int
    _words = ("moves", "ticks", "step", "warm", "listed", "left", "_phase", "_part", "_stop_reason", "_end")
    _fields_ = [(name, ctypes.c_uint64) for name in _words]
    descriptor: int

    @classmethod
    def shared(cls, descriptor: int | None = None) -> Beat:
        """A new page that other processes can open, or the existing page of a file descriptor."""
        number = os.memfd_create("dino_ds_beat") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(number, mmap.PAGESIZE)
        beat = cls.from_buffer(mmap.mmap(number, mmap.PAGESIZE))
        beat.descriptor = number
        return beat

    def enter(self, phase: str, step: int) -> None:
        self._phase, self.step, self._part = PHASES.index(phase), step, 0
        self.moves += 1

    def enter_part(self, name: str) -> None:
        """Note that the rank is now in part `name` of a step (dino_ds.basics.ranges)."""
        if not self._phase:
            self.tick()  # start-up rehearses a step, perhaps on one rank for all
            return
        self._part = PARTS.index(name) + 1 if name in PARTS else 0
        self.moves += 1

    def tick(self) -> None:
        """Note progress inside a phase; ranks may have different numbers of ticks."""
        self.ticks += 1

    def end(self, how: str) -> None:
        """Note that the rank is about to end, as one of ENDS; only the first call counts."""
        self._end = self._end or ENDS.index(how)

    def request_stop(self, reason: str) -> None:
        """Ask the rank to stop at its next step, for one of STOP_REASONS; called by the monitor."""
        self._stop_reason = STOP_REASONS.index(reason)

    @property
    def stop_reason(self) -> str:
        return STOP_REASONS[self._stop_reason]

    @property
    def phase(self) -> str:
        return PHASES[self._phase]

    @property
    def where(self) -> str:
        """The part of the step that the rank is in, or its phase outside of a step."""
        return PARTS[self._part - 1] if self._part else self.phase

    @property
    def ended(self) -> str:
        return ENDS[self._end]


SILENT_SECONDS = 15.0  # a rank without a heartbeat for this long counts as gone: its host or its monitor may be
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, RecursionError)


@dataclass(frozen=True)
class Heartbeat:
    """One rank as its monitor last saw it. `step`: optimizer steps done. `where`: the phase, or the part of the step.
    `moves`: see `Beat`. `stopped`: by SIGSTOP or a debugger. `ended`: "" while it runs, then done, stopped or error.
    `cut_off`: the address of rank 0 if it did not answer when the rank was found to hang."""

    rank: int
    host: str
    pid: int
    started: float
    time: float
    step: int
    phase: str
    where: str
    moves: int
    seconds_since_progress: float
    stopped: bool = False
    ended: str = ""
    cut_off: str = ""


@dataclass(frozen=True)
class Failure:
    """The first failure of a run, which ends all ranks. `kind`: error, died, hang or stopped."""

    rank: int
    host: str
    step: int
    kind: str
    code: int
    message: str


class Heartbeats:
    """The files of RUN/heartbeats, new for each start. Their reads and writes wait a limited time and never raise."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self.folder = run_dir, run_dir / "heartbeats"
        self._failure_path, self._before = self.folder / "first_failure.json", run_dir / "heartbeats.before"
        self.disk = Disk()

    def prepare(self) -> None:
        """Make a new, empty folder, on rank 0; the earlier start's folder is renamed and kept. Raises OSError."""
        new = self._run_dir / "heartbeats.new"
        for left_over in (new, self._before):
            discard(left_over)
        new.mkdir(parents=True)
        with contextlib.suppress(OSError):
            self.folder.rename(self._before)
        new.rename(self.folder)

    def forget_earlier(self) -> None:
        discard(self._before)

    def bring_back_earlier(self) -> None:
        """Undo `prepare`, for a start that was refused."""
        self.remove()
        with contextlib.suppress(OSError):
            self._before.rename(self.folder)

    def remove(self) -> None:
        """Remove the folder, even if a monitor writes into it at this moment."""
        old = self._run_dir / "heartbeats.old"
        with contextlib.suppress(OSError):
            self.folder.rename(old)
        discard(old)

    def path(self, rank: int) -> Path:
        return self.folder / f"rank_{rank:05d}.json"

    def publish(self, heartbeat: Heartbeat) -> None:
        """Replace the rank's heartbeat atomically; does nothing if there is no folder."""

        def write() -> None:
            with replacing(self.path(heartbeat.rank), on_disk=False) as temporary:
                temporary.write_text(json.dumps(asdict(heartbeat)) + "\n")

        self.disk.run(write, None)

    def read(self) -> list[Heartbeat]:
        return self.disk.run(self._read, [])

    def _read(self) -> list[Heartbeat]:
        heartbeats: list[Heartbeat] = []
        for path in sorted(self.folder.glob("rank_*.json")):
            with contextlib.suppress(*_UNREADABLE):
                heartbeats.append(Heartbeat(**json.loads(path.read_text())))
        return heartbeats

    def claim(self, failure: Failure) -> bool | None:
        """Record `failure` if it is the run's first; returns whether it is, or None if the disk does not answer."""

        def write() -> bool:
            try:
                first = create_exclusively(self._failure_path, json.dumps(asdict(failure)) + "\n")
            except OSError:
                return False
            word = "stopped" if failure.kind == "stopped" else "error"
            event = Event(f"{word:<9}{failure.message}", "hang" if failure.kind == "hang" else word, step=failure.step)
            if first and (self._run_dir / "log.txt").exists():
                append_line(self._run_dir / "log.txt", stamped(event))
                append_line(self._run_dir / "events.jsonl", event.record)
            return first

        return self.disk.run(write, None)

    def first_failure(self) -> Failure | None:
        def read() -> Failure | None:
            with contextlib.suppress(*_UNREADABLE):
                return Failure(**json.loads(self._failure_path.read_text()))
            return None

        return self.disk.run(read, None)

    def behind(self, world_size: int) -> list[Heartbeat | int]:
        """The ranks that hold up the others: those that don't reach rank 0, else silent ones (a number if a rank has no
        heartbeat), else stopped ones, else those with the fewest moves; [] if all are equal or the disk is silent."""

        def find() -> list[Heartbeat | int]:
            by_rank = {beat.rank: beat for beat in self._read()}
            times = {}  # by the disk's clock
            for rank in range(world_size):
                with contextlib.suppress(OSError):
                    times[rank] = self.path(rank).stat().st_mtime
            due = max(times.values(), default=0.0) - SILENT_SECONDS
            running = [beat for beat in by_rank.values() if not beat.ended]
            if cut_off := [beat for beat in running if beat.cut_off]:
                return [*cut_off]
            ended = by_rank.keys() - {beat.rank for beat in running}
            if silent := [rank for rank in range(world_size) if times.get(rank, -1.0) < due and rank not in ended]:
                return [by_rank.get(rank, rank) for rank in silent]
            if stopped := [beat for beat in running if beat.stopped]:
                return [*stopped]
            fewest = min((beat.moves for beat in running), default=0)
            late = [beat for beat in running if beat.moves == fewest]
            return [*late] if len(late) < len(running) else []

        return self.disk.run(find, [])


def describe_hang(behind: Sequence[Heartbeat | int], mine: Heartbeat, seconds: float, stacks: Path) -> str:
    """A human-readable line: which ranks hold up the run, since when, and where they are."""
    if lost := next((beat for beat in (mine, *behind) if isinstance(beat, Heartbeat) and beat.cut_off), None):
        where = f"for {seconds:.0f} s (step {lost.step}, {lost.where})"
        return f"{lost.host} does not reach {lost.cut_off}, where rank 0 is, {where}; stacks in {stacks}"
    names = [str(b if isinstance(b, int) else b.rank) for b in behind]
    who = f"rank{'s' if len(names) > 1 else ''} {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
    at = mine if not behind or isinstance(behind[0], int) else behind[0]
    where = at.where if at.where == at.phase else f"{at.phase}: {at.where}"
    state = ", stopped by a signal or debugger" if at.stopped else ""
    host = f" on {at.host}" if behind and at.host != mine.host else ""
    progress = f"{who if behind else 'any rank'}{host} for {seconds:.0f} s (step {at.step}, {where}{state})"
    return f"no progress on {progress}; stacks in {stacks}"


def last_checkpoint(run_dir: Path) -> str:
    """A text such as "last complete checkpoint: step 500 in RUN/checkpoints", or why it is not known."""
    folder = run_dir / "checkpoints"

    def read() -> bytes:
        with contextlib.suppress(OSError):
            return (folder / "latest").read_bytes()
        return b""

    # A Disk of its own: a read that hangs here must not keep the caller from reporting the failure.
    latest = Disk().run(read, None)
    if latest is None:
        return f"{folder} can't be read: the disk does not answer"
    match = re.fullmatch(r"step_(\d{8,12})", latest.decode(errors="replace").strip())
    step = int(match[1]) if match else 0
    return f"last complete checkpoint: step {step} in {folder}" if step else "there is no checkpoint yet"

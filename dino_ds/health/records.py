"""RUN/heartbeats, which the monitor processes write: where every rank is, how it ended, and which failure was the
first.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dino_ds.basics.files import discard, replacing
from dino_ds.health.beat import Disk, Event, create_exclusively, log_event

SILENT_SECONDS = 15.0
"""A rank without a heartbeat for this long counts as gone: its host or its monitor may be."""
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, RecursionError)


@dataclass(frozen=True)
class Heartbeat:
    """One rank as its monitor last saw it.

    `step`: optimizer steps done. `where`: the phase, or the part of the step. `moves`: see `Beat`. `stopped`: by
    SIGSTOP or a debugger. `ended`: "" while it runs, then done, stopped or error. `cut_off`: the address of rank 0 if
    it did not answer when the rank was found to hang.
    """

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
    """The files of RUN/heartbeats, a new folder for each start of a run.

    Reading and writing never raise for files that a dying run leaves behind, and wait for the disk for a limited time.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self.folder = run_dir, run_dir / "heartbeats"
        self._failure_path, self._before = self.folder / "first_failure.json", run_dir / "heartbeats.before"
        self.disk = Disk()

    def prepare(self) -> None:
        """Make a new, empty folder; called by rank 0, which holds the lock. Raises OSError.

        The folder of an earlier start is kept until `forget_earlier` or `bring_back_earlier`.
        """
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
        """Record `failure` if it is the first of this run; returns whether it is, so that this rank reports it, or None
        if the disk does not answer."""
        return self.disk.run(lambda: self._claim(failure), None)

    def _claim(self, failure: Failure) -> bool:
        try:
            first = create_exclusively(self._failure_path, json.dumps(asdict(failure)) + "\n")
        except OSError:
            return False
        if first:
            word = "stopped" if failure.kind == "stopped" else "error"
            event = Event(f"{word:<9}{failure.message}", "hang" if failure.kind == "hang" else word, step=failure.step)
            log_event(self._run_dir, event)
        return first

    def first_failure(self) -> Failure | None:
        """The failure that was claimed, by the rank that failed first or by its monitor."""

        def read() -> Failure | None:
            with contextlib.suppress(*_UNREADABLE):
                return Failure(**json.loads(self._failure_path.read_text()))
            return None

        return self.disk.run(read, None)

    def behind(self, world_size: int) -> list[Heartbeat | int]:
        """The ranks that hold up the others: those that don't reach rank 0, else silent ones (as numbers if there is no
        heartbeat at all), else stopped ones, else those with the fewest moves; [] if all are equally far or the disk
        does not answer."""
        return self.disk.run(lambda: self._behind(world_size), [])

    def _behind(self, world_size: int) -> list[Heartbeat | int]:
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


def describe_death(who: str, how: str, step: int, where: str) -> str:
    """A human-readable line; `who`: "rank 1", `how` as `dino_ds.health.processes.death_of` returns it."""
    memory = "most often because memory has run out"
    why = {"": f"; how was not seen: killed, {memory}, or ended by code of its own", "by SIGKILL": f", {memory}"}
    origin = ": code of its own, or of a library, has ended the process" if how.startswith("with ") else ""
    return f"{who} died{' ' if how else ''}{how} at step {step} ({where}){why.get(how, origin)}"


def last_checkpoint_step(run_dir: Path) -> int | None:
    """The step of the newest complete checkpoint, 0 if there is none, or None if the disk does not answer."""

    def read() -> int:
        with contextlib.suppress(OSError):
            text = (run_dir / "checkpoints/latest").read_bytes().decode(errors="replace")
            match = re.fullmatch(r"step_(\d{8,12})", text.strip())
            return int(match[1]) if match else 0
        return 0

    # A Disk of its own: a read that hangs here must not keep the caller from reporting the failure.
    return Disk().run(read, None)


def last_checkpoint(run_dir: Path) -> str:
    """A text such as "last complete checkpoint: step 500 in RUN/checkpoints", or why it is not known."""
    step, folder = last_checkpoint_step(run_dir), run_dir / "checkpoints"
    if step is None:
        return f"{folder} can't be read: the disk does not answer"
    return f"last complete checkpoint: step {step} in {folder}" if step else "there is no checkpoint yet"

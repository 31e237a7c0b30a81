"""RUN/heartbeats: where every rank is, how it ended, and which failure was the first.

Written by the monitor processes; read by them, by ranks that have lost a peer, and by the supervisor of a run.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dino_ds.basics.durable import discard, replacing
from dino_ds.health.files import Disk, append_line, create_exclusively, stamped

SILENT_SECONDS = 15.0
"""A rank without a heartbeat for this long counts as gone, with its host or its monitor."""


@dataclass(frozen=True)
class Heartbeat:
    """One rank as its monitor last saw it.

    `step`: optimizer steps done. `where`: the phase, or the part of the step. `moves`: see `Beat`. `stopped`: by
    SIGSTOP or a debugger. `ended`: "", done, stopped or error, then `code` and `message` say more.
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
    code: int = 0
    message: str = ""

    @property
    def working(self) -> bool:
        """On a step: not starting, saving or so."""
        return self.phase in ("data", "step")


@dataclass(frozen=True)
class Failure:
    """What ended a run first; the other ranks end because of it. `kind`: error, died, hang, launcher or stopped."""

    rank: int
    host: str
    step: int
    kind: str
    code: int
    message: str


class Heartbeats:
    """The files of RUN/heartbeats. Reading and writing never raise for what a dying run leaves behind."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self.folder = run_dir, run_dir / "heartbeats"
        self._before = run_dir / "heartbeats.before"
        self.failure_path = self.folder / "first_failure.json"
        self.prepared = False

    def prepare(self) -> None:
        """Make a new, empty folder; called by rank 0, which holds the lock. Raises OSError.

        The folder of an earlier start is kept until `forget_earlier` or `bring_back_earlier`.
        """
        discard(self._before)
        with contextlib.suppress(FileNotFoundError):
            self.folder.rename(self._before)
        try:
            self.folder.mkdir(parents=True)
        except OSError:
            self.bring_back_earlier()
            raise
        self.prepared = True

    def forget_earlier(self) -> None:
        discard(self._before)

    def bring_back_earlier(self) -> None:
        """Undo `prepare`, for a start that was refused."""
        discard(self.folder)
        with contextlib.suppress(OSError):
            self._before.rename(self.folder)

    def remove(self) -> None:
        """Remove the folder, even if a monitor writes into it at this moment."""
        for _ in range(5):
            shutil.rmtree(self.folder, ignore_errors=True)
            if not self.folder.exists():
                return
            time.sleep(0.05)

    def path(self, rank: int) -> Path:
        return self.folder / f"rank_{rank:05d}.json"

    def publish(self, heartbeat: Heartbeat) -> None:
        """Replace the rank's heartbeat as a whole; nothing where there is no folder."""
        with contextlib.suppress(OSError), replacing(self.path(heartbeat.rank), on_disk=False) as temporary:
            temporary.write_text(json.dumps(asdict(heartbeat)) + "\n")

    def read(self) -> list[Heartbeat]:
        """Every rank's last heartbeat, in rank order."""
        found = []
        for path in sorted(self.folder.glob("rank_*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
                found.append(Heartbeat(**json.loads(path.read_text())))
        return found

    def claim(self, failure: Failure) -> bool:
        """Whether `failure` is the first of this run: then it is recorded, log.txt has it, and this rank reports it."""
        try:
            first = create_exclusively(self.failure_path, json.dumps(asdict(failure)) + "\n")
        except OSError:
            return False
        if first:
            line = f"{'stopped' if failure.kind == 'stopped' else 'error':<9}{failure.message}"
            if (self._run_dir / "log.txt").exists():  # the run has a log
                append_line(self._run_dir / "log.txt", stamped(line))
        return first

    def first_failure(self) -> Failure | None:
        try:
            return Failure(**json.loads(self.failure_path.read_text()))
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def behind(self, world_size: int) -> list[Heartbeat | int]:
        """The ranks that hold up the others: silent ones (as numbers, where there is no heartbeat at all), else stopped
        ones, else those with the fewest moves; [] where all are at the same place."""
        by_rank = {beat.rank: beat for beat in self.read()}
        times = {}  # by the disk's clock
        for rank in range(world_size):
            with contextlib.suppress(OSError):
                times[rank] = self.path(rank).stat().st_mtime
        due = max(times.values(), default=0.0) - SILENT_SECONDS
        ended = {rank for rank, beat in by_rank.items() if beat.ended}
        silent = [rank for rank in range(world_size) if times.get(rank, -1.0) < due and rank not in ended]
        if silent:
            return [by_rank.get(rank, rank) for rank in silent]
        beats = list(by_rank.values())
        if stopped := [beat for beat in beats if beat.stopped]:
            return [*stopped]
        running = [beat for beat in beats if not beat.ended]
        fewest = min((beat.moves for beat in running), default=0)
        late = [beat for beat in running if beat.moves == fewest]
        return [*late] if len(late) < len(running) else []


def describe_hang(behind: Sequence[Heartbeat | int], own: Heartbeat, seconds: float, stacks: Path) -> str:
    """A line for people: which ranks hold up the run, since when, and where they are."""
    if not behind:
        who, at = "any rank", own
    else:
        names = [str(b if isinstance(b, int) else b.rank) for b in behind[:8]]
        who = f"rank{'s' if len(behind) > 1 else ''} {', '.join(names)}{' ...' if len(behind) > 8 else ''}"
        first = behind[0]
        at = own if isinstance(first, int) else first
    where = at.where if at.where == at.phase else f"{at.phase}: {at.where}"
    state = ", stopped by a signal or debugger" if at.stopped else ""
    host = f" on {at.host}" if behind and at.host != own.host else ""
    return f"no progress on {who}{host} for {seconds:.0f} s (step {at.step}, {where}{state}); stacks in {stacks}"


def describe_death(who: str, how: str, step: int, where: str) -> str:
    """A line for people; `who`: "rank 1", `how` as dino_ds.health.processes.death_of returns it."""
    memory = "most often because memory has run out"
    why = {"": f"; how was not seen: killed, {memory}, or ended by code of its own", "by SIGKILL": f", {memory}"}
    own = ": code of its own, or of a library, has ended the process" if how.startswith("with ") else ""
    return f"{who} died{' ' if how else ''}{how} at step {step} ({where}){why.get(how, own)}"


def last_checkpoint(run_dir: Path) -> str:
    """Such as "last complete checkpoint: step 500 in RUN/checkpoints", or why it is not known."""

    def look() -> str:
        folder = run_dir / "checkpoints"
        try:
            digits = "".join(filter(str.isdigit, (folder / "latest").read_text()))
            return f"last complete checkpoint: step {int(digits)} in {folder}"
        except (OSError, ValueError):
            return "there is no checkpoint yet"

    # Not the caller's own Disk: a look that hangs here must not keep the caller from reporting the failure.
    return Disk().run(look, f"{run_dir}/checkpoints can't be read: the disk does not answer")

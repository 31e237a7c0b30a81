"""Reads heartbeats and failures of one start from the run folder, ignoring those of earlier starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dino_ds.health.files import Disk, append_line
from dino_ds.health.records import Failure, Heartbeat, Heartbeats


class StartRecords:
    """Heartbeats and the first failure, as far as they are newer than this object."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._heartbeats, self._disk = run_dir, Heartbeats(run_dir), Disk()
        self._old: dict[Path, tuple[int, int]] = self._disk.run(self._versions, {})

    def beats(self) -> dict[int, Heartbeat]:
        """Rank -> its last heartbeat; {} where the disk does not answer."""

        def read() -> dict[int, Heartbeat]:
            versions = self._versions()
            path = self._heartbeats.path
            return {beat.rank: beat for beat in self._heartbeats.read() if self._is_new(path(beat.rank), versions)}

        return self._disk.run(read, {})

    def first_failure(self) -> Failure | None:
        """Written by the rank, or the watcher of the rank, that failed first."""
        path = self._run_dir / "heartbeats" / "first_failure.json"

        def read() -> Failure | None:
            return self._heartbeats.first_failure() if self._is_new(path, self._versions()) else None

        return self._disk.run(read, None)

    def ask_to_stop(self) -> None:
        """RUN/stop: ranks on other machines look for it."""
        self._disk.run((self._run_dir / "stop").touch, None)

    def beat(self, rank: int | None) -> Heartbeat | None:
        """The last one of this rank, or of the rank that is furthest; None before the first."""
        beats = self.beats()
        own = beats.get(rank) if rank is not None else None
        return own or max(beats.values(), key=lambda beat: beat.step, default=None)

    def _is_new(self, path: Path, versions: dict[Path, tuple[int, int]]) -> bool:
        return path in versions and versions[path] != self._old.get(path)

    def _versions(self) -> dict[Path, tuple[int, int]]:
        """By the disk's own clock and numbers: machines disagree about the time."""
        found = {}
        for path in (self._run_dir / "heartbeats").glob("*.json"):
            try:
                stat = path.stat()
            except OSError:
                continue
            found[path] = (stat.st_ino, stat.st_mtime_ns)
        return found


def last_checkpoint_step(run_dir: Path) -> int | None:
    """The step of the newest complete checkpoint; None where there is none, or the disk does not answer."""
    text = Disk().run(lambda: (run_dir / "checkpoints" / "latest").read_bytes().decode(errors="replace"), "")
    found = re.fullmatch(r"step_(\d{8})", text.strip())
    return int(found[1]) if found else None


def append_record(path: Path, record: dict[str, object]) -> None:
    """One line of JSON; nothing where the run folder was never made, or the disk does not answer."""

    def append() -> None:
        if path.parent.is_dir():
            append_line(path, json.dumps(record))

    Disk().run(append, None)

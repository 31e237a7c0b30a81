"""Reads heartbeats and failures of one start from the run folder, ignoring those of earlier starts."""

from __future__ import annotations

import contextlib
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
            new = self._new_files()
            return {beat.rank: beat for beat in self._heartbeats.read() if self._heartbeats.path(beat.rank) in new}

        return self._disk.run(read, {})

    def first_failure(self) -> Failure | None:
        """Written by the rank, or the watcher of the rank, that failed first."""

        def read() -> Failure | None:
            return self._heartbeats.first_failure() if self._heartbeats.failure_path in self._new_files() else None

        return self._disk.run(read, None)

    def ask_to_stop(self) -> None:
        """RUN/stop: ranks on other machines look for it."""
        self._disk.run((self._run_dir / "stop").touch, None)

    def beat(self, rank: int | None) -> Heartbeat | None:
        """The last one of this rank, or of the rank that is furthest; None before the first."""
        beats = self.beats()
        own = beats.get(rank) if rank is not None else None
        return own or max(beats.values(), key=lambda beat: beat.step, default=None)

    def _new_files(self) -> set[Path]:
        return {path for path, version in self._versions().items() if version != self._old.get(path)}

    def _versions(self) -> dict[Path, tuple[int, int]]:
        """By the disk's own clock and numbers: machines disagree about the time."""
        found = {}
        for path in self._heartbeats.folder.glob("*.json"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found[path] = (stat.st_ino, stat.st_mtime_ns)
        return found


def last_checkpoint_step(run_dir: Path) -> int | None:
    """The step of the newest complete checkpoint; None where there is none, or the disk does not answer."""
    text = Disk().run(lambda: (run_dir / "checkpoints" / "latest").read_bytes().decode(errors="replace"), "")
    found = re.fullmatch(r"step_(\d{8})", text.strip())
    return int(found[1]) if found else None


def append_record(path: Path, record: dict[str, object]) -> None:
    """One line of JSON; nothing where the run folder was never made, or the disk does not answer."""
    Disk().run(lambda: append_line(path, json.dumps(record)), None)

"""Opens a checkpoint in any folder for reading, after verifying the files that may be read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from dino_ds.checkpoint.files import FileRecord, checksum
from dino_ds.checkpoint.folder import find_damage
from dino_ds.checkpoint.manifest import SavedCheckpoint, check_present, read_manifest
from dino_ds.config.begun_with import ENVIRONMENT, read_run_id
from dino_ds.errors import CheckpointError

_SETTLED_SECONDS = 2.0
"""File systems have coarse clocks: a second change soon after the first may leave a file's times as they are."""
_known_sums: dict[tuple[object, ...], FileRecord] = {}


def open_checkpoint(folder: Path, only: str = "") -> SavedCheckpoint:
    """Open the checkpoint in any `folder`. This process alone verifies that every file exists with the right length,
    and every byte of the files whose names begin with `only`: no others may be read then. A checkpoint in the folder of
    a run must belong to that run. Raises CheckpointError."""
    run = folder.absolute().parent.parent
    try:
        manifest = read_manifest(folder)
        if folder.absolute().parent.name == "checkpoints" and read_run_id(run) not in (None, manifest.run_id):
            raise CheckpointError(f"checkpoint {folder} is of another run than {run / ENVIRONMENT} says")
        check_present(folder, manifest)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} can't be read ({error.strerror})") from None
    names = [name for name in sorted(manifest.files) if name.startswith(only)]
    if problem := find_damage(folder, manifest, names, checksum_once):
        raise CheckpointError(problem)
    return SavedCheckpoint(folder, manifest)


def checksum_once(path: Path, progress: Callable[[int], object] = lambda _bytes: None) -> FileRecord:
    """Length and CRC32 of a file, as by `checksum`, but a file that has not changed since this process read it is not
    read again. Raises OSError."""
    at = path.stat()
    key = (os.path.realpath(path), at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)
    if key in _known_sums:
        return _known_sums[key]
    record = checksum(path, progress)
    if time.time() - at.st_ctime > _SETTLED_SECONDS:
        _known_sums[key] = record
    return record

"""Examines one machine before a launch: `python -m dino_ds.launching.probe` reads a question and prints an answer.

Both are JSON, on stdin and stdout: nothing of the question passes through a remote shell.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import socket
import sys
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dino_ds.basics.ports import port_is_free

MARK = "dino_ds answers "
_MOST_ENTRIES = 1000


@dataclass(frozen=True)
class Question:
    """A question to one machine. files: configs to compare by content; images: data.root, or None to look for none;
    seen: a file that must be visible; port: to listen on, or 0. Paths are relative to the working folder."""

    files: tuple[str, ...]
    images: str | None
    seen: str
    port: int


@dataclass(frozen=True)
class Answer:
    """One machine. gpus: as planning.measure.machine.Gpu; memory_gib: all and free; files: the CRC-32 of each, or None
    if it is missing; images: files of a pattern, or entries of a folder, counted to 1000; clock: seconds since 1970
    when the answer was given."""

    host: str
    versions: dict[str, str]
    code: str
    gpus: list[dict[str, Any]]
    memory_gib: tuple[float, float]
    files: dict[str, int | None]
    images: int | None
    sees: bool
    port_free: bool
    clock: float = field(default_factory=time.time)


def answer(question: Question) -> Answer:
    """Examine this machine. Imports torch."""
    from dino_ds.basics.host_memory import host_memory_gib
    from dino_ds.planning.measure.machine import find_gpus, hash_code
    from dino_ds.run.environment import versions

    return Answer(
        host=socket.gethostname(),
        versions=versions(),
        code=hash_code(),
        gpus=[dataclasses.asdict(gpu) for gpu in find_gpus()],
        memory_gib=host_memory_gib(),
        files={path: _crc(Path(path)) for path in question.files},
        images=None if question.images is None else _count_images(question.images),
        sees=Path(question.seen).exists(),
        port_free=question.port == 0 or port_is_free(question.port),
    )


def _crc(path: Path) -> int | None:
    try:
        return zlib.crc32(path.read_bytes())
    except OSError:
        return None


def _count_images(root: str) -> int:
    """Number of entries of the folder `root` (data.root), or of files of a pattern; 0 if there is nothing."""
    from dino_ds.data.hdf5 import split_dataset
    from dino_ds.data.root import expand
    from dino_ds.errors import DataError

    path, _ = split_dataset(os.path.expanduser(root))
    try:
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                return sum(1 for _ in itertools.islice(entries, _MOST_ENTRIES))
        return len(expand(path))
    except (OSError, DataError):
        return 0


def main() -> None:
    from dino_ds.errors import UserError

    asked = json.loads(sys.stdin.read())
    try:
        found = answer(Question(**{**asked, "files": tuple(asked["files"])}))
    except UserError as error:
        sys.exit(str(error))
    print(MARK + json.dumps(dataclasses.asdict(found)), flush=True)


if __name__ == "__main__":
    main()

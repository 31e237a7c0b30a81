"""One tar shard, written by a process of its own: whole and with its checksum, or not there."""

from __future__ import annotations

import hashlib
import os
import signal
import tarfile
import threading
from dataclasses import dataclass, field
from multiprocessing import parent_process
from pathlib import Path

from dino_ds.data.base import Source, UnreadableImage
from dino_ds.durable import replacing
from dino_ds.tools.repack import Shrink, repack

_END = bytes(2 * 512)


@dataclass
class ShardRecord:
    """What a finished shard holds; `bad` are the texts of its unreadable images."""

    name: str
    images: int = 0
    size: int = 0
    sha256: str = ""
    bad: list[str] = field(default_factory=list)


_source: Source | None = None
_shrink = Shrink(None, 0)


def start_worker(source: Source, shrink: Shrink) -> None:
    global _source, _shrink
    _source, _shrink = source, shrink
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once: the part it wrote will be written again
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def write_shard(path: Path, first: int, last: int) -> ShardRecord:
    """Images [first, last) of the worker's source. Raises OSError, DataError."""
    assert _source is not None
    record = ShardRecord(path.name)
    digest = hashlib.sha256()
    names: set[str] = set()
    keys: set[str] = set()
    with replacing(path) as part, open(part, "wb") as file:

        def add(name: str, data: bytes) -> None:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            head = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
            for block in (head, data, bytes(-len(data) % 512)):
                digest.update(block)
                file.write(block)

        for index in range(first, last):
            try:
                name, data = repack(_source, index, _shrink)
            except UnreadableImage as error:
                record.bad.append(str(error))
                continue
            name = _unused(name, names)
            add(name, data)
            record.images += 1
            key = _key(name)
            if _source.labels is not None and _source.labels[index] >= 0 and key not in keys:
                keys.add(key)
                add(f"{key}.cls", str(_source.labels[index]).encode())
        digest.update(_END)
        file.write(_END)
        record.size, record.sha256 = file.tell(), digest.hexdigest()
    return record


def _unused(name: str, names: set[str]) -> str:
    """`name`, with a number where it is taken: a list may name an image twice."""
    stem, ending = os.path.splitext(name)
    number = 1
    while name in names:
        number += 1
        name = f"{stem}~{number}{ending}"
    names.add(name)
    return name


def _key(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

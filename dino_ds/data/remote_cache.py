"""Pieces of remote files that were read once, on a disk of this machine, up to a size; its processes share them.

Each remote file has a sparse file here, in which a piece lies where it lies in the remote file. Behind the end is a
mark for each piece, its length and CRC-32, which is written last and compared at each read: what a killed process has
left half is fetched again, and no process waits for another.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import io
import os
import struct
import zlib
from contextlib import suppress
from typing import NamedTuple

from dino_ds.basics.durable import cache_folder
from dino_ds.basics.file_format import FORMAT
from dino_ds.errors import ConfigError

_MARK, _PER_MARK = struct.Struct("<II"), 512
"""A piece's length and checksum; of pieces that begin within so many bytes the latest one is kept."""
_PAGE, _OPEN_FILES = 4096, 128


class FilePiece(NamedTuple):
    """Bytes of a remote file that has `size` and a `tag` of its content, 0 if its server gives none; a `length` of -1
    is the whole of any file. `checksum`: CRC-32 of the bytes by an index, or -1."""

    url: str
    size: int = -1
    tag: int = 0
    begin: int = 0
    length: int = -1
    checksum: int = -1

    def fits(self, data: bytes, state: list[int]) -> bool:
        """Whether `data`, from a file with the size and tag `state`, is this piece."""
        return zlib.crc32(data) == self.checksum if self.checksum >= 0 else state == [self.size, self.tag]

    def is_in(self, other: FilePiece) -> bool:
        """Whether another piece is this one, or has all its bytes."""
        inside = 0 <= self.begin - other.begin <= other.length - self.length
        return self == other or (self[:3] == other[:3] and self.length >= 0 and inside)


class RemoteCache:
    """At most `size` bytes of pieces, of all images and runs together.

    The files of a run's images stay: where an epoch does not fit, a part that stays saves more than the latest pieces,
    which come last in the next epoch. Files of other images go, the least recently used first.
    """

    def __init__(self, size: int) -> None:
        self.size, self.folder = size, os.path.join(cache_folder(), "remote")
        self._counter = os.path.join(self.folder, "used")

    def make_room(self, files: list[FilePiece], needed: int) -> None:
        """Remove other files than these until `needed` bytes of them fit. Raises ConfigError."""
        ours = {os.path.basename(self._path(file)) for file in files}
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            with open(self._counter, "a+b") as counter:
                fcntl.flock(counter, fcntl.LOCK_EX)
                parts = [entry for entry in os.scandir(self.folder) if entry.name.endswith(".part")]
                entries = [entry for entry in parts if entry.is_file()]
                used = {entry: 512 * entry.stat().st_blocks for entry in entries}
                total, ahead = sum(used.values()), needed - sum(used[one] for one in entries if one.name in ours)
                for entry in sorted(entries, key=lambda entry: entry.stat().st_mtime_ns):
                    if entry.name not in ours and total + max(ahead, 0) > self.size:
                        os.unlink(entry)
                        total -= used[entry]
                counter.truncate(0)
                counter.write(total.to_bytes(8, "little"))
        except OSError as error:
            what = f"data.remote_cache_gib: nothing can be kept in {self.folder} ({error.strerror})"
            raise ConfigError(f"{what}: set DINO_DS_CACHE to a folder with room") from None

    def get(self, piece: FilePiece) -> bytes | None:
        """A piece as it was put, or None."""
        with suppress(OSError, struct.error):
            file = _opened(self._path(piece))
            length, checksum = _MARK.unpack(os.pread(file.fileno(), _MARK.size, _mark_place(piece)))
            if length == piece.length:
                data = os.pread(file.fileno(), length, piece.begin)
                return data if zlib.crc32(data) == checksum else None
        return None

    def put(self, piece: FilePiece, data: bytes) -> None:
        """Keep a piece, if there is room; a full disk is none."""
        with suppress(OSError):
            if self._take(-(-len(data) // _PAGE + 1) * _PAGE):
                file = _opened(self._path(piece))
                os.pwrite(file.fileno(), data, piece.begin)
                os.pwrite(file.fileno(), _MARK.pack(len(data), zlib.crc32(data)), _mark_place(piece))

    def _take(self, size: int) -> bool:
        with open(self._counter, "r+b", buffering=0) as counter:
            fcntl.flock(counter, fcntl.LOCK_EX)
            used = int.from_bytes(counter.read(8), "little") + size
            if used <= self.size:
                os.pwrite(counter.fileno(), used.to_bytes(8, "little"), 0)
            return used <= self.size

    def _path(self, piece: FilePiece) -> str:
        name = hashlib.sha256(f"{FORMAT}\n{piece.url}\n{piece.size}\n{piece.tag}".encode()).hexdigest()[:32]
        return os.path.join(self.folder, f"{name}.part")


def _mark_place(piece: FilePiece) -> int:
    return -(-piece.size // _PAGE) * _PAGE + _MARK.size * (piece.begin // _PER_MARK)


@functools.lru_cache(maxsize=_OPEN_FILES)
def _opened(path: str) -> io.FileIO:
    file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
    os.utime(path)
    return file

"""Files in buckets and on web servers: found, read in pieces that are fetched together and checked, kept on a disk."""

from __future__ import annotations

import asyncio
import fcntl
import fnmatch
import functools
import glob
import hashlib
import io
import os
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from dino_ds.basics.files import FORMAT, cache_folder, is_url
from dino_ds.data.listing import printable
from dino_ds.data.remote_request import NothingThere, Refusal, begin, call, get, retried, state_of, understand
from dino_ds.errors import ConfigError, DataError

_MARK, _PER_MARK = struct.Struct("<II"), 512
"""Format of a mark, a piece's length and checksum; and bytes of a file that share one mark, the latest piece's."""
_PAGE, _OPEN_FILES = 4096, 128
_OPEN_SECONDS, _READ_SECONDS, _LIST_SECONDS = 30.0, 120.0, 600.0
"""Seconds for all tries to look a file up, or to read it unless `Remote.prepare` gives others; and for one try to list
files, which takes many answers."""
_GAP, _MOST_TOGETHER = 4096, 8 << 20  # most bytes between two pieces of one request, and of such a request
_MOST_AT_ONCE = 1 << 30  # most bytes that a library may ask for at once


def find_files(pattern: str) -> dict[str, list[int]]:
    """Addresses that a pattern with * stands for, sorted, each with its size and tag. Raises DataError."""
    folder, name = os.path.split(pattern)
    if glob.has_magic(folder) or "**" in name:
        return list_folder(re.split(r"[*?[]", pattern, maxsplit=1)[0].rpartition("/")[0], pattern=pattern)
    return list_folder(folder, name)


def list_folder(url: str, name: str = "*", pattern: str | None = None) -> dict[str, list[int]]:
    """Files right in a folder whose names fit `name`, or all files whose addresses fit `pattern`; see `find_files`."""

    async def find() -> list[dict[str, Any]]:
        if pattern is not None:
            return [*(await call(pattern, "glob", detail=True)).values()]
        listed = await call(f"{url}/", "ls", detail=True)
        return [file for file in listed if fnmatch.fnmatchcase(os.path.basename(file["name"]), name)]

    async def reach() -> None:
        try:
            await call(url, "info")
        except Exception as error:
            if not understand(error)[0]:  # a status, even of an error, is an answer
                raise

    with suppress(FileNotFoundError):  # a server that can't be reached is noticed before the long wait for a listing
        begin(retried(url, reach, _OPEN_SECONDS)).result()
    files, scheme = list[dict[str, Any]](), url.partition("://")[0]
    with suppress(FileNotFoundError):
        files = begin(retried(url, find, _OPEN_SECONDS, _LIST_SECONDS)).result()
    named = {file["name"] if is_url(file["name"]) else f"{scheme}://{file['name']}": file for file in files}
    return {address: state_of(facts) for address, facts in sorted(named.items()) if facts["type"] != "directory"}


def is_there(url: str) -> bool:
    """Whether an address names a file just as it is written, with any * or [ in it. Raises DataError."""
    with suppress(Refusal):
        return url in known_states([url])
    return False


def known_states(urls: Sequence[str]) -> dict[str, list[int]]:
    """Size and tag of those files that exist; a bucket's folder with over 8 of `urls` is listed. Raises DataError."""
    folders = Counter(map(os.path.dirname, urls))
    listed = {folder for folder, count in folders.items() if count > 8 and not folder.startswith("http")}
    known = {url: state for folder in listed for url, state in list_folder(folder).items()}

    async def find(url: str) -> None:
        with suppress(FileNotFoundError):
            try:
                known[url] = (await retried(url, lambda: get(url, 0, 1), _OPEN_SECONDS))[1]
            except NothingThere:
                known[url] = state_of({"size": 0})

    async def find_all() -> None:
        await asyncio.gather(*(find(url) for url in urls if os.path.dirname(url) not in listed))

    begin(find_all()).result()
    return known


def find_states(urls: Sequence[str]) -> list[list[int]]:
    """Size and tag of each file. Raises DataError, also for missing ones."""
    known = known_states(urls)
    if missing := [url for url in urls if url not in known]:
        raise DataError(f"{len(missing)} of {len(urls)} files are not there, such as {printable(missing[0])}")
    return [known[url] for url in urls]


def remote_with_room(
    urls: Sequence[str], states: Sequence[Sequence[int]], needed: int, gib: float
) -> tuple[Remote, list[str]]:
    """A `Remote` for `needed` bytes of files, `gib` GiB of them cached; and notes on the cache and on missing tags."""
    notes = list[str]()
    if untagged := [url for url, (_, tag) in zip(urls, states, strict=True) if not tag]:
        files = f"{len(untagged)} of {len(urls)} files"
        said = f"the server of {printable(untagged[0])} gives neither ETag nor Last-Modified for {files}"
        notes.append(f"{said}: changes of equal size can't be noticed there, and nothing is kept for other runs")
    amount = f"{needed / 2**20:,.0f} MiB of images are elsewhere"
    if not gib:
        return Remote(), [*notes, f"{amount} and fetched in every epoch: --data.remote_cache_gib keeps them on a disk"]
    cache = RemoteCache(int(gib * 2**30))
    cache.make_room([FilePiece(url, *state) for url, state in zip(urls, states, strict=True)], needed)
    share = min(1, cache.size / max(needed, 1))
    return Remote(cache), [*notes, f"{amount}: {share:.0%} of them stay in {cache.folder}"]


class FilePiece(NamedTuple):
    """Bytes of a remote file that has `size` and a `tag` of its content, 0 if its server gives none; a `length` of -1
    means the whole file, whatever its size. checksum: CRC-32 of the bytes as an index says, or -1."""

    url: str
    size: int = -1
    tag: int = 0
    begin: int = 0
    length: int = -1
    checksum: int = -1


class Remote:
    """A process's way to remote files: the pieces that `prepare` names are fetched while others are used."""

    def __init__(self, cache: RemoteCache | None = None) -> None:
        self._cache, self._seconds = cache, _READ_SECONDS
        self._ahead = dict[FilePiece, Future[dict[FilePiece, bytes]]]()

    def __reduce__(self) -> tuple[Any, ...]:
        return Remote, (self._cache,)

    def prepare(self, pieces: Iterable[FilePiece], seconds: float | None = None) -> None:
        """Begin to fetch pieces and drop all others; one that has not come after `seconds` counts as lost."""
        self._seconds = seconds or self._seconds
        wanted, before = dict.fromkeys(pieces), self._ahead
        self._ahead = {piece: before[piece] for piece in wanted if piece in before}
        for future in set(before.values()) - set(self._ahead.values()):
            future.cancel()
        groups = list[list[FilePiece]]()  # of neighboring pieces; one request for each group
        for piece in sorted(wanted.keys() - self._ahead.keys()):
            if kept := self._kept(piece):
                self._ahead[piece] = Future()
                self._ahead[piece].set_result({piece: kept})
                continue
            first, last = (groups[-1][0], groups[-1][-1]) if groups else (piece, piece)
            near = piece[:3] == last[:3] and piece.begin - last.begin - last.length <= _GAP and piece.length >= 0
            if groups and near and piece.begin + piece.length - first.begin <= _MOST_TOGETHER:
                groups[-1].append(piece)
            else:
                groups.append([piece])
        for group in groups:
            self._ahead |= dict.fromkeys(group, begin(_fetch(group, self._cache, self._seconds)))

    def read(self, piece: FilePiece) -> bytes:
        """The bytes of a piece, prepared or not. Raises DataError, or FileNotFoundError if a whole file is missing."""
        if piece in self._ahead:
            return self._ahead[piece].result()[piece]
        for whole, future in self._ahead.items():
            skipped = piece.begin - whole.begin
            if piece[:3] == whole[:3] and 0 <= skipped <= whole.length - piece.length:
                return future.result()[whole][skipped:][: piece.length]
        if kept := self._kept(piece):
            return kept
        return begin(_fetch([piece], self._cache, self._seconds)).result()[piece]

    def _kept(self, piece: FilePiece) -> bytes | None:
        return self._cache.get(piece) if self._cache and piece.tag else None


async def _fetch(group: list[FilePiece], cache: RemoteCache | None, seconds: float) -> dict[FilePiece, bytes]:
    (url, size, tag, first, length, checksum), last = group[0], group[-1]
    if length < 0:
        return {last: (await retried(url, lambda: get(url), seconds))[0]}
    with suppress(FileNotFoundError):
        data, state = await retried(url, lambda: get(url, first, last.begin + last.length), seconds)
        parts = {piece: data[piece.begin - first :][: piece.length] for piece in group}
        same = state == [size, tag]
        if all(zlib.crc32(part) == piece.checksum if checksum >= 0 else same for piece, part in parts.items()):
            if cache and tag:
                for piece, part in parts.items():
                    cache.put(piece, part)
            return parts
    listed = "when its images were listed: put it back" if checksum < 0 else "index.jsonl says: copy that there again"
    raise DataError(f"{printable(url)} is gone or is another file than {listed}, or start anew")


def open_remote(remote: Remote, url: str, state: Sequence[int], window: int = 4 << 20) -> Any:
    """A remote file for libraries that read files; at least `window` bytes are fetched at a time."""
    file = _RemoteFile(remote, url, state)
    return io.BufferedReader(file, window) if window else file


class _RemoteFile(io.RawIOBase):
    def __init__(self, remote: Remote, url: str, state: Sequence[int]) -> None:
        self._remote, self._url, self._state, self._place = remote, url, state, 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + (0, self._place, self._state[0])[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self._state[0] - self._place))
        if length > _MOST_AT_ONCE:
            raise OSError(f"{length} bytes at once, {_MOST_AT_ONCE} are allowed")
        if length:
            size, tag = self._state
            buffer[:length] = self._remote.read(FilePiece(self._url, size, tag, self._place, length))
        self._place += length
        return length


class RemoteCache:
    """At most `size` bytes of pieces, of all images and runs together.
    Each remote file has a sparse file here, in which a piece lies at its own place. Behind the end is a mark for each
    piece, its length and CRC-32, which is written last and compared at each read: what a killed process has left half
    is fetched again, and no process waits for another. The files of a run's images stay: where an epoch does not fit, a
    part that stays saves more than the latest pieces. Files of other images go, the least recently used first."""

    def __init__(self, size: int) -> None:
        self.size, self.folder = size, os.path.join(cache_folder(), "remote")
        self._counter = os.path.join(self.folder, "used")

    def make_room(self, files: list[FilePiece], needed: int) -> None:
        """Remove files other than `files` until `needed` bytes of these fit. Raises ConfigError."""
        ours = {os.path.basename(self._path(file)) for file in files}
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            with open(self._counter, "a+b") as counter:
                fcntl.flock(counter, fcntl.LOCK_EX)
                parts = [part for part in os.scandir(self.folder) if part.name.endswith(".part") and part.is_file()]
                used = {part: 512 * part.stat().st_blocks for part in parts}
                total, ahead = sum(used.values()), needed - sum(used[part] for part in parts if part.name in ours)
                for part in sorted(parts, key=lambda part: part.stat().st_mtime_ns):
                    if part.name not in ours and total + max(ahead, 0) > self.size:
                        os.unlink(part)
                        total -= used[part]
                counter.truncate(0)
                counter.write(total.to_bytes(8, "little"))
        except OSError as error:
            problem = f"nothing can be kept in {self.folder} ({error.strerror})"
            raise ConfigError(f"data.remote_cache_gib: {problem}: set DINO_DS_CACHE to a folder with room") from None

    def get(self, piece: FilePiece) -> bytes | None:
        with suppress(OSError, struct.error):
            file = _opened(self._path(piece))
            length, checksum = _MARK.unpack(os.pread(file.fileno(), _MARK.size, _mark_place(piece)))
            if length == piece.length:
                data = os.pread(file.fileno(), length, piece.begin)
                return data if zlib.crc32(data) == checksum else None
        return None

    def put(self, piece: FilePiece, data: bytes) -> None:
        """Keep a piece if there is room in the cache and on the disk."""
        with suppress(OSError):
            with open(self._counter, "r+b", buffering=0) as counter:
                fcntl.flock(counter, fcntl.LOCK_EX)
                pages = len(data) // _PAGE + 2  # at most, as a piece begins anywhere in a page
                used = int.from_bytes(counter.read(8), "little") + pages * _PAGE
                if used > self.size:
                    return
                os.pwrite(counter.fileno(), used.to_bytes(8, "little"), 0)
            file = _opened(self._path(piece))
            os.pwrite(file.fileno(), data, piece.begin)
            os.pwrite(file.fileno(), _MARK.pack(len(data), zlib.crc32(data)), _mark_place(piece))

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

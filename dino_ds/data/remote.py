"""Pieces of files in buckets and on web servers, by fsspec: asked for together, retried, checked, kept on a disk."""

from __future__ import annotations

import asyncio
import fnmatch
import functools
import glob
import hashlib
import os
import random
import re
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from dino_ds.basics.text_file import is_url, unusable_text
from dino_ds.data.listing import printable
from dino_ds.data.remote_cache import FilePiece, RemoteCache
from dino_ds.errors import ConfigError, DataError, one_line

_DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "hf": "huggingface_hub", "https": "aiohttp", "http": "aiohttp"}
"""The package with which fsspec reads addresses of a scheme."""
_REQUESTS, _REQUEST_SECONDS = 32, 60.0
"""Requests that a process has under way at most, and the longest wait for one answer."""
_OPEN_SECONDS, _READ_SECONDS, _LIST_SECONDS = 30.0, 120.0, 600.0
"""Time for all tries when a file is looked up, when it is read where no loader says how long it waits, and when files
are listed, which takes many answers."""
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 15.0
_GAP, _MOST_TOGETHER = 4096, 8 << 20
"""Most bytes between two pieces of one request, and of such a request."""
_ASKED = 8
"""Files of a folder that are asked for one by one; more are listed."""
_TAGS = ("ETag", "etag", "generation", "blob_id", "LastModified", "last_modified", "updated", "mtime")
"""Facts that drivers give of a file, of which the first tells one content from another."""


def check_url(url: str, key: str) -> None:
    """Raises DataError for an address that can't be read, ConfigError where its driver isn't installed."""
    if problem := unusable_text(url):
        raise DataError(f"{key}: {problem}")
    if url.partition("://")[0] not in _DRIVERS:
        kinds = ", ".join(f"{scheme}://" for scheme in _DRIVERS)
        raise DataError(f"{key} {url} is not a local path, nor one of {kinds}: mount or copy it, then give its path")
    _driver(url)


def find_files(pattern: str) -> dict[str, list[int]]:
    """Addresses that a pattern with * stands for, sorted, each with its size and tag. Raises DataError."""
    scheme = pattern.partition("://")[0]
    folder, name = os.path.split(pattern)

    async def find() -> list[dict[str, Any]]:
        if glob.has_magic(folder) or "**" in name:
            return [*(await _call(pattern, "glob", detail=True)).values()]
        with suppress(FileNotFoundError):  # once: glob lists a folder twice
            listed = await _call(f"{folder}/", "ls", detail=True)
            return [file for file in listed if fnmatch.fnmatchcase(os.path.basename(file["name"]), name)]
        return []

    begin = re.split(r"[*?[]", pattern, maxsplit=1)[0].rpartition("/")[0]

    async def reach() -> None:
        try:
            await _call(begin, "info")
        except Exception as error:
            if not _understand(error)[0]:  # a status, even of an error, is an answer
                raise

    with suppress(FileNotFoundError):  # a server that can't be reached is noticed before the long wait for a listing
        _wait(_retried(begin, reach, _OPEN_SECONDS))
    found = _wait(_retried(pattern, find, _OPEN_SECONDS, _LIST_SECONDS))
    files = {file["name"] if is_url(file["name"]) else f"{scheme}://{file['name']}": file for file in found}
    return {url: _state(facts) for url, facts in sorted(files.items()) if facts["type"] != "directory"}


def find_states(urls: Sequence[str]) -> list[list[int]]:
    """Size and tag of each file; those of a bucket's folder come by listing it. Raises DataError for missing ones."""
    folders = Counter(map(os.path.dirname, urls))
    listed = {folder for folder, count in folders.items() if count > _ASKED and not folder.startswith("http")}
    known = {url: state for folder in listed for url, state in find_files(f"{folder}/*").items()}

    async def find(url: str) -> None:
        with suppress(FileNotFoundError):
            known[url] = (await _retried(url, lambda: _get(url, 0, 1), _OPEN_SECONDS))[1]

    async def find_all() -> None:
        await asyncio.gather(*(find(url) for url in urls if os.path.dirname(url) not in listed))

    _wait(find_all())
    if missing := [url for url in urls if url not in known]:
        raise DataError(f"{len(missing)} of {len(urls)} files are not there, such as {printable(missing[0])}")
    return [known[url] for url in urls]


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
        missing = list[FilePiece]()
        for piece in wanted.keys() - self._ahead.keys():
            if self._cache and (kept := self._cache.get(piece)):
                self._ahead[piece] = Future()
                self._ahead[piece].set_result({piece: kept})
            else:
                missing.append(piece)
        for group in _together(missing):
            self._ahead |= dict.fromkeys(group, self._begin(group))

    def read(self, piece: FilePiece) -> bytes:
        """The bytes of a piece, or of a part of one that was prepared.

        Raises DataError with its place; FileNotFoundError for a whole file.
        """
        if (whole := next(filter(piece.is_in, self._ahead), None)) is not None:
            begin = piece.begin - whole.begin
            return self._ahead[whole].result()[whole][begin:][: piece.length]
        if self._cache and (kept := self._cache.get(piece)):
            return kept
        return self._begin([piece]).result()[piece]

    def _begin(self, group: list[FilePiece]) -> Future[dict[FilePiece, bytes]]:
        return asyncio.run_coroutine_threadsafe(_fetch(group, self._cache, self._seconds), _loop())


def remote_with_room(
    urls: Sequence[str], states: Sequence[Sequence[int]], needed: int, gib: float
) -> tuple[Remote, list[str]]:
    """The way to `needed` bytes of files, with a cache of `gib`, and a line for the log on how much of them stays."""
    what = f"{needed / 2**20:,.0f} MiB of images are elsewhere"
    if not gib:
        return Remote(), [f"{what} and fetched in every epoch: --data.remote_cache_gib keeps them on a disk"]
    cache = RemoteCache(int(gib * 2**30))
    cache.make_room([FilePiece(url, *state) for url, state in zip(urls, states, strict=True)], needed)
    return Remote(cache), [f"{what}: {min(1, cache.size / max(needed, 1)):.0%} of them stay in {cache.folder}"]


def _together(pieces: list[FilePiece]) -> list[list[FilePiece]]:
    """Pieces in groups of neighbors, each of which is one request."""
    groups = list[list[FilePiece]]()
    for piece in sorted(pieces):
        first, last = (groups[-1][0], groups[-1][-1]) if groups else (piece, piece)
        near = piece[:3] == last[:3] and piece.begin - last.begin - last.length <= _GAP and piece.length >= 0
        if groups and near and piece.begin + piece.length - first.begin <= _MOST_TOGETHER:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


async def _fetch(group: list[FilePiece], cache: RemoteCache | None, seconds: float) -> dict[FilePiece, bytes]:
    (url, size, tag, begin, length, _), last = group[0], group[-1]
    if length < 0:
        return {last: (await _retried(url, lambda: _get(url), seconds))[0]}
    with suppress(FileNotFoundError):
        data, state = await _retried(url, lambda: _get(url, begin, last.begin + last.length), seconds)
        found = {piece: data[piece.begin - begin :][: piece.length] for piece in group}
        if state == [size, tag] or (tag < 0 and all(zlib.crc32(found[piece]) == piece.checksum for piece in group)):
            if cache:
                for piece, part in found.items():
                    cache.put(piece, part)
            return found
    listed = "index.jsonl says: copy that there again" if tag < 0 else "when its images were listed: put it back"
    raise DataError(f"{printable(url)} is gone or is another file than {listed}, or start anew")


async def _get(url: str, begin: int = 0, end: int | None = None) -> tuple[bytes, list[int]]:
    """Bytes of a file, and size and tag of the very file that gave them. Raises OSError where some are missing."""
    fs, part = _driver(url), {} if end is None else {"Range": f"bytes={begin}-{end - 1}"}
    if url.startswith("http"):
        asked = {"Accept-Encoding": "identity", **part}
        async with (await fs.set_session()).get(fs.encode_url(url), headers=asked) as answer:
            answer.raise_for_status()
            if part and answer.status != 206:
                raise DataError(f"{printable(url)}: its server gives no ranges of bytes, so copy its files to a disk")
            data, headers = await answer.read(), answer.headers
        facts: Any = {"ETag": headers.get("ETag"), "LastModified": headers.get("Last-Modified")}
        place = headers.get("Content-Range")
    elif url.startswith("s3"):
        bucket, key, _ = fs.split_path(url)
        facts = await fs._call_s3("get_object", Bucket=bucket, Key=key, **part)
        data, place = await facts["Body"].read(), facts.get("ContentRange")
    else:  # these give no tag with the bytes: asked afterwards, so that it is not an older one
        data = await _call(url, "cat_file", start=begin, end=end)
        facts = await _call(url, "info")
        place = f"/{facts['size']}"
    size = int(place.rpartition("/")[2]) if place else len(data)
    if len(data) != min(size, end or size) - begin:
        raise OSError("fewer bytes came than were promised")
    return data, _state({**facts, "size": size})


def _state(facts: Any) -> list[int]:
    """Size, and a number for what tells this content from another."""
    tag = next((str(facts[name]).strip('"') for name in _TAGS if facts.get(name)), "")
    return [facts["size"] or 0, int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=8).digest(), "big") >> 1]


async def _retried(url: str, act: Callable[[], Awaitable[Any]], seconds: float, most: float | None = None) -> Any:
    """The result of `act`, which is called again after an error until `seconds` are over; most: seconds of one try.

    Raises FileNotFoundError for a file that is not there, and DataError with the address and the number of tries.
    """
    begin, tries = time.monotonic(), 0
    while True:
        tries += 1
        try:
            async with _driver(url).gate:
                return await asyncio.wait_for(act(), most or min(_REQUEST_SECONDS, seconds))
        except (DataError, ConfigError, FileNotFoundError):
            raise
        except Exception as error:  # each driver has its own family of errors
            status, after, reason = _understand(error)
            wait = max(after, random.uniform(0.5, 1) * min(_LONGEST_WAIT, _FIRST_WAIT * 2**tries))
            used = time.monotonic() - begin
            if status in (404, 410):
                raise FileNotFoundError(2, "not there", printable(url)) from None
            if status in (401, 403) or isinstance(error, PermissionError) or "Credential" in reason:
                raise DataError(f"{printable(url)} may not be read ({reason}): give its driver credentials") from None
            if status in (400, 405, 416) or isinstance(error, ValueError | TypeError) or used + wait > seconds:
                raise DataError(
                    f"{printable(url)} can't be read, tried {tries} times in {used:.0f} s ({reason}): no other image "
                    "takes its place; a run continues with --resume once it can be read"
                ) from None
        await asyncio.sleep(wait)


def _understand(error: BaseException) -> tuple[int, float, str]:
    """HTTP status in an error, or 0; seconds that its server asks to wait; words without addresses: some are signed."""
    for one in filter(None, (error, error.__cause__)):
        response = getattr(one, "response", None)
        about = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
        status = about.get("HTTPStatusCode") or getattr(one, "status", 0)
        if isinstance(status, int) and status >= 400:
            headers = about.get("HTTPHeaders") or getattr(one, "headers", None) or {}
            after = headers.get("retry-after") or headers.get("Retry-After") or ""
            return status, float(after) if after.isdigit() else 0.0, f"HTTP {status}"
    if isinstance(error, asyncio.TimeoutError):
        return 0, 0.0, "no answer"
    return 0, 0.0, one_line(re.sub(r"\S*://\S*", "...", f"{type(error).__name__}: {error}"), 120)


async def _call(url: str, name: str, **options: Any) -> Any:
    fs = _driver(url)
    if fs.async_impl:
        return await getattr(fs, f"_{name}")(url, **options)
    return await asyncio.to_thread(getattr(fs, name), url, **options)


def _driver(url: str) -> Any:
    return _driver_of(url.partition("://")[0], os.getpid())


@functools.lru_cache
def _driver_of(scheme: str, pid: int) -> Any:
    """The fsspec file system for addresses of a scheme, one in each process; it looks for credentials by itself."""
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme == "s3":  # tries and waits are counted here
        options["config_kwargs"] = {"retries": {"max_attempts": 0}, "max_pool_connections": _REQUESTS}
    elif scheme.startswith("http"):
        options["client_kwargs"] = {"trust_env": True}
    try:
        import fsspec

        found = fsspec.filesystem(scheme, **options)
        found.gate, found.retries = asyncio.Semaphore(_REQUESTS), 1  # the second of s3fs
        return found
    except ImportError:
        extra = "'dino_ds[remote]'" if scheme in ("s3", "http", "https") else _DRIVERS[scheme]
        raise ConfigError(f"{scheme}:// needs {_DRIVERS[scheme]}: pip install {extra}") from None
    except Exception as error:
        raise ConfigError(f"{scheme}:// can't be opened: {_understand(error)[2]}") from None


def _loop() -> Any:
    """fsspec's, in a thread of its own; a forked process gets a new one."""
    import fsspec.asyn

    return fsspec.asyn.get_loop()


def _wait(work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()

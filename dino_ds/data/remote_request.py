"""Requests to buckets and web servers by fsspec: bounded in bytes and seconds, retried, their errors put in words."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import random
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from dino_ds.basics.files import unusable_text
from dino_ds.data.listing import printable
from dino_ds.errors import ConfigError, DataError, one_line

_DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "hf": "huggingface_hub", "https": "aiohttp", "http": "aiohttp"}
"""The package with which fsspec reads addresses of a scheme."""
_REQUESTS, _REQUEST_SECONDS = 32, 60.0
"""Requests that a process has under way at most, and the longest wait for one answer."""
_MOST_OF_A_FILE, _MOST_OF_A_PAGE, _AT_ONCE = 1 << 30, 64 << 20, 1 << 20
"""Most bytes of a whole file, and of the page of a listing or an error; bytes that are read before they are counted."""
_TAGS = ("ETag", "etag", "generation", "blob_id", "LastModified", "last_modified", "updated", "mtime")
"""Facts that drivers give of a file, of which the first tells one content from another."""
_PLACE = re.compile(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18})")


class Refusal(DataError):
    """An answer that another try would not change."""


class NothingThere(FileNotFoundError):
    """A file ends before the bytes that were asked for."""


def check_url(url: str, key: str) -> None:
    """Raises DataError for an address that can't be read, ConfigError where its driver isn't installed."""
    if problem := unusable_text(url):
        raise DataError(f"{key}: {problem}")
    if url.partition("://")[0] not in _DRIVERS:
        kinds = ", ".join(f"{scheme}://" for scheme in _DRIVERS)
        raise DataError(f"{key}: {url} is not a local path, nor one of {kinds}: mount or copy it, then give its path")
    _driver(url)


async def get(url: str, begin: int = 0, end: int | None = None) -> tuple[bytes, list[int]]:
    """Bytes of a file, and size and tag of the very file that gave them. Raises OSError where some are missing."""
    fs, part = _driver(url), {} if end is None else {"Range": f"bytes={begin}-{end - 1}"}
    most = _MOST_OF_A_FILE if end is None else end - begin
    if url.startswith("http"):
        async with (await fs.set_session()).get(fs.encode_url(url), headers=part) as answer:
            answer.raise_for_status()
            headers, answer.most = answer.headers, most
            if part and answer.status != 206 and headers.get("Content-Length") != "0":
                raise Refusal("its server gives no ranges of bytes, so copy its files to a disk")
            data = await answer.read()
        facts: Any = {"ETag": headers.get("ETag"), "LastModified": headers.get("Last-Modified")}
        content_range = headers.get("Content-Range", "") if answer.status == 206 else "bytes 0-0/0"
    elif url.startswith("s3"):
        bucket, key, _ = fs.split_path(url)
        facts = await fs._call_s3("get_object", Bucket=bucket, Key=key, **part)
        async with facts["Body"]:
            data = await _read_body(facts["Body"].read, facts.get("ContentEncoding"), most)
        content_range = facts.get("ContentRange", "")
    else:  # no tag comes with the bytes: asked for afterwards, it is not older than they are
        data = await call(url, "cat_file", start=begin, end=end)
        facts = await call(url, "info")
        content_range = f"bytes {begin}-0/{facts['size']}"
    said = _PLACE.fullmatch(content_range)
    if part and (said is None or int(said[1]) != begin):
        problem = f"its server doesn't say which bytes it sends (Content-Range: {content_range or 'none'})"
        raise Refusal(f"{problem}: copy its files")
    size = int(said[2]) if part and said else len(data)
    if len(data) != min(size, end or size) - begin:
        raise OSError("fewer bytes came than were promised")
    return data, state_of({**facts, "size": size})


async def _read_body(read: Callable[[int], Awaitable[bytes]], encoding: str | None, most: int) -> bytes:
    """The body of an answer. Raises Refusal as soon as it has more than `most` bytes, or where it is compressed."""
    if (encoding or "").lower() in ("gzip", "x-gzip", "compress", "x-compress", "deflate", "br", "zstd"):
        raise Refusal(f"its server compresses it ({encoding}), which was not asked for: set it right, or copy the file")
    parts, size = list[bytes](), 0
    while part := await read(_AT_ONCE):
        size += len(part)
        if size > most:
            raise Refusal(f"its server sends more than the {most} bytes that are allowed")
        parts.append(part)
    return b"".join(parts)


def state_of(facts: Any) -> list[int]:
    """Size, and the hash of the tag that tells this content from another, above 0; 0 without a tag."""
    size = facts["size"] or 0
    tag = next((str(facts[name]).strip('"') for name in _TAGS if facts.get(name)), "") if size else "empty"
    number = int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=8).digest(), "big") >> 1
    return [size, number if tag else 0]


async def retried(url: str, act: Callable[[], Awaitable[Any]], seconds: float, most: float | None = None) -> Any:
    """The result of `act`, which is called again after an error until `seconds` are over; most: seconds of one try.
    Raises FileNotFoundError for a file that is not there, and DataError with the address and the number of tries."""
    begin, tries = time.monotonic(), 0
    while True:
        tries += 1
        try:
            async with _driver(url).gate:
                return await asyncio.wait_for(act(), most or min(_REQUEST_SECONDS, seconds))
        except (ConfigError, FileNotFoundError):
            raise
        except Exception as error:  # each driver has its own family of errors
            status, after, reason = understand(error)
            wait = max(after, random.uniform(0.5, 1) * min(15, 0.2 * 2**tries))
            used = time.monotonic() - begin
            if status in (404, 410, 416):
                raise (NothingThere if status == 416 else FileNotFoundError)(2, "not there", printable(url)) from None
            cause: BaseException | None = error  # a driver may have put its own errors around a Refusal
            while cause is not None and not isinstance(cause, Refusal):
                cause = cause.__cause__ or cause.__context__
            if cause:
                raise Refusal(f"{printable(url)}: {cause}") from None
            if status in (401, 403) or isinstance(error, PermissionError) or "Credential" in reason:
                raise Refusal(f"{printable(url)} may not be read ({reason}): give its driver credentials") from None
            problem = f"{printable(url)} can't be read, tried {tries} times in {used:.0f} s ({reason})"
            if status in (400, 405) or isinstance(error, ValueError | TypeError) or "TooManyRedirects" in reason:
                raise Refusal(problem) from None
            if used + wait > seconds:
                remedy = "no other image takes its place; a run continues with --resume once it can be read"
                raise DataError(f"{problem}: {remedy}") from None
        await asyncio.sleep(wait)


def understand(error: BaseException) -> tuple[int, float, str]:
    """HTTP status in an error, or 0; seconds that its server asks to wait; words without addresses: some are signed."""
    for cause in filter(None, (error, error.__cause__)):
        response = getattr(cause, "response", None)
        about = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
        status = about.get("HTTPStatusCode") or getattr(cause, "status", 0)
        if isinstance(status, int) and status >= 400:
            headers = about.get("HTTPHeaders") or getattr(cause, "headers", None) or {}
            after = headers.get("retry-after") or headers.get("Retry-After") or ""
            return status, float(after) if re.fullmatch("[0-9]{1,9}", after) else 0.0, f"HTTP {status}"
    words = one_line(re.sub(r"\S*://\S*", "...", f"{type(error).__name__}: {error}"), 120)
    return 0, 0.0, "no answer" if isinstance(error, asyncio.TimeoutError) else words


async def call(url: str, name: str, **options: Any) -> Any:
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
    try:
        import fsspec

        if scheme == "s3":
            from aiobotocore.httpsession import AIOHTTPSession

            class Session(AIOHTTPSession):
                async def _get_session(self, proxy_url: str | None) -> Any:
                    session = await super()._get_session(proxy_url)
                    session._response_class = _bounded_answer()
                    return session

            retries, pool = {"max_attempts": 0}, {"max_pool_connections": _REQUESTS}  # tries and waits are counted here
            options["config_kwargs"] = {"retries": retries, "http_session_cls": Session, **pool}
        elif scheme.startswith("http"):
            options["get_client"] = _http_session
        driver = fsspec.filesystem(scheme, **options)
        driver.gate, driver.retries = asyncio.Semaphore(_REQUESTS), 1  # `retries` is an attribute of s3fs
        return driver
    except ImportError:
        extra = "'dino_ds[remote]'" if scheme in ("s3", "http", "https") else _DRIVERS[scheme]
        raise ConfigError(f"{scheme}:// needs {_DRIVERS[scheme]}: pip install {extra}") from None
    except Exception as error:
        raise ConfigError(f"{scheme}:// can't be opened: {understand(error)[2]}") from None


@functools.cache
def _bounded_answer() -> Any:
    """aiohttp's response class, for drivers that read bodies whole: at most `most` bytes, which a request may set."""
    import aiohttp

    class Answer(aiohttp.ClientResponse):
        most = _MOST_OF_A_PAGE

        async def read(self) -> bytes:
            if self._body is None:
                self._body = await _read_body(self.content.read, self.headers.get("Content-Encoding"), self.most)
            return self._body

    return Answer


async def _http_session(**options: Any) -> Any:
    """A session that keeps no cookies and decompresses nothing."""
    import aiohttp

    options |= {"auto_decompress": False, "headers": {"Accept-Encoding": "identity"}, "trust_env": True}
    return aiohttp.ClientSession(response_class=_bounded_answer(), cookie_jar=aiohttp.DummyCookieJar(), **options)


def begin(work: Any) -> Any:
    """Start the coroutine `work` in fsspec's thread (a new one after a fork); returns the future of its result."""
    import fsspec.asyn

    return asyncio.run_coroutine_threadsafe(work, fsspec.asyn.get_loop())

"""Reads text files safely: what is at the path may be a device, a pipe, a disk image or gigabytes instead."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from dino_ds.errors import ConfigError

MAX_BYTES = 1 << 18
MAX_JSON_BYTES = 64 << 20
MAX_LINES_BYTES, MAX_LINE_BYTES = 4 << 30, 1 << 20
"""Most bytes of a file that a run may append to for years, and of one line of it."""
_MOST_TEXT, _MOST_NAME = 4096, 255
"""Most bytes of a path on Linux, and of a name in it."""


def read_text(path: str, kind: str) -> str:
    """The UTF-8 text of a regular file of at most 256 KiB; `kind`: what the file should be, for the ConfigError."""
    try:
        return read_bytes(path, MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} cannot be read as {kind}: it is not UTF-8 text") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError(f"{path} cannot be read as {kind}: {getattr(error, 'strerror', None) or error}") from None


def read_bytes(path: str | Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises OSError, ValueError."""
    with opened(path, most) as file:
        return file.read(most)


def read_object(path: str | Path) -> dict[str, Any]:
    """The JSON object in a regular file of at most 64 MiB. Raises OSError, and ValueError for any other content."""
    try:
        content = json.loads(read_bytes(path, MAX_JSON_BYTES))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def read_lines(path: str | Path) -> Iterator[bytes]:
    """Yield the lines of a regular file, each cut after 1 MiB. Raises OSError; ConfigError for a pipe or over 4 GiB."""
    try:
        with opened(path, MAX_LINES_BYTES) as file:
            while line := file.readline(MAX_LINE_BYTES):
                yield line
                while len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


@contextmanager
def opened(path: str | bytes | Path, most: int) -> Iterator[BinaryIO]:
    """Open a file without waiting for a pipe's writer. Raises ValueError if it is not regular, or over `most` bytes."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("it is not a regular file")
        if state.st_size > most:
            size = f"{state.st_size / 2**30:.1f} GiB, {most >> 30}" if most >> 30 else f"{state.st_size} bytes, {most}"
            raise ValueError(f"{size} are allowed")
        yield file


def is_file(path: str) -> bool:
    """Whether a regular file is at the path; False for text that cannot be a path."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def is_url(text: str) -> bool:
    """Whether `text` is a URL, such as s3://bucket/file, and not a path."""
    return re.match(r"[a-z][a-z0-9+.-]*://", text, re.IGNORECASE) is not None


def unusable_text(text: str) -> str:
    """Why `text` cannot be a path, for a message; "" if it can. A URL must hold no password and no signature, as it is
    written into recipes, logs and checkpoints."""
    if is_url(text) and re.search(r"://[^/]*@|[?#]", text):
        return (
            f"an address of {text.partition(':')[0]}:// has a password, a query or a fragment (@ ? #), which would be "
            "written into logs and checkpoints: leave it out; drivers find credentials by themselves"
        )
    start = f"{text[:40]!r}{'...' if len(text) > 40 else ''}"
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        return f"{start} holds bytes that are not UTF-8: rename the file or folder"
    if b"\0" in raw:
        return f"{start} holds a NUL character"
    longest = max(len(name) for name in re.split(rb"[/,\s]", raw))
    if len(raw) > _MOST_TEXT or longest > _MOST_NAME:
        return f"{start} is too long: {len(raw)} bytes; a path has at most {_MOST_TEXT}, a name in it {_MOST_NAME}"
    return ""

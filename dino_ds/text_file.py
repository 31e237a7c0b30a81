"""Reading text files of people and of runs, which may be anything else: a device, a disk image, a bomb."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from dino_ds.errors import ConfigError

MAX_BYTES = 1 << 18
MAX_LINES_BYTES, MAX_LINE_BYTES = 4 << 30, 1 << 20
"""Of a file that a run has appended to for years, and of one line of it."""
_MOST_TEXT, _MOST_NAME = 4096, 255
"""Bytes that Linux takes as a path and as a name in it."""


def read_text(path: str, kind: str) -> str:
    """The UTF-8 text of a regular file of at most 256 KiB; `kind` is what it should be, for the ConfigError."""
    try:
        with _open(path) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise ConfigError(f"{path} cannot be read as {kind}: it is no regular file")
            if state.st_size > MAX_BYTES:
                raise ConfigError(f"{path} cannot be read as {kind}: {state.st_size} bytes, {MAX_BYTES} are allowed")
            return file.read(MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} cannot be read as {kind}: it is no UTF-8 text") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError(f"{path} cannot be read as {kind}: {getattr(error, 'strerror', None) or error}") from None


def read_lines(path: str | Path) -> Iterator[bytes]:
    """The lines of a regular file, which may be a sparse disk image instead: what is longer than 1 MiB is cut there.

    Raises ConfigError for a pipe, and for more than 4 GiB; OSError.
    """
    with _open(path) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise ConfigError(f"{path} cannot be read: it is not a regular file")
        if state.st_size > MAX_LINES_BYTES:
            gib = state.st_size / 2**30
            raise ConfigError(f"{path} cannot be read: {gib:.1f} GiB, {MAX_LINES_BYTES >> 30} are allowed")
        while line := file.readline(MAX_LINE_BYTES):
            yield line
            while len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)


def _open(path: str | Path) -> BinaryIO:
    """Opens at once, also a pipe that nobody writes to."""
    return open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def is_file(path: str) -> bool:
    """As Path.is_file; False for what no file can be called."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def unusable_text(text: str) -> str:
    """Why no file can be called so, in words for people; "" where one can."""
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

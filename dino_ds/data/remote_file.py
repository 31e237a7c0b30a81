"""A remote file as a Python file, for libraries that read files."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any

from dino_ds.data.remote import Remote
from dino_ds.data.remote_cache import FilePiece

_WINDOW = 4 << 20
"""Bytes of a request where a file is read from end to end."""


class _RemoteFile(io.RawIOBase):
    def __init__(self, remote: Remote, url: str, state: Sequence[int]) -> None:
        self._remote, self._url, self._state, self._place = remote, url, state, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + (0, self._place, self._state[0])[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self._state[0] - self._place))
        if length:
            size, tag = self._state
            buffer[:length] = self._remote.read(FilePiece(self._url, size, tag, self._place, length))
        self._place += length
        return length


def open_remote(remote: Remote, url: str, state: Sequence[int], window: int = _WINDOW) -> Any:
    """A remote file for libraries that read files; at least `window` bytes are fetched at a time."""
    file = _RemoteFile(remote, url, state)
    return io.BufferedReader(file, window) if window else file

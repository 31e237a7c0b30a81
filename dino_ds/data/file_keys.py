"""Tells files apart by what their paths resolve to, without opening more than links."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from typing import Any

_SPREAD = 0x9E3779B97F4A7C15
"""Odd factor that keeps inode numbers of several devices apart."""


def file_key(path: str) -> int:
    """A number for the file that a path leads to, by whatever links or spelling; by the path where no file is."""
    try:
        state = os.stat(path)
    except (OSError, ValueError):  # not there, an address, or with a NUL
        return _path_key(path)
    return key_on(state.st_dev, state.st_ino)


def key_on(device: int, inode: int) -> int:
    """The `file_key` of a file; that of inode 0 is the part of it that depends on the device."""
    return (inode + device * _SPREAD) % 2**64


def archive_key(path: str, part: str = "") -> int:
    """The number of the first place in an archive's part, far from those of other archives."""
    return _hashed(f"{file_key(path)}:{part}")


def _path_key(path: str) -> int:
    return _hashed(os.path.realpath(path.replace("\0", "?")))


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(os.fsencode(text), digest_size=8).digest(), "little")


class FolderKeys:
    """The `file_key` of entries of one folder on a device, without opening files, but for links.

    Where a file system's folders do not list true inode numbers, files are told apart by path.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._lists_inodes: bool | None = None

    def of(self, entry: os.DirEntry[Any]) -> int:
        if entry.is_symlink():
            return file_key(os.fsdecode(entry.path))
        if self._lists_inodes is None:
            self._lists_inodes = entry.stat().st_ino == entry.inode()
        return key_on(self._device, entry.inode()) if self._lists_inodes else _path_key(os.fsdecode(entry.path))


def keys_in(folder: str) -> dict[int, int]:
    """The `file_key` of each entry of a folder by the hash of its name; {} for a folder that can't be listed."""
    with suppress(OSError), os.scandir(folder) as entries:
        keys = FolderKeys(os.stat(folder).st_dev)
        return {hash(entry.name): keys.of(entry) for entry in entries}
    return {}

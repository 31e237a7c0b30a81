"""Matches the classes of several files or sources by name, and tells files apart by what their paths resolve to,
without opening more than links.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import numpy as np

from dino_ds.data.listing import LABEL_NAMES, printable
from dino_ds.errors import DataError

_SPREAD = 0x9E3779B97F4A7C15
"""Odd factor that keeps inode numbers of several devices apart."""
_NULL = "__HIVE_DEFAULT_PARTITION__"
"""Value in the name of a folder of rows without one."""


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


def join_classes(lists: Iterable[Sequence[str]]) -> tuple[list[str], list[np.ndarray]]:
    """Match the classes of several sources by name; a name that a list has twice is two classes.

    Returns all names in the order of first appearance, and for each list the joined number of each of its classes, with
    -1 as the last entry, so that labels, -1 for none, can be its index.
    """
    joined, numbers = dict[tuple[str, int], int](), list[np.ndarray]()
    for names in lists:
        seen, of_list = Counter[str](), list[int]()
        for name in names:
            of_list.append(joined.setdefault((name, seen[name]), len(joined)))
            seen[name] += 1
        numbers.append(np.array([*of_list, -1], np.int32))
    return [name for name, _ in joined], numbers


def note_unnamed(places: Iterable[str]) -> list[str]:
    """A note on classes that have only numbers in several places, if there are several."""
    several = list(dict.fromkeys(places))
    some = ", ".join([*several[:3], "..."] if len(several) > 3 else several)
    note = f"the classes of {some} are numbers without names: equal numbers are taken for the same class"
    return [note] if len(several) > 1 else []


def by_name(labels: list[list[Any]], names: list[list[str]], files: list[str]) -> tuple[list[list[Any]], list[str]]:
    """Labels by file, and the class names of all files, of which each had its own. Raises DataError for numbers without
    names in some files only."""
    if all(some == names[0] for some in names):
        return labels, names[0]
    for values, some, file in zip(labels, names, files, strict=True):
        if not all(value is None or value < len(some) for value in values):
            raise DataError(
                f"{printable(file)} has class numbers without names, unlike other files: write them into all files "
                "(with datasets: ClassLabel), or give the files as parts of data.mixture"
            )
    classes, joined = join_classes(names)
    for values, numbers in zip(labels, joined, strict=True):
        values[:] = [int(numbers[-1 if value is None or value < 0 else value]) for value in values]
    return labels, classes


def partitions(files: list[str]) -> tuple[list[str | None], list[str]]:
    """The class of each file by a folder such as label=cat below the files' common one; and a note on other folders."""
    begin = len(os.path.commonpath(list(map(os.path.dirname, files)))) + 1
    of_files = [dict(part.split("=", 1) for part in file[begin:].split("/")[:-1] if "=" in part) for file in files]
    keys = list(dict.fromkeys(key for pairs in of_files for key in pairs))
    key = next((name for name in LABEL_NAMES if name in keys), None)
    if key is None:
        folders = ", ".join(f"{printable(name)}=…" for name in keys[:3])
        return [None] * len(files), [f"folders {folders} give no classes: call them label=…"] * bool(keys)
    values = (pairs.get(key, _NULL) for pairs in of_files)
    return [None if value == _NULL else unquote(value) for value in values], []

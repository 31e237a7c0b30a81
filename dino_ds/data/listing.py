"""Lists of millions of images in memory-mapped files, which cost each process almost nothing, and classes of images.

A list (numpy arrays and a JSON object, as safetensors) lies in the user's cache under a name that is used once, so that
a source is pickled for loader processes as a path."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import time
import uuid
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from dino_ds.basics.files import FORMAT, cache_folder, replacing
from dino_ds.errors import DataError

_DTYPES = {"U8": np.uint8, "I32": np.int32, "I64": np.int64}
_SPLIT_NAMES = {b"train", b"training", b"val", b"valid", b"validation", b"test", b"testing"}
LABEL_NAMES = ("label", "labels", "fine_label", "cls", "class")  # names of a column or key with classes


def find_listing(kind: str, key: str, is_current: Callable[[Listing], bool], build: Callable[[], Contents]) -> Listing:
    """The list named `key` from the cache if `is_current` accepts it; otherwise `build` makes it, in one process of a
    machine. If the cache can't be written, the list is kept in a temporary folder until the process ends. Raises
    DataError if this has no room either, and the errors of `build`."""
    stem = f"{kind}-{hashlib.sha256(os.fsencode(key)).hexdigest()[:24]}"
    folder = cache_folder()
    if listing := _find_current(folder, stem, is_current):
        return listing
    with ExitStack() as stack:
        with suppress(OSError):  # no cache, or a file system without locks: two processes may do the same work
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            fcntl.flock(stack.enter_context(open(folder / f"{stem}.lock", "w")), fcntl.LOCK_EX)
        if listing := _find_current(folder, stem, is_current):
            return listing
        contents = build()
        arrays = {name: np.ascontiguousarray(values) for name, values in contents.arrays.items()}
        about = {"about": json.dumps(contents.about), "checksums": json.dumps(_checksums(arrays))}
        for find_folder in (lambda: folder, lambda: Path(_temporary().name)):
            try:
                path = find_folder() / f"{stem}-{uuid.uuid4().hex[:12]}.safetensors"
                with replacing(path) as part:
                    save_file(arrays, part, {"format": str(FORMAT), **about})
                # Three are kept, and those opened within a week: jobs may still start workers with them.
                for old in _newest_first(path.parent, stem)[3:]:
                    with suppress(OSError):
                        if old.stat().st_mtime < time.time() - 7 * 24 * 3600:
                            old.unlink()
                return Listing(path)
            except Exception as error:  # safetensors has its own error for a full disk
                reason = error
    raise DataError(f"the list of images can't be kept in {folder}: {reason}; set DINO_DS_CACHE to a folder with room")


def _find_current(folder: Path, stem: str, is_current: Callable[[Listing], bool]) -> Listing | None:
    for path in _newest_first(folder, stem):
        try:
            listing = Listing(path)
            usable = is_current(listing) and _checksums(listing.arrays) == listing.checksums
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue  # of another format, or damaged: it will be replaced
        if usable:
            with suppress(OSError):  # another user's cache, read-only here
                os.utime(path)
            return listing
    return None


def _newest_first(folder: Path, stem: str) -> list[Path]:
    files = []
    for path in folder.glob(f"{stem}-*.safetensors"):
        with suppress(OSError):  # pruned by another process
            files.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(files, reverse=True)]


_temporary = cache(lambda: tempfile.TemporaryDirectory(prefix="dino_ds-"))  # removed when this process ends


class Listing:
    """An opened list file. Raises OSError or ValueError if the file is incomplete or of another format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            head = int.from_bytes(file.read(8), "little")
            if head > os.fstat(file.fileno()).st_size:
                raise ValueError(f"{path} is damaged")
            header = json.loads(file.read(head))
        metadata = header.pop("__metadata__")
        if metadata["format"] != str(FORMAT):
            raise ValueError(f"{path} is of another format")
        self.about: dict[str, Any] = json.loads(metadata["about"])
        self.checksums: dict[str, int] = json.loads(metadata["checksums"])
        whole = np.memmap(path, np.uint8, "r")[8 + head :]
        if len(whole) != max(entry["data_offsets"][1] for entry in header.values()):
            raise ValueError(f"{path} is cut off")
        self.arrays = {
            name: np.asarray(whole[slice(*entry["data_offsets"])]).view(_DTYPES[entry["dtype"]])
            for name, entry in header.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path,)

    def texts(self, name: str) -> Texts:
        return Texts(self.arrays[f"{name}.bytes"], self.arrays[f"{name}.ends"])


def _reopen(path: Path) -> Listing:
    try:
        return Listing(path)
    except (OSError, ValueError) as error:
        raise DataError(f"the list of images {path} is gone ({error}); start again: it will be rebuilt") from None


def _checksums(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    return {name: zlib.crc32(values.data) for name, values in arrays.items()}


class Contents(NamedTuple):
    """Content of a list file: arrays by name (uint8, int32 or int64) and JSON values."""

    arrays: dict[str, np.ndarray]
    about: dict[str, Any]


class Packer:
    """Collects texts (bytes) into the two arrays of `Texts`."""

    def __init__(self) -> None:
        self._data, self._ends = bytearray(), array("q")

    def add(self, text: bytes) -> None:
        self._data += text
        self._ends.append(len(self._data))

    def __len__(self) -> int:
        return len(self._ends)

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        data, ends = np.frombuffer(self._data, np.uint8), np.frombuffer(self._ends, np.int64)
        return {f"{name}.bytes": data, f"{name}.ends": ends}


class Texts(Sequence[str]):
    """Texts as one array of bytes (uint8), and the end of each text in it (int64)."""

    def __init__(self, data: np.ndarray, ends: np.ndarray) -> None:
        self._data, self._ends = data, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        number = range(len(self))[index]
        begin = int(self._ends[number - 1]) if number else 0
        return os.fsdecode(self._data[begin : int(self._ends[number])].tobytes())


class Labels(Sequence[int]):
    """Class numbers, int32 in an array, which `np.asarray` returns without a copy."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return self._numbers[index].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._numbers, dtype=dtype, copy=bool(copy)) if copy or dtype else self._numbers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and np.array_equal(self._numbers, np.asarray(other))


class FolderLabels:
    """Classes from the first folders of all paths, if there are at least two, not all called train, val or test."""

    def __init__(self) -> None:
        self._numbers, self._labels, self._everywhere = dict[bytes, int](), array("i"), True

    def add(self, path: bytes) -> None:
        first, slash, _ = path.partition(b"/")
        self._everywhere = self._everywhere and bool(slash)
        if self._everywhere:
            self._labels.append(self._numbers.setdefault(first, len(self._numbers)))

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays of a Listing with labels and classes; empty if the folders are not classes."""
        names = sorted(self._numbers)
        if not self._everywhere or len(names) < 2 or {name.lower() for name in names} <= _SPLIT_NAMES:
            return {}
        return label_arrays([self._numbers[name] for name in names], np.frombuffer(self._labels, np.int32), names)


def label_arrays(order: list[int], numbers: np.ndarray, names: list[bytes]) -> dict[str, np.ndarray]:
    """Arrays of a Listing for `numbers` (n,), where number `order[k]` becomes k with the name `names[k]`; -1 stays."""
    renumbered = np.full(len(order) + 1, -1, np.int32)  # the last entry is for -1
    renumbered[order] = np.arange(len(order), dtype=np.int32)
    classes = Packer()
    for name in names:
        classes.add(name)
    return {"labels": renumbered[numbers], **classes.arrays("classes")}


def join_classes(lists: Iterable[Sequence[str]]) -> tuple[list[str], list[np.ndarray]]:
    """Match the classes of several sources by name; a name that a list has twice is two classes. Returns all names as
    they first appear, and for each list the joined number of each of its classes, and -1 as the last entry, so that
    labels, -1 for none, can be its index."""
    joined, numbers = dict[tuple[str, int], int](), list[np.ndarray]()
    for names in lists:
        seen, of_list = Counter[str](), list[int]()
        for name in names:
            of_list.append(joined.setdefault((name, seen[name]), len(joined)))
            seen[name] += 1
        numbers.append(np.array([*of_list, -1], np.int32))
    return [name for name, _ in joined], numbers


def note_unnamed(places: Iterable[str]) -> list[str]:
    """A note if several datasets, at `places`, have classes with numbers only, without names."""
    several = list(dict.fromkeys(places))
    some = ", ".join([*several[:3], *["..."] * (len(several) > 3)])
    note = f"the classes of {some} are numbers without names: equal numbers are taken for the same class"
    return [note] if len(several) > 1 else []


def is_hidden(path: bytes) -> bool:
    """Whether a file is ignored: its name, or that of a folder in its path, begins with a dot or is lost+found."""
    if not (path.startswith((b".", b"lost+found")) or b"/." in path or b"/lost+found" in path):
        return False
    parts = path.split(b"/")
    return any((part.startswith(b".") and part not in (b".", b"..")) or part == b"lost+found" for part in parts)


def printable(text: str) -> str:
    """A file name as one line of valid UTF-8: file systems and archives allow any bytes in it."""
    clean = os.fsencode(text).decode("utf-8", "backslashreplace")
    return clean if clean.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in clean)

"""Base classes of sources whose images are files, loose or inside other files, and numbers that tell files apart."""

from __future__ import annotations

import functools
import hashlib
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from PIL import Image

from dino_ds.basics.files import is_url, opened
from dino_ds.data.decode import MAX_PIXELS, EncodedImage
from dino_ds.data.images import UnreadableImage, find_placeholder, in_channels
from dino_ds.data.listing import Contents, Labels, Listing, Texts, find_listing, printable
from dino_ds.data.remote import FilePiece, Remote
from dino_ds.errors import DataError, one_line

MAX_BYTES = 1 << 30  # size of the largest file that is read as an image
_SPREAD = 0x9E3779B97F4A7C15  # odd factor that keeps inode numbers of several devices apart


class EncodedImages(ABC):
    """A `Source` of image files in any format, loose or inside other files."""

    labels: Sequence[int] | None = None
    classes: list[str] | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> bytes:
        """The encoded file, not empty. Raises UnreadableImage."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Path of the image, as a printable line."""

    @abstractmethod
    def member(self, index: int) -> str:
        """Name within the dataset, such as cat/1.jpg; any text, not to be used as a path."""

    @abstractmethod
    def file_keys(self) -> np.ndarray:
        """A number for each image, uint64 (n,), equal where two paths lead to one file, or place in it: by links of
        files or folders, hard links, or other spellings."""

    def load(self, index: int) -> Image.Image | np.ndarray:
        """RGB image; from a deeper file or one of other channels, stored values (h, w, c). Raises UnreadableImage."""
        image = EncodedImage(self.read(index), self.name(index), MAX_PIXELS)
        values = in_channels(image.values(), image.channels)
        return values if image.deep or image.channels != 3 else Image.fromarray(values)


def size_and_time(state: os.stat_result) -> list[int]:
    return [state.st_size, state.st_mtime_ns]


def _local_state(file: str) -> tuple[int, ...] | None:
    """Size and time of a file on a disk; None for an address, and where nothing is."""
    with suppress(OSError):
        return None if is_url(file) else tuple(size_and_time(os.stat(file)))
    return None


@contextmanager
def naming_file(file: str, form: str) -> Iterator[None]:
    """Raises DataError that names the file in place of a library's errors, which have several families."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = find_placeholder(file) or one_line(error, 200)
        raise DataError(f"{printable(file)} cannot be read as {form}: {reason}") from None


class RowImages(EncodedImages):
    """Images that are stored as rows of files, file after file."""

    _parts: list[str]  # name of each file's dataset, such as /images, or ""
    _ends: np.ndarray  # number of images up to each file's end

    def __init__(self, files: list[str]) -> None:
        self.elsewhere = is_url(files[0])
        self._files = files if self.elsewhere else list(map(os.path.abspath, files))
        self._states = [_local_state(file) for file in self._files]
        self.notes: list[str] = []

    def __len__(self) -> int:
        return int(self._ends[-1])

    def name(self, index: int) -> str:
        file, row = self._find(index)
        part = self._parts[file]
        return printable(f"{self._files[file]}{part and f':{part}'}/{row}")

    def member(self, index: int) -> str:
        file, row = self._find(index)
        return f"{os.path.splitext(os.path.basename(self._files[file]))[0]}{self._parts[file]}/{row:09d}"

    def file_time(self, index: int) -> int:
        """Time of the file's last change in nanoseconds. Raises OSError."""
        return os.stat(self._files[self._find(index)[0]]).st_mtime_ns

    @contextmanager
    def _naming_image(self, index: int, form: str) -> Iterator[None]:
        """Raises UnreadableImage where a library can't read an image, or its file has changed since it was opened."""
        try:
            yield
            file = self._find(index)[0]
            if _local_state(self._files[file]) != self._states[file]:
                raise OSError("changed since its rows were listed")
        except Exception as error:
            if self.elsewhere and isinstance(error, DataError):  # a server's failure ends a run
                raise
            raise UnreadableImage(self.name(index), f"{form}: {one_line(error, 200)}") from None

    def file_keys(self) -> np.ndarray:
        begins = np.array(list(map(archive_key, self._files, self._parts)), np.uint64)
        counts = np.diff(self._ends, prepend=0)
        return np.concatenate([np.arange(n, dtype=np.uint64) + key for n, key in zip(counts, begins, strict=True)])

    def _find(self, index: int) -> tuple[int, int]:
        """File and row of an image."""
        index = range(len(self))[index]
        file = int(np.searchsorted(self._ends, index, side="right"))
        return file, index - (int(self._ends[file - 1]) if file else 0)


class ListedImages(EncodedImages):
    """Encoded images with names and labels in a Listing, which is pickled as a path."""

    labels: Labels | None
    classes: list[str] | None
    _names: Sequence[str]

    def __init__(
        self, kind: str, key: str, build: Callable[[], Contents], is_current: Callable[[Listing], bool] = lambda _: True
    ) -> None:
        def is_usable(listing: Listing) -> bool:
            self._open(listing)  # raises for a list of another version
            return is_current(listing)

        self._open(find_listing(kind, key, is_usable, build))

    def _open(self, listing: Listing) -> None:
        arrays, self.notes = listing.arrays, [*listing.about.get("notes", [])]
        self._listing, self._names = listing, listing.texts("names")
        self.labels = Labels(arrays["labels"]) if "labels" in arrays else None
        self.classes = list(map(printable, listing.texts("classes"))) if "classes.ends" in arrays else None

    def __len__(self) -> int:
        return len(self._names)

    def member(self, index: int) -> str:
        return self._names[index]

    def __getstate__(self) -> dict[str, Any]:
        opened = (np.ndarray, Texts, Labels)  # from the listing, which `_open` reads again
        return {n: value for n, value in vars(self).items() if n != "classes" and not isinstance(value, opened)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_listing" in state:
            self._open(state["_listing"])
        vars(self).update(state)


class ListedFiles(ListedImages):
    """Image files whose paths, relative to `_folder`, or URLs are in a Listing; `elsewhere`: some are URLs."""

    _folder: str
    elsewhere = False

    def prepare(self, indices: Sequence[int], seconds: float | None = None) -> None:
        """Begin to fetch the remote ones among the images that are read next."""
        self._remote.prepare((FilePiece(path) for path in map(self._path, indices) if is_url(path)), seconds)

    @functools.cached_property
    def _remote(self) -> Remote:
        return Remote()

    def read(self, index: int) -> bytes:
        """Bytes of a regular file; never waits for a pipe with an image's name. Raises UnreadableImage."""
        try:
            if is_url(path := self._path(index)):
                data = self._remote.read(FilePiece(path))
            else:
                with opened(path, MAX_BYTES) as file:
                    data = file.read()
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path, too
            raise UnreadableImage(self.name(index), getattr(error, "strerror", None) or str(error)) from None
        if not data:
            raise UnreadableImage(self.name(index), "empty file")
        return data

    def name(self, index: int) -> str:
        return printable(self._path(index))

    def file_bytes(self, index: int) -> int:
        return os.stat(self._path(index)).st_size

    def file_time(self, index: int) -> int:
        """Time of the file's last change in nanoseconds. Raises OSError."""
        return os.stat(self._path(index)).st_mtime_ns

    def file_keys(self) -> np.ndarray:
        numbers, of_folder, names = dict[str, int](), array("q"), array("q")
        for index in range(len(self)):
            folder, _, name = self._path(index).rpartition("/")
            of_folder.append(numbers.setdefault(real_folder(folder), len(numbers)))
            names.append(hash(name))
        keys, order = np.empty(len(self), np.uint64), np.argsort(of_folder, kind="stable")
        for folder, rows in zip(numbers, np.split(order, np.cumsum(np.bincount(of_folder))[:-1]), strict=True):
            known = dict[int, int]()
            with suppress(OSError), os.scandir(folder) as entries:  # a folder may not be readable
                folder_keys = FolderKeys(os.stat(folder).st_dev)
                known = {hash(entry.name): folder_keys.of(entry) for entry in entries}
            for row in rows.tolist():
                key = known.get(names[row])
                keys[row] = file_key(self._path(row)) if key is None else key
        return keys

    def path(self, index: int) -> str:
        """Absolute path of an image's file, or its URL."""
        path = self._path(index)
        return path if is_url(path) else os.path.abspath(path)

    def _path(self, index: int) -> str:
        name = self._names[index]
        return name if is_url(name) else os.path.join(self._folder, name)


class NamedFiles(ListedFiles):
    """Image files by path, without labels; a path is first checked when it is read."""

    labels, classes, _folder = None, None, ""

    def __init__(self, paths: Sequence[str]) -> None:
        self._names, self.elsewhere = list(paths), any(map(is_url, paths))


@functools.lru_cache(1 << 18)  # a list may name images of many folders in any order
def real_folder(path: str) -> str:
    return os.path.realpath(path.replace("\0", "?"))


def file_key(path: str) -> int:
    """A number for the file that a path leads to, by whatever links or spelling; by the path where no file is."""
    with suppress(OSError, ValueError):  # not there, an address, or with a NUL
        state = os.stat(path)
        return key_on(state.st_dev, state.st_ino)
    return _hashed(os.path.realpath(path.replace("\0", "?")))


def key_on(device: int, inode: int) -> int:
    """The `file_key` of a file, its inode number plus a number of the device, which inode 0 gives alone."""
    return (inode + device * _SPREAD) % 2**64


def archive_key(path: str, part: str = "") -> int:
    """Base of the keys of an archive's images, or of its dataset `part`'s: a row or a byte offset is added to it."""
    return _hashed(f"{file_key(path)}:{part}")


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(os.fsencode(text), digest_size=8).digest(), "little")


class FolderKeys:
    """The `file_key` of entries of one folder on a device, without opening files, but for links; by path where a file
    system's folders do not list true inode numbers."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._lists_inodes: bool | None = None

    def of(self, entry: os.DirEntry[Any]) -> int:
        if entry.is_symlink():
            return file_key(os.fsdecode(entry.path))
        if self._lists_inodes is None:
            self._lists_inodes = entry.stat().st_ino == entry.inode()
        path = os.fsdecode(entry.path)
        return key_on(self._device, entry.inode()) if self._lists_inodes else _hashed(os.path.realpath(path))

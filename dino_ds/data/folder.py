"""The user's image files: any tree of folders, or a text file of paths."""

from __future__ import annotations

import difflib
import hashlib
import io
import os
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dino_ds.basics.files import is_url, read_lines
from dino_ds.data import remote, remote_request
from dino_ds.data.decode import EXTENSIONS, is_image_file, is_left_out, note_left_out
from dino_ds.data.encoded import FolderKeys, ListedFiles, key_on, real_folder, size_and_time
from dino_ds.data.images import evenly_spaced_indices
from dino_ds.data.listing import Contents, FolderLabels, Listing, Packer, is_hidden, label_arrays, printable
from dino_ds.errors import DataError

_LOOKED_AT = 20  # lines of a list that are checked to be files
_THREADS = 16
_CHUNK = 256
_FRESH_NANOSECONDS = 2_000_000_000
"""A folder changed this shortly before it was read may change again without a new modification time."""


class ImageFolder(ListedFiles):
    """All images under `root`, sorted by path.
    Labels are the first-level folders if every image lies in one and there are at least two; folders named train, val
    or test are not classes. Names that begin with a dot are ignored. The list comes from the cache while the times of
    all folders are unchanged. Raises DataError if there are no images."""

    def __init__(self, root: str) -> None:
        folder = Path(os.path.expanduser(root))
        if not os.path.isdir(folder):
            raise DataError(describe_missing(folder))
        self._folder, real = str(folder), os.path.realpath(folder)
        key = f"{real}\n{EXTENSIONS}"
        super().__init__("folder", key, lambda: _build(folder), lambda known: _is_current(real, known))

    def _open(self, listing: Listing) -> None:
        super()._open(listing)
        self._keys = listing.arrays["files"]

    def file_keys(self) -> np.ndarray:
        return self._keys.view(np.uint64) + np.uint64(key_on(os.stat(self._folder).st_dev, 0))


class ListFile(ListedFiles):
    """Images in the order of a file's lines, `path` or `path<TAB>class`; paths are relative to the file's folder.
    Empty lines, comments (#) and hidden files are ignored. The parsed list comes from the cache while the file's size
    and time are unchanged. Raises DataError if no image is listed, or if none of 20 lines is a file."""

    def __init__(self, path: str) -> None:
        listed = path if is_url(path) else str(Path(os.path.expanduser(path)).absolute())
        self._folder = os.path.dirname(listed)
        try:
            text = remote.Remote().read(remote.FilePiece(listed)) if is_url(listed) else None
            state = size_and_time(os.stat(listed)) if text is None else hashlib.sha256(text).hexdigest()
            super().__init__("list", f"{listed}\n{state}", lambda: _parse(listed, text))
        except OSError as error:
            raise DataError(f"{printable(listed)} cannot be read: {error.strerror or error}") from None
        self.elsewhere = bool(self._listing.about.get("elsewhere"))
        if not len(self):
            raise DataError(f"{printable(listed)} lists no images: {(*self.notes, 'it has no path in a line')[0]}")
        some = [self._path(i) for i in evenly_spaced_indices(len(self), _LOOKED_AT)]
        if not any(is_url(path) or os.path.lexists(path) for path in some):
            problem = f"none of {len(some)} lines looked at in {printable(listed)} is a file"
            remedy = "a line is a path, absolute or relative to the list's folder, and a class only after a tab"
            raise DataError(f"{problem}, such as {printable(some[0])}; {remedy}")

    def listed_place(self, index: int) -> str:
        """Canonical path of a file: relative to the list's folder if it lies there, else with all links resolved."""
        path = self._path(index)
        if is_url(path):
            return path.removeprefix(f"{self._folder}/")
        path = os.path.normpath(path)
        for above in (os.path.normpath(self._folder), real_folder(self._folder)):
            if path.startswith(f"{above}{os.sep}"):
                return path[len(above) + 1 :]
            path = os.path.join(real_folder(os.path.dirname(path)), os.path.basename(path))
        return path


@dataclass(frozen=True)
class _Folder:
    path: bytes
    time: int  # its modification time; -1 = it would not show later changes
    identity: tuple[int, int]
    images: bytes  # names of images, with NULs between
    keys: array[int]
    """`file_key` of each image, without the part of the root's device, whose number may be another tomorrow."""
    folders: list[bytes]
    linked: list[bytes]
    files: int
    others: list[bytes]  # paths of files that may be images in formats that are not read


def _build(root: Path) -> Contents:
    begin = time.time_ns()
    folders = _scan(root)
    names, classes, paths, keys = Packer(), FolderLabels(), Packer(), array("Q")
    for path, key in _in_order(folders):
        names.add(path)
        classes.add(path)
        keys.append(key)
    notes = note_left_out(path for folder in folders.values() for path in folder.others)
    if not len(names):
        files = sum(folder.files for folder in folders.values())
        inside = list(map(os.fsdecode, sorted([*folders[b""].folders, *folders[b""].linked])))
        seen = f"{len(inside)} folders{': ' * bool(inside)}{' '.join(inside[:5])}{' ...' * (len(inside) > 5)}"
        listed = "; a .txt list may name images of other endings" if files else ""
        looked = f"looked for {' '.join(EXTENSIONS)} in {files} files, {seen}{listed}"
        problem = f"no images under {root} ({looked}). Give the folder that holds the images"
        raise DataError("; ".join([problem, *notes]))
    times = np.array([folder.time for folder in folders.values()])
    times[times > begin - _FRESH_NANOSECONDS] = -1
    for path in folders:
        paths.add(path)
    arrays = {**names.arrays("names"), **classes.arrays(), **paths.arrays("folders"), "folders.times": times}
    return Contents(arrays | {"files": np.frombuffer(keys, np.int64)}, {"notes": notes})


def _is_current(root: str, known: Listing) -> bool:
    """Whether the time of each folder is unchanged: adding, removing or renaming an entry changes it."""
    folders, times = known.texts("folders"), known.arrays["folders.times"]

    def unchanged(first: int) -> bool:
        chunk = range(first, min(first + _CHUNK, len(folders)))
        with suppress(OSError):
            return all(os.stat(os.path.join(root, folders[i])).st_mtime_ns == times[i] for i in chunk)
        return False

    with ThreadPoolExecutor(_THREADS) as pool:  # a network file system answers many at once
        return bool(times.min() >= 0) and all(pool.map(unchanged, range(0, len(folders), _CHUNK)))


def _scan(root: Path) -> dict[bytes, _Folder]:
    """Folders of the tree by relative path, each once: by its real path if that is in the tree. Raises DataError."""
    tree, seen = dict[bytes, _Folder](), set[tuple[int, int]]()
    level, linked, part = [b""], list[bytes](), key_on(os.stat(root).st_dev, 0)
    bar = tqdm(desc=f"listing {root}", unit=" images", delay=2, leave=False, disable=None)
    with bar, ThreadPoolExecutor(_THREADS) as pool:
        while level:
            following: list[bytes] = []
            for folder in pool.map(lambda path: _read_folder(root, path, part), level):
                if folder.identity not in seen:
                    seen.add(folder.identity)
                    tree[folder.path] = folder
                    following += folder.folders
                    linked += folder.linked
                    bar.update(folder.images.count(b"\0") + bool(folder.images))
            level = following or [linked.pop(0) for _ in linked[:1]]
    return tree


def _read_folder(root: Path, path: bytes, of_device: int) -> _Folder:
    images, folders, linked, others, files = list[bytes](), list[bytes](), list[bytes](), list[bytes](), 0
    here, prefix = os.path.join(os.fsencode(root), path), path + b"/" if path else b""
    try:
        state = os.stat(here)  # before the scan: files added during it change the time
        file_keys, keys = FolderKeys(state.st_dev), array("Q")
        with os.scandir(here) as entries:
            for entry in entries:
                if is_hidden(entry.name):
                    continue
                try:
                    is_folder = entry.is_dir()
                except OSError:
                    is_folder = False  # a link to itself: an unreadable file
                if is_folder:
                    (linked if entry.is_symlink() else folders).append(prefix + entry.name)
                else:
                    files += 1
                    if is_image_file(here, entry.name):
                        images.append(entry.name)
                        keys.append((file_keys.of(entry) - of_device) % 2**64)
                    elif is_left_out(entry.name):
                        others.append(prefix + entry.name)
    except OSError as error:
        problem = f"{printable(os.fsdecode(here))} cannot be read: {error.strerror}"
        raise DataError(f"{problem}; fix its permissions or link") from None
    time, identity = state.st_mtime_ns if state.st_mtime_ns > 0 else -1, (state.st_dev, state.st_ino)
    return _Folder(path, time, identity, b"\0".join(images), keys, sorted(folders), sorted(linked), files, others)


def _in_order(folders: dict[bytes, _Folder]) -> Iterator[tuple[bytes, int]]:
    """Paths and keys of the images, sorted as whole paths, one by one: the full list is never in memory."""

    def entries(folder: _Folder) -> Iterator[tuple[bytes, int]]:
        prefix = folder.path + b"/" if folder.path else b""
        images = [(prefix + name, key) for name, key in zip(folder.images.split(b"\0"), folder.keys, strict=False)]
        inner = [(path + b"/", 0) for path in (*folder.folders, *folder.linked) if path in folders]
        return iter(sorted(images + inner))

    stack = [entries(folders[b""])]
    while stack:
        path, key = next(stack[-1], (b"", 0))
        if not path:
            stack.pop()
        elif path.endswith(b"/"):
            stack.append(entries(folders[path[:-1]]))
        else:
            yield path, key


def _parse(path: str, text: bytes | None) -> Contents:
    """Contents of a list file: of its `text`, or read from `path` if that is None."""
    names, labels, numbers, hidden = Packer(), array("i"), dict[bytes, int](), list[bytes]()
    folder, elsewhere = os.fsencode(os.path.dirname(path)) + b"/", False
    for number, line in enumerate(read_lines(path) if text is None else io.BytesIO(text)):
        if number == 0 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise DataError(f"{printable(path)} is UTF-16: save it as UTF-8")
        if number == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")
        name, _, label = line.rstrip(b"\r\n").partition(b"\t")
        label = label.strip()
        if not name.strip() or name.startswith(b"#"):
            continue
        below = name.removeprefix(folder)
        if is_url(url := os.fsdecode(name)):
            elsewhere = True
            remote_request.check_url(url, f"line {number + 1} of {printable(path)}")
        if is_hidden(os.path.basename(name) if below.startswith(b"/") or b"://" in below else below):
            hidden.append(name)
            continue
        names.add(name)
        labels.append(numbers.setdefault(label, len(numbers)) if label else -1)
    classes = sorted(numbers, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))
    arrays = label_arrays([numbers[name] for name in classes], np.asarray(labels, np.int32), classes) if classes else {}
    example = printable(os.fsdecode(hidden[0])) if hidden else ""
    note = f"{len(hidden)} lines are left out, such as {example}: its name, or a folder's, begins with a dot"
    return Contents({**names.arrays("names"), **arrays}, {"notes": [note] if hidden else [], "elsewhere": elsewhere})


def describe_missing(root: Path) -> str:
    """Error text for a missing folder of images, with the nearest name beside it."""
    if os.path.exists(root):
        return f"{root} is neither a folder nor a file; wanted is a folder of images"
    names = [entry.name for entry in os.scandir(root.parent) if entry.is_dir()] if os.path.isdir(root.parent) else []
    if near := difflib.get_close_matches(root.name, names, n=1):
        return f"{root} does not exist. Did you mean {root.parent / near[0]}?"
    existing = next((folder for folder in root.parents if os.path.isdir(folder)), Path("/"))
    return f"{root} does not exist (its part {existing.absolute()} does): give a folder of images"

"""A text file of paths: one image a line, its class after a tab where it has one."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import numpy as np

from dino_ds.data.encoded import ListedFiles
from dino_ds.data.images import evenly_spaced_indices
from dino_ds.data.listing import Contents, Packer, find_listing, label_arrays, printable
from dino_ds.errors import DataError

_LOOKED_AT = 20


class ListFile(ListedFiles):
    """Images in the order of the lines, `path` or `path<TAB>class`; paths are relative to the list's own folder.

    Empty lines and those that begin with # are left out. The parsed list comes from the cache while the file has the
    same size and time. Raises DataError if nothing is listed, or if none of 20 lines looked at is a file.
    """

    def __init__(self, path: str) -> None:
        listed = Path(path).expanduser().absolute()
        self._folder = str(listed.parent)
        try:
            now = listed.stat()
            key = f"{listed}\n{now.st_size}\n{now.st_mtime_ns}"
            super().__init__(find_listing("list", key, lambda known: True, lambda: _parse(listed)))
        except OSError as error:
            raise DataError(f"{printable(str(listed))} cannot be read: {error.strerror or error}") from None
        if not len(self):
            raise DataError(f"{printable(str(listed))} lists no images: it must have one path a line")
        some = [self._path(i) for i in evenly_spaced_indices(len(self), _LOOKED_AT)]
        if not any(os.path.lexists(path) for path in some):
            raise DataError(
                f"none of {len(some)} lines looked at in {printable(str(listed))} is a file, such as "
                f"{printable(some[0])}; paths must be absolute or relative to the list's folder"
            )


def _parse(path: Path) -> Contents:
    names, labels, numbers = Packer(), array("i"), dict[bytes, int]()
    with open(path, "rb") as lines:
        for number, line in enumerate(lines):
            if number == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            name, _, label = line.rstrip(b"\r\n").partition(b"\t")
            label = label.strip()
            if not name.strip() or name.startswith(b"#"):
                continue
            names.add(name)
            labels.append(numbers.setdefault(label, len(numbers)) if label else -1)
    classes = sorted(numbers, key=_natural)
    arrays = label_arrays([numbers[name] for name in classes], np.asarray(labels, np.int32), classes) if classes else {}
    return Contents({**names.arrays("names"), **arrays})


def _natural(name: bytes) -> tuple[bool, int, bytes]:
    """Numbers by their value, before texts."""
    return (False, int(name), name) if name.isdigit() else (True, 0, name)

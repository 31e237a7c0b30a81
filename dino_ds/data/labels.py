"""Class numbers from folder names, one image after the other."""

from __future__ import annotations

from array import array

import numpy as np

from dino_ds.data.listing import Packer

_SPLIT_NAMES = {b"train", b"training", b"val", b"valid", b"validation", b"test", b"testing"}


class FolderLabels:
    """The class of an image is the first folder of its path, if every path has one and there are at least two.

    Folders named train, val or test are no classes.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._labels = array("i")
        self._everywhere = True

    def add(self, path: bytes) -> None:
        first, slash, _ = path.partition(b"/")
        if not slash:
            self._everywhere = False
        if self._everywhere:
            self._labels.append(self._numbers.setdefault(first, len(self._numbers)))

    def arrays(self) -> dict[str, np.ndarray]:
        """What a Listing reads labels and classes from; empty where the folders are no classes."""
        names = sorted(self._numbers)
        if not self._everywhere or len(names) < 2 or {name.lower() for name in names} <= _SPLIT_NAMES:
            return {}
        return label_arrays([self._numbers[name] for name in names], np.frombuffer(self._labels, np.int32), names)


def label_arrays(order: list[int], numbers: np.ndarray, names: list[bytes]) -> dict[str, np.ndarray]:
    """Numbers (n,) -> arrays of a Listing in which `order[k]` has become k, called `names[k]`; -1 stays -1."""
    place = np.full(len(order) + 1, -1, np.int32)  # the last entry is that of -1
    place[order] = np.arange(len(order), dtype=np.int32)
    classes = Packer()
    for name in names:
        classes.add(name)
    return {"labels": place[numbers], **classes.arrays("classes")}

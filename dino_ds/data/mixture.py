"""Several sources of images as one: a mixture, each of whose parts has a share of every epoch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dino_ds.config.mixture import Part
from dino_ds.data.base import Joined, JoinedPart
from dino_ds.data.encoded import EncodedImages, ListedFiles
from dino_ds.data.folder import ListFile
from dino_ds.data.formats import split_part
from dino_ds.data.images import ValueRange, evenly_spaced_indices
from dino_ds.data.listing import Labels
from dino_ds.data.root import expand, open_files
from dino_ds.errors import ConfigError, DataError

_LISTED = 1000
"""Images of a list that are looked for in other parts."""


class Mixture(EncodedImages, Joined):
    """The images of all parts, part after part, with classes of the same name as one.

    Raises ConfigError for a place that is named twice or lies nowhere, DataError where one holds no images; also for
    places with images in common, unless they `may_overlap`, of which a note tells.
    """

    def __init__(self, parts: Sequence[Part], root: str | None, may_overlap: bool = False) -> None:
        self.parts = tuple(parts)
        self.sources = [_open(part, root) for part in parts]
        self.ends = list(itertools.accumulate(map(len, self.sources)))
        overlap = self._overlap(root)
        if overlap and not may_overlap:
            raise ConfigError(f"data.mixture: {overlap}")
        self.labels, self.classes = self._join_labels()
        self.notes = [overlap] if overlap else []
        self.notes += [
            f"{part.place}: {note}"
            for part, source in zip(parts, self.sources, strict=True)
            for note in getattr(source, "notes", ())
        ]

    def __len__(self) -> int:
        return self.ends[-1]

    @property
    def joined(self) -> list[JoinedPart]:
        pairs = zip(self.parts, self.sources, strict=True)
        return [JoinedPart(part.place, source, part.value_range) for part, source in pairs]

    def part_of(self, index: int) -> tuple[int, int]:
        """The number of the part that an image is of, and its index there."""
        part = int(np.searchsorted(self.ends, index, side="right"))
        return part, index - self.first_of(part)

    def first_of(self, part: int) -> int:
        """Index of the first image of a part."""
        return self.ends[part - 1] if part else 0

    def another(self, index: int, number: int) -> int:
        part, _ = self.part_of(index)
        return self.first_of(part) + number % len(self.sources[part])

    def range_of(self, index: int) -> ValueRange | None:
        return self.parts[self.part_of(index)[0]].value_range

    def read(self, index: int) -> bytes:
        source, place = self._find(index)
        return source.read(place)

    def name(self, index: int) -> str:
        source, place = self._find(index)
        return source.name(place)

    def member(self, index: int) -> str:
        part, place = self.part_of(index)
        return f"{part}/{self.sources[part].member(place)}"

    def file_bytes(self, index: int) -> int:
        """Bytes of the image's file. Raises OSError, also where its part does not tell them."""
        return self._asked("file_bytes", index)

    def file_time(self, index: int) -> int:
        """Time of the file's last change in nanoseconds. Raises OSError."""
        return self._asked("file_time", index)

    def _find(self, index: int) -> tuple[EncodedImages, int]:
        part, place = self.part_of(range(len(self))[index])
        return self.sources[part], place

    def _asked(self, what: str, index: int) -> int:
        source, place = self._find(index)
        ask = getattr(source, what, None)
        if ask is None:
            raise OSError(f"{type(source).__name__} has no {what}")
        return int(ask(place))

    def _overlap(self, root: str | None) -> str:
        """Which two parts have images in common, of which each would have more than its share; "" for none."""
        owners: dict[tuple[bool, str], str] = {}
        for part, source in zip(self.parts, self.sources, strict=True):
            loose = isinstance(source, ListedFiles)
            for place in _real_places(place_of(part, root), source):
                if (same := owners.setdefault((loose, place), part.place)) != part.place:
                    both = f"{same} and {part.place} are the same place, or both have {place}"
                    return f"{both}: give it once, with the sum of its shares"
        for (loose, place), inner in owners.items():
            for folder in map(str, Path(place).parents):
                if (outer := owners.get((loose, folder), inner)) != inner:
                    both = f"images of {inner} lie in {outer} too, and would have the shares of both"
                    return f"{both}: give places without images in common"
        return ""

    def _join_labels(self) -> tuple[Any, list[str] | None]:
        """Labels of all images, -1 for those of a part without labels, and the names of all classes."""
        if all(source.labels is None for source in self.sources):
            return None, None
        classes = list(dict.fromkeys(name for source in self.sources for name in source.classes or ()))
        number = {name: place for place, name in enumerate(classes)}
        labels = np.full(len(self), -1, np.int32)
        for part, source in enumerate(self.sources):
            if source.labels is not None:
                ours = np.array([*(number[name] for name in source.classes or ()), -1], np.int32)
                labels[self.first_of(part) : self.ends[part]] = ours[np.asarray(source.labels)]
        return Labels(labels), classes


def place_of(part: Part, root: str | None) -> str:
    """The path or pattern of a part's images. Raises ConfigError for a relative one without data.root."""
    place = os.path.expanduser(part.place)
    if root is None and not os.path.isabs(place):
        raise ConfigError(
            f"data.mixture: {part.place} is relative: give --data.root, the folder that it is in, or its whole path"
        )
    return os.path.join(os.path.expanduser(root or ""), place)


def _real_places(path: str, source: EncodedImages) -> list[str]:
    """Paths without links: the folder of a part, its archives, or some of the images that its list names."""
    if isinstance(source, ListFile):
        return [os.path.realpath(source.name(i)) for i in evenly_spaced_indices(len(source), _LISTED)]
    plain, inside = split_part(path)
    files = [plain] if os.path.lexists(plain) else expand(plain)
    return [os.path.realpath(file) + (f":{inside}" if inside else "") for file in files]


def _open(part: Part, root: str | None) -> EncodedImages:
    try:
        return open_files(place_of(part, root))
    except DataError as error:
        raise DataError(f"data.mixture: {part.place}: {error}") from None

"""Images that a user picks, by number or by file, and the patches of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from dino_ds.data.base import Source, UnreadableImage
from dino_ds.data.cutting import EvalCrop
from dino_ds.data.decode import load_image
from dino_ds.data.encoded import NamedFiles
from dino_ds.data.images import ValueRange, evenly_spaced_indices
from dino_ds.data.root import open_files
from dino_ds.errors import ConfigError, DataError

_MOST_OF_A_FOLDER = 16
_FORMS = "numbers or files with commas between, or a folder"


@dataclass(frozen=True)
class Picked:
    """Image `index` of a source. `named`: whether somebody asked for this very one, so that it may not be missing."""

    source: Source
    index: int
    named: bool = False

    @property
    def name(self) -> str:
        return self.source.name(self.index)

    @property
    def group(self) -> str | None:
        """The name of its class."""
        labels, classes = self.source.labels, self.source.classes
        return None if labels is None or classes is None or labels[self.index] < 0 else classes[labels[self.index]]


@dataclass(frozen=True)
class Cut:
    """An image as a network gets it, (c, side, side), normalised; `size` is the image's (width, height)."""

    picked: Picked
    pixels: Tensor
    size: tuple[int, int]


def spread(source: Source, count: int) -> list[Picked]:
    """At most `count` images, evenly spread."""
    return [Picked(source, index) for index in evenly_spaced_indices(len(source), count)]


def choose(text: str, option: str, images: Callable[[], Source]) -> list[Picked]:
    """The images that `text` names: numbers into `images()`, files, folders (at most 16 of each), commas between.

    Raises ConfigError, DataError.
    """
    chosen: list[Picked] = []
    for word in (part.strip() for part in text.split(",")):
        path = os.path.expanduser(word)
        if word.isdecimal():
            source = images()
            if int(word) >= len(source):
                raise ConfigError(f"--{option} {word}: there are {len(source)} images, 0 to {len(source) - 1}")
            chosen.append(Picked(source, int(word), named=True))
        elif os.path.isdir(path):
            chosen += spread(open_files(path), _MOST_OF_A_FOLDER)
        elif os.path.lexists(path):
            chosen.append(Picked(NamedFiles([path]), 0, named=True))
        else:
            raise ConfigError(f"--{option} {word!r}: there is no such file or folder; give {_FORMS}")
    return chosen


def read_cuts(picked: Sequence[Picked], crop: EvalCrop, option: str, value_range: ValueRange | None) -> Iterator[Cut]:
    """Cuts of the images in turn; unreadable ones are left out unless they were named. Raises DataError, also if none
    can be read.

    `value_range`: the range of images deeper than 8 bits, or None, and they are unreadable.
    """
    first, readable = "", 0
    for one in tqdm(picked, desc=option, unit=" images", leave=False, disable=None):
        try:
            image = load_image(one.source, one.index, value_range, crop.channels)
        except UnreadableImage as error:
            if one.named:
                raise DataError(f"--{option}: {error} can't be read: fix it, or name another") from None
            first = first or str(error)
            continue
        readable += 1
        if isinstance(image, Image.Image):
            yield Cut(one, crop(image), image.size)
        else:
            array = np.asarray(image)
            yield Cut(one, crop(array), (array.shape[1], array.shape[0]))
    if not readable:
        raise DataError(f"none of {len(picked)} images can be read; the first is {first}")

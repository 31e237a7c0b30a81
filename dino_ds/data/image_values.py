"""The values of images that are looked at before a run: types, extremes, means, and the value range that they show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dino_ds.basics.formatting import range_text
from dino_ds.data.decode import MAX_PIXELS, open_image
from dino_ds.data.images import (
    WITH_ALPHA,
    Source,
    ValueRange,
    evenly_spaced_indices,
    extremes,
    prepare_images,
    why_not_scaled,
)
from dino_ds.errors import ConfigError

_FULL_SCALES = (255, 1023, 4095, 16383, 65535)  # highest values of unsigned integers of 8, 10, 12, 14 and 16 bits
_SAMPLE, _FIRST, _NAMES = 64, 8, 10_000
_ROWS = 256  # at least this many rows of a large image are averaged
_LEAST_USED = 0.01
"""Smallest part of the range that an image should use: floats from 0 to 1 use next to nothing of 16 bits."""
STORE_ALIKE = "store all images alike, or give a data.value_range that fits them"


class ImageValues(NamedTuple):
    """The name of an image, the type of its stored values, their extremes if they are deeper than uint8, and of each
    channel the means of the values and of their squares."""

    name: str = ""
    type: str = "uint8"
    low: float = 0
    high: float = 0
    mean: tuple[float, ...] = ()
    square: tuple[float, ...] = ()

    @staticmethod
    def of(values: np.ndarray, name: str = "") -> ImageValues:
        """The facts of values (h, w) or (h, w, c). Raises UnreadableImage unless they are finite."""
        low, high = (0.0, 0.0) if values.dtype == np.uint8 else extremes(values, name)
        rows = values[:: max(1, len(values) // _ROWS)]
        planes = rows.reshape(-1, rows.shape[2] if rows.ndim == 3 else 1).astype(np.float64)
        means = (tuple(part.mean(0).tolist()) for part in (planes, np.square(planes)))
        return ImageValues(name, values.dtype.name, low, high, *means)

    def why_skipped(self, value_range: ValueRange | None) -> str:
        """Reason why a run with this range skips the image; "" if it does not."""
        is_deep = self.type != "uint8"
        return why_not_scaled(np.dtype(self.type), self.low, self.high, value_range) if is_deep else ""


NO_VALUES = ImageValues()


def find_misfits(images: Sequence[ImageValues], value_range: ValueRange | None, remedy: str = STORE_ALIKE) -> list[str]:
    """Notes on images beyond the range, and on images that use next to nothing of it, except those of one value."""
    skipped, faint = list[str](), list[str]()
    for image in images:
        if reason := image.why_skipped(value_range):
            skipped.append(f"{image.name} ({reason})")
        elif value_range and 0 < image.high - image.low < _LEAST_USED * (value_range[1] - value_range[0]):
            faint.append(f"{image.name} ({image.type} values, {image.low:.10g} to {image.high:.10g})")
    among = f"of {len(images)} images looked at that are deeper than 8 bits"
    notes = [f"{len(skipped)} {among} are skipped as unreadable, such as {skipped[0]}: {remedy}"] if skipped else []
    if faint and value_range:
        use = f"use less than {_LEAST_USED:.0%} of data.value_range {range_text(value_range)}"
        notes.append(f"{len(faint)} {among} {use}, nearly one gray to the network, such as {faint[0]}: {remedy}")
    return notes


@dataclass
class Sample:
    """Values of sampled images. measures: whether to decode all of them, not only deep ones and those with alpha."""

    measures: bool = False
    images: int = 0  # number of images that could be read
    channels: Counter[int] = field(default_factory=Counter)
    values: list[ImageValues] = field(default_factory=list)  # the values of the images whose pixels were decoded
    problem: str = ""  # name of the first unreadable image, and the reason
    stacks: list[str] = field(default_factory=list)  # names of images whose three pages are taken for colors

    def add(self, source: Source, indices: Iterable[int], wanted: int, max_pixels: int) -> None:
        """Read images of at most `max_pixels`; those with another number of channels than `wanted` are only counted.
        Pixels are decoded where they are deep or may be alpha, or if the sample `measures`."""
        prepare_images(source, indices := list(indices))
        for index in indices:
            try:
                image = open_image(source, index, max_pixels, channels=wanted)
                asks = getattr(image, "mode", None) in WITH_ALPHA  # its values tell whether it is alpha or a band
                decodes = image.deep or asks or self.measures
                values = image.values() if decodes and image.channels == wanted else None
                if values is not None:
                    self.values.append(ImageValues.of(values, source.name(index)))
            except Exception as error:  # a user's source may raise anything: training reports it with the image's name
                self.problem = self.problem or str(error)
                continue
            self.images += 1
            self.channels[image.channels] += 1
            self.stacks += [source.name(index)] if getattr(image, "pages", 1) == wanted == 3 else []

    def decide(self, remedy: str | None = None) -> tuple[ValueRange | None, str]:
        """Value range of the images, and a sentence on it; None and "" if all have 8 bits. Raises ConfigError, with
        `remedy` or the option as advice, if values do not tell which are black and white."""
        if not self.deep:
            return None, ""
        if (chosen := self.chosen) is None:
            flag = f"give --data.value_range {range_text(self.measured)}, or wider where other images go beyond"
            if len(self.types) > 1 and find_misfits(self.deep, self.measured):
                flag = "no range fits both: convert them to one type and scale, such as PNG of 8 or 16 bits"
            raise ConfigError(f"{self}; which of them are black and white is not known: {remedy or flag}")
        return chosen, f"{self}; data.value_range {range_text(chosen)}, 8-bit images 0,255"

    @property
    def chosen(self) -> ValueRange | None:
        """The range that the values of deep images show; None where they do not tell."""
        kinds, (low, high) = {name.rstrip("0123456789") for name in self.types}, self.extremes
        if kinds == {"uint"} and high <= _FULL_SCALES[-1]:
            return 0.0, float(next(scale for scale in _FULL_SCALES if high <= scale))
        if kinds == {"float"} and low >= 0 and (high <= 1 or 63 < high <= 255):  # 0 to 1.5 is of neither usual range
            return 0.0, 1.0 if high <= 1 else 255.0
        return None

    @property
    def deep(self) -> list[ImageValues]:
        return [image for image in self.values if image.type != "uint8"]

    @property
    def types(self) -> set[str]:
        return {image.type for image in self.deep}

    @property
    def extremes(self) -> ValueRange:
        return min(image.low for image in self.deep), max(image.high for image in self.deep)

    @property
    def measured(self) -> ValueRange:
        """Lowest and highest value; fractions are rounded outwards to 3 digits."""
        low, high = self.extremes
        if low == int(low) and high == int(high):
            return low, high if high > low else low + 1
        step = 10.0 ** (math.floor(math.log10(max(abs(low), abs(high)))) - 2)
        return math.floor(low / step) * step, math.ceil(high / step) * step

    def __str__(self) -> str:
        types, (low, high) = " and ".join(sorted(self.types)), self.extremes
        values = f"{low:.10g} to {high:.10g}"
        return f"{len(self.deep)} of {self.images} images looked at are deeper than 8 bits: {types}, values {values}"


def look_at_values(
    sources: Sequence[Source], channels: int, max_pixels: int = MAX_PIXELS, measures: bool = False
) -> Sample:
    """Sample at most 64 images of each source, evenly spread, for a run of `channels`. Pixels of files are decoded only
    where they are deep or have alpha, or if it `measures`; JPEGs are opened only if `channels` is not 3."""
    sample = Sample(measures)
    for source in sources:
        if hasattr(source, "read"):
            some = evenly_spaced_indices(len(source), _NAMES)
            others = [i for i in some if channels != 3 or not source.name(i).lower().endswith((".jpg", ".jpeg"))]
            chosen = [others[i] for i in evenly_spaced_indices(len(others), _SAMPLE)]
            sample.add(source, chosen, channels, max_pixels)
            if len(others) < len(some):
                sample.problem = ""
                sample.channels[3] += len(some) - len(others)
            continue
        first, all_of_them = (evenly_spaced_indices(len(source), most) for most in (_FIRST, _SAMPLE))
        sample.add(source, first, channels, max_pixels)
        if sample.deep or measures:
            sample.add(source, [i for i in all_of_them if i not in first], channels, max_pixels)
    return sample

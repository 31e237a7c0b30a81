"""Looks at a few images before a run: their channels, and the values of those that are deeper than 8 bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dino_ds import distributed
from dino_ds.data.decode import MAX_PIXELS, open_image
from dino_ds.data.sources import Source
from dino_ds.data.value_range import ValueRange, extremes, range_text
from dino_ds.errors import ConfigError

_FULL_SCALES = (255, 1023, 4095, 16383, 65535)
"""Of unsigned integers of 8, 10, 12, 14 and 16 bits."""
_SAMPLE, _FIRST, _NAMES = 64, 8, 10_000


@dataclass
class Sample:
    """Of the images that could be read: how many, their channels; of the deep ones how many, types, extreme values."""

    images: int = 0
    channels: set[int] = field(default_factory=set)
    deep: int = 0
    types: set[str] = field(default_factory=set)
    low: float = math.inf
    high: float = -math.inf

    def add(self, source: Source, indices: Iterable[int]) -> None:
        for index in indices:
            try:
                image = open_image(source, index, MAX_PIXELS)
                values = image.values() if image.deep else None
                low, high = (math.inf, -math.inf) if values is None else extremes(values, "")
            except Exception:  # a source of the user's may raise anything: training says what and of which image
                continue
            self.images += 1
            self.channels.add(image.channels)
            if values is not None:
                self.deep += 1
                self.types.add(values.dtype.name)
                self.low, self.high = min(self.low, low), max(self.high, high)

    def choose(self) -> ValueRange | None:
        """None where all are of 8 bits. Raises ConfigError where nothing says which values are black and white."""
        if not self.deep:
            return None
        if self.low >= 0 and self.high <= _FULL_SCALES[-1] and all(name.startswith("uint") for name in self.types):
            return 0.0, float(next(scale for scale in _FULL_SCALES if self.high <= scale))
        if self.low >= 0 and self.high <= 255 and all(name.startswith("float") for name in self.types):
            return 0.0, 1.0 if self.high <= 1 else 255.0
        raise ConfigError(
            f"{self}; which of them are black and white is not known: give --data.value_range "
            f"{range_text(self.measured)}, or wider where other images go beyond"
        )

    @property
    def measured(self) -> ValueRange:
        """Lowest and highest, of fractions rounded to 3 digits, outwards."""
        low, high = self.low, self.high
        if low == int(low) and high == int(high):
            return low, high if high > low else low + 1
        step = 10.0 ** (math.floor(math.log10(max(abs(low), abs(high)))) - 2)
        return math.floor(low / step) * step, math.ceil(high / step) * step

    def __str__(self) -> str:
        types, values = " and ".join(sorted(self.types)), f"{self.low:.10g} to {self.high:.10g}"
        return f"{self.deep} of {self.images} images looked at are deeper than 8 bits: {types}, values {values}"


def look_at_values(sources: Sequence[Source]) -> Sample:
    """At most 64 images of each source, evenly spread. Of files JPEGs are left out, and pixels read only where deep."""
    sample = Sample()
    for source in sources:
        if hasattr(source, "read"):
            sample.channels.add(3)
            names = ((index, source.name(index).lower()) for index in _spread(range(len(source)), _NAMES))
            sample.add(source, _spread([i for i, name in names if not name.endswith((".jpg", ".jpeg"))], _SAMPLE))
            continue
        sample.add(source, _spread(range(len(source)), _FIRST))
        if sample.deep:
            sample.add(source, _spread(range(len(source)), _SAMPLE))
    return sample


def find_value_range(sources: Sequence[Source], in_chans: int | None = None) -> tuple[ValueRange | None, str]:
    """The range for the deep images of `sources`, and what was found in words; None and "" where there are none.

    Rank 0 looks, all ranks call it. Raises ConfigError, on all ranks, where the range can't be known, or where no image
    has `in_chans` channels.
    """
    found: Any = None
    with distributed.together():
        if distributed.rank() == 0:
            sample = look_at_values(sources)
            if in_chans is not None:
                _check_channels(sample, in_chans)
            found = sample.choose(), str(sample) if sample.deep else ""
    chosen: tuple[ValueRange | None, str] = distributed.gather_objects(found)[0]
    return chosen


def _check_channels(sample: Sample, in_chans: int) -> None:
    if sample.channels and in_chans not in sample.channels:
        there = " or ".join(map(str, sorted(sample.channels)))
        raise ConfigError(
            f"model.in_chans is {in_chans}, and the images have {there} channels (files are read as RGB): give "
            f"--model.in_chans {min(sample.channels)}, or a data.source class whose images have {in_chans}"
        )


def _spread(items: Sequence[int], count: int) -> list[int]:
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]

"""Looks at a few images before a run: their channels, and the values of those that are deeper than 8 bits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dino_ds import distributed
from dino_ds.config.recipe import Recipe
from dino_ds.data.base import Source
from dino_ds.data.decode import MAX_PIXELS, open_image
from dino_ds.data.images import ValueRange, evenly_spaced_indices, extremes, range_text
from dino_ds.errors import ConfigError, DataError

_FULL_SCALES = (255, 1023, 4095, 16383, 65535)
"""Of unsigned integers of 8, 10, 12, 14 and 16 bits."""
_SAMPLE, _FIRST, _NAMES = 64, 8, 10_000


@dataclass
class Sample:
    """Of the images that could be read. `problem`: the first that could not, and why."""

    images: int = 0
    channels: Counter[int] = field(default_factory=Counter)
    deep: int = 0
    types: set[str] = field(default_factory=set)
    low: float = math.inf
    high: float = -math.inf
    problem: str = ""

    def add(self, source: Source, indices: Iterable[int], wanted: int, with_values: bool) -> None:
        """`wanted`: the channels of the run; images of others are only counted."""
        for index in indices:
            try:
                image = open_image(source, index, MAX_PIXELS, channels=wanted)
                is_measured = with_values and image.deep and image.channels == wanted
                values = image.values() if is_measured else None
                low, high = (math.inf, -math.inf) if values is None else extremes(values, "")
            except Exception as error:  # a source of the user's may raise anything: training says what, of which image
                self.problem = self.problem or str(error)
                continue
            self.images += 1
            self.channels[image.channels] += 1
            if values is not None:
                self.deep += 1
                self.types.add(values.dtype.name)
                self.low, self.high = min(self.low, low), max(self.high, high)

    def decide(self, remedy: str | None = None) -> tuple[ValueRange | None, str]:
        """The range, and what was found in words; None and "" where all are of 8 bits.

        Raises ConfigError where nothing says which values are black and white; its advice is `remedy`, else the flag.
        """
        if not self.deep:
            return None, ""
        chosen = self._choose()
        if chosen is None:
            flag = f"give --data.value_range {range_text(self.measured)}, or wider where other images go beyond"
            raise ConfigError(f"{self}; which of them are black and white is not known: {remedy or flag}")
        return chosen, f"{self}; data.value_range {range_text(chosen)}, 8-bit images 0,255"

    def _choose(self) -> ValueRange | None:
        kinds = {name.rstrip("0123456789") for name in self.types}
        if kinds == {"uint"} and self.high <= _FULL_SCALES[-1]:
            return 0.0, float(next(scale for scale in _FULL_SCALES if self.high <= scale))
        if kinds == {"float"} and self.low >= 0 and self.high <= 1:
            return 0.0, 1.0
        if kinds == {"float"} and self.low >= 0 and 63 < self.high <= 255:  # 0 to 1.5 is of neither usual range
            return 0.0, 255.0
        return None

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


def look_at_values(sources: Sequence[Source], channels: int, with_values: bool = True) -> Sample:
    """At most 64 images of each source, evenly spread, where `channels` are wanted. Of files pixels are read only where
    they are deep and `with_values`, and where 3 are wanted JPEGs are left out."""
    sample = Sample()
    for source in sources:
        if hasattr(source, "read"):
            some = evenly_spaced_indices(len(source), _NAMES)
            others = [i for i in some if channels != 3 or not source.name(i).lower().endswith((".jpg", ".jpeg"))]
            chosen = [others[i] for i in evenly_spaced_indices(len(others), _SAMPLE)]
            sample.add(source, chosen, channels, with_values)
            if len(others) < len(some):
                sample.problem = ""
            continue
        sample.add(source, evenly_spaced_indices(len(source), _FIRST), channels, with_values)
        if sample.deep:
            sample.add(source, evenly_spaced_indices(len(source), _SAMPLE), channels, with_values)
    return sample


def with_value_range(
    recipe: Recipe, source: Source, earlier: Callable[[], ValueRange | None] = lambda: None
) -> tuple[Recipe, str]:
    """`recipe` with numbers for data.value_range where it is auto and images are deep; and in words what was found.

    The numbers are those of `earlier` where it has any. Rank 0 looks at the images; all ranks call it. Raises
    ConfigError, on all ranks, where the range can't be known, or no image has model.in_chans channels, DataError where
    no file looked at can be read.
    """
    found: Any = None
    with distributed.raise_on_all_ranks():
        if distributed.rank() == 0:
            known = recipe.data.known_range or earlier()
            sample = look_at_values([source], recipe.model.in_chans, with_values=known is None)
            _check_images(recipe, sample, hasattr(source, "read"))
            found = (known, "") if known else sample.decide()
    chosen, words = distributed.gather_objects(found)[0]
    data = recipe.data.model_copy(update={"value_range": chosen or "auto"})
    return recipe.model_copy(update={"data": data}), words


def _check_images(recipe: Recipe, sample: Sample, is_files: bool) -> None:
    wanted, channels = recipe.model.in_chans, sample.channels
    if is_files and not sample.images and sample.problem:
        raise DataError(f"none of the images looked at can be read; the first is {sample.problem}")
    if channels and wanted not in channels:
        there = " or ".join(map(str, sorted(channels)))
        raise ConfigError(
            f"model.in_chans is {wanted}, and images of data.source {recipe.data.source} have {there} channels"
            f"; set --model.in_chans {channels.most_common(1)[0][0]}"
        )

"""Looks at a few images before a run: their channels, and the values of those that are deeper than 8 bits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dino_ds.basics.digits import range_text
from dino_ds.config.recipe import Recipe
from dino_ds.data.base import Joined, JoinedPart, Source, prepare_images
from dino_ds.data.decode import MAX_PIXELS, open_image
from dino_ds.data.images import WITH_ALPHA, ValueRange, evenly_spaced_indices, extremes, why_not_scaled
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, DataError

_FULL_SCALES = (255, 1023, 4095, 16383, 65535)
"""Highest values of unsigned integers of 8, 10, 12, 14 and 16 bits."""
_SAMPLE, _FIRST, _NAMES = 64, 8, 10_000
_LEAST_USED = 0.01
"""Least part of a range that an image of the right kind uses: floats within 0 to 1 use nothing of 16 bits."""
STORE_ALIKE = "store all images alike, or give a data.value_range that fits them"


class DeepImage(NamedTuple):
    """One of more than 8 bits: its values as they are stored, and the range of its source where that has its own."""

    name: str
    type: str
    low: float
    high: float
    own_range: ValueRange | None = None

    def why_skipped(self, value_range: ValueRange | None) -> str:
        """Why no run with this range reads it; "" if it does."""
        return why_not_scaled(np.dtype(self.type), self.low, self.high, self.own_range or value_range)


def find_misfits(found: Sequence[DeepImage], value_range: ValueRange | None, remedy: str = STORE_ALIKE) -> list[str]:
    """Notes on images beyond the range, and on images that use next to nothing of it.

    An image of one value uses nothing of any range, and is left out.
    """
    skipped, faint = list[str](), list[str]()
    for one in found:
        if why := one.why_skipped(value_range):
            skipped.append(f"{one.name} ({why})")
        elif (span := one.own_range or value_range) and 0 < one.high - one.low < _LEAST_USED * (span[1] - span[0]):
            faint.append(f"{one.name} ({one.type} values, {one.low:.10g} to {one.high:.10g})")
    among = f"of {len(found)} images looked at that are deeper than 8 bits"
    notes = [f"{len(skipped)} {among} are skipped as unreadable, such as {skipped[0]}: {remedy}"] if skipped else []
    if faint and value_range:
        use = f"use less than {_LEAST_USED:.0%} of data.value_range {range_text(value_range)}"
        notes.append(f"{len(faint)} {among} {use}, nearly one gray to the network, such as {faint[0]}: {remedy}")
    return notes


@dataclass
class Sample:
    """Values of the images that could be read; `problem` is the first that could not, and why."""

    images: int = 0
    channels: Counter[int] = field(default_factory=Counter)
    deep: list[DeepImage] = field(default_factory=list)
    problem: str = ""

    def add(self, source: Source, indices: Iterable[int], wanted: int, max_pixels: int) -> None:
        """`wanted`: the channels of the run; images of others are only counted. Larger ones are not read."""
        prepare_images(source, indices := list(indices))
        for index in indices:
            try:
                image = open_image(source, index, max_pixels, channels=wanted)
                asks = getattr(image, "mode", None) in WITH_ALPHA  # alpha, or a band: its values tell
                values = image.values() if (image.deep or asks) and image.channels == wanted else None
                if values is not None and image.deep:
                    name = source.name(index)
                    self.deep.append(DeepImage(name, values.dtype.name, *extremes(values, name)))
            except Exception as error:  # a source of the user's may raise anything: training says what, of which image
                self.problem = self.problem or str(error)
                continue
            self.images += 1
            self.channels[image.channels] += 1

    def decide(self, remedy: str | None = None) -> tuple[ValueRange | None, str]:
        """The range, and what was found in words; None and "" where all are of 8 bits.

        Raises ConfigError where nothing says which values are black and white; its advice is `remedy`, else the flag.
        """
        if not self.deep:
            return None, ""
        chosen = self._choose()
        if chosen is None:
            flag = f"give --data.value_range {range_text(self.measured)}, or wider where other images go beyond"
            if len(self.types) > 1 and find_misfits(self.deep, self.measured):
                flag = "no range fits both: convert them to one type and scale, such as PNG of 8 or 16 bits"
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
    def types(self) -> set[str]:
        return {one.type for one in self.deep}

    @property
    def low(self) -> float:
        return min(one.low for one in self.deep)

    @property
    def high(self) -> float:
        return max(one.high for one in self.deep)

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
        return f"{len(self.deep)} of {self.images} images looked at are deeper than 8 bits: {types}, values {values}"


def look_at_values(sources: Sequence[Source], channels: int, max_pixels: int = MAX_PIXELS) -> Sample:
    """At most 64 images of each source, evenly spread, where `channels` are wanted, none of more than `max_pixels`. Of
    files pixels are read only where they are deep, and where 3 are wanted JPEGs are left out."""
    sample = Sample()
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
        sample.add(source, evenly_spaced_indices(len(source), _FIRST), channels, max_pixels)
        if sample.deep:
            sample.add(source, evenly_spaced_indices(len(source), _SAMPLE), channels, max_pixels)
    return sample


def with_value_range(
    recipe: Recipe, source: Source, earlier: Callable[[], ValueRange | None] = lambda: None
) -> tuple[Recipe, list[str]]:
    """`recipe` with numbers for data.value_range where it is auto and images are deep; and notes: what was found, and
    images that the range does not fit.

    The numbers are those of `earlier` where it has any. Rank 0 looks at the images; all ranks call it. Raises
    ConfigError, on all ranks, where the range can't be known, or no image has model.in_chans channels, DataError where
    no file looked at can be read.
    """
    found: Any = None
    with distributed.raise_on_all_ranks():
        if distributed.rank() == 0:
            known = recipe.data.known_range or earlier()
            sample = _look_at_parts(recipe, source)
            chosen, words = (known, "") if known else sample.decide()
            found = chosen, [*([words] if words else []), *find_misfits(sample.deep, chosen)]
    chosen, notes = distributed.gather_objects(found)[0]
    data = recipe.data.model_copy(update={"value_range": chosen or "auto"})
    return recipe.model_copy(update={"data": data}), notes


def _look_at_parts(recipe: Recipe, source: Source) -> Sample:
    """A sample of a source; of a mixture one of each part, all together. Raises as `with_value_range` does."""
    found = Sample()
    parts = source.joined if isinstance(source, Joined) else [JoinedPart("", source, None)]
    for part in parts:
        sample = look_at_values([part.source], recipe.model.in_chans, recipe.data.max_pixels)
        with _naming(part.place):
            _check_images(recipe, part.source, sample)
        found.images += sample.images
        found.channels += sample.channels
        found.deep += [one._replace(own_range=part.value_range) for one in sample.deep]
    return found


@contextmanager
def _naming(place: str) -> Iterator[None]:
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(f"data.mixture: {place}: {error}" if place else str(error)) from None


def _check_images(recipe: Recipe, source: Source, sample: Sample) -> None:
    wanted, channels = recipe.model.in_chans, sample.channels
    if hasattr(source, "read") and not sample.images and sample.problem:
        raise DataError(f"none of the images looked at can be read; the first is {sample.problem}")
    if channels and wanted not in channels:
        there = " or ".join(map(str, sorted(channels)))
        most = channels.most_common(1)[0][0]
        statistics = "" if most in (1, 3) else " and the data.mean and data.std that dino-ds look-data prints with it"
        keeps = "" if recipe.model.init_from is None else "; model.init_from stays: its weights are adapted"
        raise ConfigError(
            f"model.in_chans is {wanted}, and images of data.source {recipe.data.source} have {there} channels"
            f"; set --model.in_chans {most}{statistics}{keeps}"
        )

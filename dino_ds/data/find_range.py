"""Samples images before a run: their channels, and the values of those deeper than 8 bits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dino_ds.basics.digits import range_text
from dino_ds.config.recipe import Recipe
from dino_ds.data.base import Joined, Source, prepare_images
from dino_ds.data.decode import MAX_PIXELS, open_image
from dino_ds.data.images import WITH_ALPHA, ValueRange, evenly_spaced_indices, extremes, why_not_scaled
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, DataError

_FULL_SCALES = (255, 1023, 4095, 16383, 65535)
"""Highest values of unsigned integers of 8, 10, 12, 14 and 16 bits."""
_SAMPLE, _FIRST, _NAMES = 64, 8, 10_000
_LEAST_USED = 0.01
"""Smallest part of the range that an image should use: floats from 0 to 1 use next to nothing of 16 bits."""
STORE_ALIKE = "store all images alike, or give a data.value_range that fits them"


class DeepImage(NamedTuple):
    """An image deeper than 8 bits, with its lowest and highest stored value."""

    name: str
    type: str
    low: float
    high: float

    def why_skipped(self, value_range: ValueRange | None) -> str:
        """Reason why a run with this range skips the image; "" if it does not."""
        return why_not_scaled(np.dtype(self.type), self.low, self.high, value_range)


def find_misfits(images: Sequence[DeepImage], value_range: ValueRange | None, remedy: str = STORE_ALIKE) -> list[str]:
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
    """Values of sampled images."""

    images: int = 0
    """Number of images that could be read."""
    channels: Counter[int] = field(default_factory=Counter)
    deep: list[DeepImage] = field(default_factory=list)
    problem: str = ""
    """Name of the first unreadable image, and the reason."""

    def add(self, source: Source, indices: Iterable[int], wanted: int, max_pixels: int) -> None:
        """Read images of at most `max_pixels`; those with another number of channels than `wanted` are only counted."""
        prepare_images(source, indices := list(indices))
        for index in indices:
            try:
                image = open_image(source, index, max_pixels, channels=wanted)
                asks = getattr(image, "mode", None) in WITH_ALPHA  # its values tell whether it is alpha or a band
                values = image.values() if (image.deep or asks) and image.channels == wanted else None
                if values is not None and image.deep:
                    name = source.name(index)
                    self.deep.append(DeepImage(name, values.dtype.name, *extremes(values, name)))
            except Exception as error:  # a user's source may raise anything: training reports it with the image's name
                self.problem = self.problem or str(error)
                continue
            self.images += 1
            self.channels[image.channels] += 1

    def decide(self, remedy: str | None = None) -> tuple[ValueRange | None, str]:
        """Value range of the images, and a sentence on it; None and "" if all have 8 bits.

        Raises ConfigError, with `remedy` or the option as advice, if values do not tell which are black and white.
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
        return {image.type for image in self.deep}

    @property
    def low(self) -> float:
        return min(image.low for image in self.deep)

    @property
    def high(self) -> float:
        return max(image.high for image in self.deep)

    @property
    def measured(self) -> ValueRange:
        """Lowest and highest value; fractions are rounded outwards to 3 digits."""
        low, high = self.low, self.high
        if low == int(low) and high == int(high):
            return low, high if high > low else low + 1
        step = 10.0 ** (math.floor(math.log10(max(abs(low), abs(high)))) - 2)
        return math.floor(low / step) * step, math.ceil(high / step) * step

    def __str__(self) -> str:
        types, values = " and ".join(sorted(self.types)), f"{self.low:.10g} to {self.high:.10g}"
        return f"{len(self.deep)} of {self.images} images looked at are deeper than 8 bits: {types}, values {values}"


def look_at_values(sources: Sequence[Source], channels: int, max_pixels: int = MAX_PIXELS) -> Sample:
    """Sample at most 64 images of each source, evenly spread, for a run of `channels`. Pixels of files are decoded only
    where they are deep or have alpha, and JPEGs are opened only if `channels` is not 3."""
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
    """`recipe` with numbers for data.value_range if that is auto and images are deep; and notes on these numbers, and
    on images that the range does not fit.

    The numbers are those of `earlier`, if any. Rank 0 samples the images; every rank must call this. Raises on all
    ranks: ConfigError if the range can't be known or no image has model.in_chans channels, DataError if no sampled file
    is readable.
    """
    from_rank_0: Any = None
    with distributed.raise_on_all_ranks():
        if distributed.rank() == 0:
            known = recipe.data.known_range or earlier()
            sample = _look_at_parts(recipe, source)
            chosen, words = (known, "") if known else sample.decide()
            from_rank_0 = chosen, [*([words] if words else []), *find_misfits(sample.deep, chosen)]
    chosen, notes = distributed.gather_objects(from_rank_0)[0]
    data = recipe.data.model_copy(update={"value_range": chosen or "auto"})
    return recipe.model_copy(update={"data": data}), notes


def _look_at_parts(recipe: Recipe, source: Source) -> Sample:
    """Sample a source, or each part of a mixture. Raises as `with_value_range` does."""
    total = Sample()
    parts = source.joined if isinstance(source, Joined) else [("", source)]
    for path, part in parts:
        sample = look_at_values([part], recipe.model.in_chans, recipe.data.max_pixels)
        _check_images(recipe, part, sample, path and f"data.mixture: {path}: ")
        total.images += sample.images
        total.channels += sample.channels
        total.deep += sample.deep
    return total


def _check_images(recipe: Recipe, source: Source, sample: Sample, where: str) -> None:
    wanted, channels = recipe.model.in_chans, sample.channels
    if hasattr(source, "read") and not sample.images and sample.problem:
        raise DataError(f"{where}none of the images looked at can be read; the first is {sample.problem}")
    if channels and wanted not in channels:
        numbers = " or ".join(map(str, sorted(channels)))
        most = channels.most_common(1)[0][0]
        statistics = "" if most in (1, 3) else " and the data.mean and data.std that dino-ds look-data prints with it"
        keeps = "" if recipe.model.init_from is None else "; model.init_from stays: its weights are adapted"
        raise ConfigError(
            f"{where}model.in_chans is {wanted}, and images of data.source {recipe.data.source} have {numbers} channels"
            f"; set --model.in_chans {most}{statistics}{keeps}"
        )

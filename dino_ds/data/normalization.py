"""Normalizes images by the mean and standard deviation of each channel, displays images of any number of channels, and
samples images before a run for these numbers and the range of deep values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dino_ds.basics.formatting import range_text
from dino_ds.config.crops import Masks
from dino_ds.config.recipe import Recipe, channel_problems
from dino_ds.data.decode import MAX_PIXELS, open_image
from dino_ds.data.images import (
    WITH_ALPHA,
    Joined,
    Source,
    ValueRange,
    evenly_spaced_indices,
    extremes,
    prepare_images,
    why_not_scaled,
)
from dino_ds.data.scientific import note_stacks
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, DataError

_SIDE = 512
"""Approximate number of rows, and of columns, of pixels that are sampled for percentiles."""
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
USUAL_CHANNELS = (1, 3)
"""Numbers of channels of gray and RGB images, whose mean is nearly ImageNet's."""
_FULL_SCALES = (255, 1023, 4095, 16383, 65535)
"""Highest values of unsigned integers of 8, 10, 12, 14 and 16 bits."""
_SAMPLE, _FIRST, _NAMES = 64, 8, 10_000
_ROWS = 256
"""At least this many rows of a large image are averaged."""
_LEAST_USED = 0.01
"""Smallest part of the range that an image should use: floats from 0 to 1 use next to nothing of 16 bits."""
STORE_ALIKE = "store all images alike, or give a data.value_range that fits them"


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation of each channel, where black is 0 and white is 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def of(recipe: Recipe) -> Normalization:
        """Return the normalization of a recipe, by default `usual`."""
        data = recipe.data
        if data.mean is None or data.std is None:
            return Normalization.usual(recipe.model.in_chans)
        return Normalization(data.mean, data.std)

    @staticmethod
    def usual(channels: int) -> Normalization:
        """Return ImageNet's normalization; for channels other than RGB its averages over channels."""
        if channels == 3:
            return IMAGENET
        return Normalization((sum(MEAN) / 3,) * channels, (sum(STD) / 3,) * channels)

    def for_channels(self, channels: int) -> Normalization | None:
        """The normalization of images that are gray where these are RGB, or the reverse; None for other channels."""
        if channels == len(self.mean):
            return self
        if not {channels, len(self.mean)} <= {*USUAL_CHANNELS}:
            return None
        return Normalization(*((sum(values) / len(values),) * channels for values in (self.mean, self.std)))

    @staticmethod
    def measured(moments: Sequence[tuple[np.ndarray, np.ndarray]]) -> Normalization:
        """Compute the normalization of images, equally weighted, from their moments; rounded to 4 digits.

        moments: for each image, the means by channel of the values and of their squares; black is 0, white is 1.
        """
        mean, square = (np.mean(part, axis=0) for part in zip(*moments, strict=True))
        std = np.sqrt(np.maximum(square - mean**2, 0))
        values = ((mean, 0), (std, 1e-4))
        return Normalization(*(tuple(np.round(np.clip(part, least, 1), 4).tolist()) for part, least in values))

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalize pixels (..., c, h, w) in [0, 1]. Raises ConfigError for another number of channels."""
        if pixels.shape[-3] != len(self.mean):
            raise ConfigError(f"an image has {pixels.shape[-3]} channels, and the model takes {len(self.mean)}")
        mean, std = self._tensors()
        return (pixels - mean) / std

    def undone(self, pixels: Tensor) -> Tensor:
        """Undo the normalization of pixels (..., c, h, w); results may lie outside [0, 1] by rounding errors."""
        mean, std = self._tensors()
        return pixels * std + mean

    def offset_and_factor(self) -> Tensor:
        """Return (2, c), offset and factor of each channel: normalized = pixels in [0, 1] * factor + offset."""
        mean, std = (np.asarray(values, dtype=np.float64) for values in (self.mean, self.std))
        return torch.from_numpy(np.stack([-mean / std, 1 / std]).astype(np.float32))

    def _tensors(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.mean).view(-1, 1, 1), torch.tensor(self.std).view(-1, 1, 1)

    def __str__(self) -> str:
        return f"mean {range_text(self.mean)}, std {range_text(self.std)}"


IMAGENET = Normalization(MEAN, STD)


@cache
def normalized_levels(normalization: Normalization) -> np.ndarray:
    """Normalized values (c, 256) of each channel's 256 levels."""
    levels = torch.arange(256, dtype=torch.uint8).float() / 255
    return normalization(levels.expand(len(normalization.mean), 1, 256)).squeeze(1).numpy()


def visible(pixels: Tensor, like: Tensor | None = None) -> Tensor:
    """Pixels (c, h, w), uint8 or in [0, 1] -> (3, h, w) in [0, 1] for display.

    RGB is unchanged. Of more channels the first three become red, green and blue, of fewer the first becomes gray, each
    stretched from the 2nd to the 98th percentile of `like` (by default the image itself).
    """
    count = 3 if len(pixels) >= 3 else 1
    shown, reference = _fractions(pixels[:count]), _fractions((pixels if like is None else like)[:count])
    if len(pixels) != 3:
        height, width = reference.shape[1:]
        some = reference[:, :: max(1, height // _SIDE), :: max(1, width // _SIDE)].flatten(1)
        low, high = some.quantile(torch.tensor([0.02, 0.98]), dim=1)[:, :, None, None]
        shown = torch.where(high > low, (shown - low) / (high - low).clamp_min(1e-9), shown)
    return shown.clamp(0, 1).expand(3, -1, -1)


def shown_channels(channels: int) -> list[str]:
    """Words on the channels that `visible` shows of more, or of two; none for gray and RGB."""
    return [] if channels in (1, 3) else [f"the first {3 if channels > 3 else 1} of {channels} channels, stretched"]


def _fractions(pixels: Tensor) -> Tensor:
    return pixels.float() if pixels.is_floating_point() else pixels.float() / 255


def with_hidden_patches(crops: Mapping[str, Sequence[Tensor]], masks: Masks, images: int) -> list[Tensor]:
    """Return the first `images` of every crop (b, c, h, w), group after group, with hidden patches 0, the mean gray."""
    shown = []
    for name, group in crops.items():
        hidden = masks[name]["mask"].unflatten(0, (len(group), -1)) if name in masks else None
        for number, crop in enumerate(group):
            crop = crop[:images]
            shown.append(crop if hidden is None else crop.masked_fill(_pixels(hidden[number, :images], crop), 0))
    return shown


def _pixels(mask: Tensor, crops: Tensor) -> Tensor:
    """Patch masks (b, n) -> pixel masks (b, 1, h, w) of square `crops` (b, c, h, w)."""
    side = math.isqrt(mask.shape[1])
    stride = crops.shape[-1] // side
    return mask.view(-1, 1, side, side).repeat_interleave(stride, 2).repeat_interleave(stride, 3)


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


def measure_channels(
    images: Iterable[ImageValues], channels: int, value_range: ValueRange | None
) -> Normalization | None:
    """Mean and standard deviation as a recipe takes them, to 4 digits; all images have the same weight.

    Gray images count in all `channels`; images with another number of channels, or beyond the range, are left out. None
    if none is left.
    """
    moments = []
    for image in images:
        black, white = value_range if value_range and image.type != "uint8" else (0.0, 255.0)
        if len(image.mean) not in (1, channels) or image.why_skipped(value_range):
            continue
        mean, square = (np.broadcast_to(np.array(values), channels) for values in (image.mean, image.square))
        scale = max(white - black, 1e-30)
        moments.append(((mean - black) / scale, (square - 2 * black * mean + black**2) / scale**2))
    return Normalization.measured(moments) if moments else None


class Stated(NamedTuple):
    """The settings of training images that are stated by the weights which a run continues or learns from; None for one
    that is not stated. by: the option that names the weights, with its value."""

    by: str = ""
    normalization: Normalization | None = None
    value_range: ValueRange | None = None


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
    """Values of sampled images. measures: whether all are decoded, else those whose values tell what they are."""

    measures: bool = False
    images: int = 0
    """Number of images that could be read."""
    channels: Counter[int] = field(default_factory=Counter)
    values: list[ImageValues] = field(default_factory=list)
    """The values of the images whose pixels were decoded."""
    problem: str = ""
    """Name of the first unreadable image, and the reason."""
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
        """Value range of the images, and a sentence on it; None and "" if all have 8 bits.

        Raises ConfigError, with `remedy` or the option as advice, if values do not tell which are black and white.
        """
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
        kinds = {name.rstrip("0123456789") for name in self.types}
        if kinds == {"uint"} and self.high <= _FULL_SCALES[-1]:
            return 0.0, float(next(scale for scale in _FULL_SCALES if self.high <= scale))
        if kinds == {"float"} and self.low >= 0 and self.high <= 1:
            return 0.0, 1.0
        if kinds == {"float"} and self.low >= 0 and 63 < self.high <= 255:  # 0 to 1.5 is of neither usual range
            return 0.0, 255.0
        return None

    @property
    def deep(self) -> list[ImageValues]:
        return [image for image in self.values if image.type != "uint8"]

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


def with_image_settings(
    recipe: Recipe,
    source: Source,
    earlier: Callable[[], Recipe | None] = lambda: None,
    stated: Callable[[], Stated] = Stated,
) -> tuple[Recipe, list[str]]:
    """`recipe` with numbers for data.value_range if that is auto and images are deep, and for data.mean and data.std if
    ImageNet's are not theirs; and notes on these numbers, and on images that the range does not fit.

    What the recipe does not set is as in the `earlier` recipe of a run that goes on, else as `stated` by the weights
    that it begins with, else found by a sample of the images. A stage goes on with the mean of the run before. Rank 0
    samples; every rank must call this. Raises on all ranks: ConfigError if a setting can't be known or no image has
    model.in_chans channels, DataError if no sampled file is readable.
    """
    from_rank_0: Any = None
    with distributed.raise_on_all_ranks():
        if distributed.rank() == 0:
            from_rank_0 = _find_settings(recipe, source, earlier(), stated)
    settings, notes = distributed.gather_objects(from_rank_0)[0]
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=settings)}), notes


def _find_settings(
    recipe: Recipe, source: Source, earlier: Recipe | None, stated: Callable[[], Stated]
) -> tuple[dict[str, Any], list[str]]:
    """The keys of the data section that `with_image_settings` sets, and its notes."""
    data, channels = recipe.data, recipe.model.in_chans
    known = data.known_range or (earlier.data.known_range if earlier else None)
    begins = earlier is None and recipe.stage_start is None
    seeks_mean = begins and data.mean is None
    start = stated() if seeks_mean else Stated()
    measures = seeks_mean and start.normalization is None and channels not in USUAL_CHANNELS
    sample = _look_at_parts(recipe, source, measures)
    chosen, notes = (known, []) if known else _choose_range(sample, start)
    notes += find_misfits(sample.deep, chosen) + note_stacks(sample.stacks)
    settings: dict[str, Any] = {"value_range": chosen or "auto"}
    if earlier is not None and data.mean is None:
        settings |= {"mean": earlier.data.mean, "std": earlier.data.std}
    if seeks_mean and (start.normalization or measures or sample.deep):
        how = f"as {start.by} says" if start.normalization else f"measured on {len(sample.values)} images"
        mean = start.normalization or measure_channels(sample.values, channels, chosen)
        if mean is None:
            raise ConfigError("data.mean and data.std can't be measured on images that can't be read: give both")
        if mean != Normalization.usual(channels):
            settings |= {"mean": mean.mean, "std": mean.std}
            if problems := channel_problems(data.model_copy(update=settings), recipe.model):
                raise ConfigError(f"{start.by}: {problems[0]}; give --data.mean and --data.std")
            notes.append(f"{mean}, {how} (--data.mean, --data.std set others)")
    return settings, notes


def _choose_range(sample: Sample, start: Stated) -> tuple[ValueRange | None, list[str]]:
    """The range that the start states, if it fits the sample, else the one that the sample shows; and notes on it."""
    if start.value_range and sample.deep and not any(image.why_skipped(start.value_range) for image in sample.deep):
        return start.value_range, [f"data.value_range {range_text(start.value_range)}, as {start.by} says"]
    chosen, words = sample.decide()
    return chosen, [words] if words else []


def _look_at_parts(recipe: Recipe, source: Source, measures: bool) -> Sample:
    """Sample a source, or each part of a mixture. Raises as `with_image_settings` does."""
    total = Sample()
    parts = source.joined if isinstance(source, Joined) else [("", source)]
    for path, part in parts:
        sample = look_at_values([part], recipe.model.in_chans, recipe.data.max_pixels, measures)
        _check_images(recipe, part, sample, path and f"data.mixture: {path}: ")
        total.images += sample.images
        total.channels += sample.channels
        total.values += sample.values
        total.stacks += sample.stacks
    return total


def _check_images(recipe: Recipe, source: Source, sample: Sample, where: str) -> None:
    wanted, channels = recipe.model.in_chans, sample.channels
    if hasattr(source, "read") and not sample.images and sample.problem:
        raise DataError(f"{where}none of the images looked at can be read; the first is {sample.problem}")
    if channels and wanted not in channels:
        numbers, most = " or ".join(map(str, sorted(channels))), channels.most_common(1)[0][0]
        keeps = "" if recipe.model.init_from is None else "; model.init_from stays: its weights are adapted"
        raise ConfigError(
            f"{where}model.in_chans is {wanted}, and images of data.source {recipe.data.source} have {numbers} channels"
            f"; set --model.in_chans {most}{keeps}"
        )

"""Normalizes images by the mean and standard deviation of each channel, displays images of any number of channels, and
samples images before a run to find mean, deviation, and the value range of images deeper than 8 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dino_ds.basics.formatting import range_text
from dino_ds.config.crops import Masks
from dino_ds.config.recipe import Recipe, channel_problems
from dino_ds.data.image_values import ImageValues, Sample, find_misfits, look_at_values
from dino_ds.data.images import Joined, Source, ValueRange
from dino_ds.data.scientific import note_stacks
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, DataError

_SIDE = 512  # approximate number of rows, and of columns, of pixels that are sampled for percentiles
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
USUAL_CHANNELS = (1, 3)  # numbers of channels of gray and RGB images, whose mean is nearly ImageNet's


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation of each channel, where black is 0 and white is 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def of(recipe: Recipe) -> Normalization:
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
        """This normalization, averaged over channels from RGB to gray or the reverse; None for other `channels`."""
        if channels == len(self.mean):
            return self
        if not {channels, len(self.mean)} <= {*USUAL_CHANNELS}:
            return None
        return Normalization(*((sum(values) / len(values),) * channels for values in (self.mean, self.std)))

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
    """Pixels (c, h, w), uint8 or in [0, 1] -> (3, h, w) in [0, 1] for display. RGB is unchanged. Of more channels the
    first three become red, green and blue, of fewer the first becomes gray, each stretched from the 2nd to the 98th
    percentile of `like` (by default the image itself)."""
    count = 3 if len(pixels) >= 3 else 1
    shown, reference = _fractions(pixels[:count]), _fractions((pixels if like is None else like)[:count])
    if len(pixels) != 3:
        height, width = reference.shape[1:]
        some = reference[:, :: max(1, height // _SIDE), :: max(1, width // _SIDE)].flatten(1)
        low, high = some.quantile(torch.tensor([0.02, 0.98]), dim=1)[:, :, None, None]
        shown = torch.where(high > low, (shown - low) / (high - low).clamp_min(1e-9), shown)
    return shown.clamp(0, 1).expand(3, -1, -1)


def shown_channels(channels: int) -> list[str]:
    """A phrase, in a list, on which channels of an image `visible` shows; [] for gray and RGB."""
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
            if hidden is not None:
                side = math.isqrt(hidden.shape[-1])  # patches (b, n) become pixels (b, 1, h, w)
                patches = hidden[number, :images].view(-1, 1, side, side)
                stride = crop.shape[-1] // side
                crop = crop.masked_fill(patches.repeat_interleave(stride, 2).repeat_interleave(stride, 3), 0)
            shown.append(crop)
    return shown


def measure_channels(
    images: Iterable[ImageValues], channels: int, value_range: ValueRange | None
) -> Normalization | None:
    """Mean and standard deviation as a recipe takes them, to 4 digits; all images have the same weight. Gray images
    count in all `channels`; those of other channels, or beyond the range, are left out. None if none is left."""
    moments = []
    for image in images:
        black, white = value_range if value_range and image.type != "uint8" else (0.0, 255.0)
        if len(image.mean) not in (1, channels) or image.why_skipped(value_range):
            continue
        mean, square = (np.broadcast_to(np.array(values), channels) for values in (image.mean, image.square))
        scale = max(white - black, 1e-30)
        moments.append(((mean - black) / scale, (square - 2 * black * mean + black**2) / scale**2))
    if not moments:
        return None
    mean, square = (np.mean(part, axis=0) for part in zip(*moments, strict=True))
    both = ((mean, 0), (np.sqrt(np.maximum(square - mean**2, 0)), 1e-4))
    return Normalization(*(tuple(np.round(np.clip(part, least, 1), 4).tolist()) for part, least in both))


class Stated(NamedTuple):
    """Settings of the training images as stated by the weights that a run continues or learns from; None = not stated.
    by: the option that names the weights, with its value."""

    by: str = ""
    normalization: Normalization | None = None
    value_range: ValueRange | None = None


def with_image_settings(
    recipe: Recipe,
    source: Source,
    earlier: Callable[[], Recipe | None] = lambda: None,
    stated: Callable[[], Stated] = Stated,
) -> tuple[Recipe, list[str]]:
    """Return `recipe` with numbers for data.value_range if that is auto and images have more than 8 bits, and for
    data.mean and data.std if ImageNet's do not fit; and notes on these numbers and on images beyond the range. Settings
    that the recipe leaves open come from the `earlier` recipe of a resumed run, else they are `stated` by the weights
    that the run begins with, else a sample of the images shows them. A stage keeps the mean of the run before. Rank 0
    samples; every rank must call this. Raises on all ranks: ConfigError if a setting can't be known or no image has
    model.in_chans channels, DataError if no sampled file is readable."""
    from_rank_0: Any = None
    with distributed.raise_on_all_ranks():
        if distributed.rank() == 0:
            from_rank_0 = _find_settings(recipe, source, earlier(), stated)
    settings, notes = distributed.gather_objects(from_rank_0)[0]
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=settings)}), notes


def _find_settings(
    recipe: Recipe, source: Source, earlier: Recipe | None, stated: Callable[[], Stated]
) -> tuple[dict[str, Any], list[str]]:
    data, channels = recipe.data, recipe.model.in_chans
    known = data.known_range or (earlier.data.known_range if earlier else None)
    begins = earlier is None and recipe.stage_start is None
    seeks_mean = begins and data.mean is None
    start = stated() if seeks_mean else Stated()
    measures = seeks_mean and start.normalization is None and channels not in USUAL_CHANNELS
    sample = Sample()
    for path, part in source.joined if isinstance(source, Joined) else [("", source)]:
        looked_at = look_at_values([part], channels, data.max_pixels, measures)
        _check_images(recipe, part, looked_at, path and f"data.mixture: {path}: ")
        sample.images += looked_at.images
        sample.channels += looked_at.channels
        sample.values += looked_at.values
        sample.stacks += looked_at.stacks
    chosen, words = known, ""
    if known is None:  # the range that the start states, if it fits the sample, else the one that the sample shows
        chosen = start.value_range
        if chosen and sample.deep and not any(image.why_skipped(chosen) for image in sample.deep):
            words = f"data.value_range {range_text(chosen)}, as {start.by} says"
        else:
            chosen, words = sample.decide()
    notes = [words] if words else []
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


def _check_images(recipe: Recipe, source: Source, sample: Sample, where: str) -> None:
    wanted, channels = recipe.model.in_chans, sample.channels
    if hasattr(source, "read") and not sample.images and sample.problem:
        raise DataError(f"{where}none of the images looked at can be read; the first is {sample.problem}")
    if channels and wanted not in channels:
        numbers, most = " or ".join(map(str, sorted(channels))), channels.most_common(1)[0][0]
        keeps = "" if recipe.model.init_from is None else "; model.init_from stays: its weights are adapted"
        why = f"{where}model.in_chans is {wanted}"
        more = f"and images of data.source {recipe.data.source} have {numbers} channels"
        raise ConfigError(f"{why}, {more}; set --model.in_chans {most}{keeps}")

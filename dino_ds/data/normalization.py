"""Normalizes images by the mean and standard deviation of each channel, and displays images of any number of
channels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dino_ds.basics.digits import range_text
from dino_ds.config.crops import Masks
from dino_ds.errors import ConfigError

if TYPE_CHECKING:
    from dino_ds.config.recipe import Recipe

_SIDE = 512
"""Approximate number of rows, and of columns, of pixels that are sampled for percentiles."""
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
USUAL_CHANNELS = (1, 3)
"""Numbers of channels of gray and RGB images, whose mean is nearly ImageNet's."""


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

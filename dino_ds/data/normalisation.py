"""The mean and the standard deviation of each channel that are taken out of images before a network sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dino_ds.basics.digits import range_text
from dino_ds.errors import ConfigError

if TYPE_CHECKING:
    from dino_ds.config.recipe import Recipe

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Normalisation:
    """Mean and deviation of every channel, in images whose black is 0 and whose white is 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def of(recipe: Recipe) -> Normalisation:
        """The recipe's; where it has none the usual one."""
        data = recipe.data
        if data.mean is None or data.std is None:
            return Normalisation.usual(recipe.model.in_chans)
        return Normalisation(data.mean, data.std)

    @staticmethod
    def usual(channels: int) -> Normalisation:
        """ImageNet's; their averages where the channels are not RGB."""
        if channels == 3:
            return IMAGENET
        return Normalisation((sum(MEAN) / 3,) * channels, (sum(STD) / 3,) * channels)

    @staticmethod
    def measured(moments: Sequence[tuple[np.ndarray, np.ndarray]]) -> Normalisation:
        """The normalisation of measured images, which all count the same, with 4 digits as a recipe takes it.

        moments: for each image and channel the mean of its values and of their squares, black 0 and white 1.
        """
        mean, square = (np.mean(part, axis=0) for part in zip(*moments, strict=True))
        std = np.sqrt(np.maximum(square - mean**2, 0))
        values = ((mean, 0), (std, 1e-4))
        return Normalisation(*(tuple(np.round(np.clip(part, least, 1), 4).tolist()) for part, least in values))

    def __call__(self, pixels: Tensor) -> Tensor:
        """Pixels (..., c, h, w) in [0, 1], normalised. Raises ConfigError where there are more or fewer channels."""
        if pixels.shape[-3] != len(self.mean):
            raise ConfigError(f"an image has {pixels.shape[-3]} channels, and the model takes {len(self.mean)}")
        mean, std = self._tensors()
        return (pixels - mean) / std

    def undone(self, pixels: Tensor) -> Tensor:
        """Normalised pixels (..., c, h, w) as they were; rounding may take them out of [0, 1]."""
        mean, std = self._tensors()
        return pixels * std + mean

    def offset_and_factor(self) -> Tensor:
        """(2, c): what is added to pixels in [0, 1], and what they are multiplied by before."""
        mean, std = (np.asarray(values, dtype=np.float64) for values in (self.mean, self.std))
        return torch.from_numpy(np.stack([-mean / std, 1 / std]).astype(np.float32))

    def _tensors(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.mean).view(-1, 1, 1), torch.tensor(self.std).view(-1, 1, 1)

    def __str__(self) -> str:
        return f"mean {range_text(self.mean)}, std {range_text(self.std)}"


IMAGENET = Normalisation(MEAN, STD)


@cache
def normalised_levels(normalisation: Normalisation) -> np.ndarray:
    """(c, 256): the normalised value of each channel's 256 levels."""
    levels = torch.arange(256, dtype=torch.uint8).float() / 255
    return normalisation(levels.expand(len(normalisation.mean), 1, 256)).squeeze(1).numpy()

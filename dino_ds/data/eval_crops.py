"""Crops of evaluations: one of an image, as DINO's k-NN and linear probe cut it."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dino_ds.data.multicrop import BICUBIC, Box, sample_box, to_tensor
from dino_ds.data.normalisation import Normalisation

_PROBE_SCALE = (0.08, 1.0)
_FLAT = 16
"""Times the side of a crop, above which the rest of an image is not enlarged only to be cut off: it might not fit."""


class EvalCrop:
    """The k-NN preprocessing of DINO: shorter side to size * 256 / 224 (bicubic), center crop, normalise.

    Images whose shorter side is not larger than `size` pixels are resized to it and lose no border. Of an odd border
    the smaller half is cut left and above, as by transformers; torchvision rounds half to even: of the borders of
    3, 7, 11, ... pixels it cuts one more there.
    """

    def __init__(self, size: int, normalisation: Normalisation) -> None:
        self.size, self.channels, self._normalisation = size, len(normalisation.mean), normalisation

    def __call__(self, image: Image.Image | np.ndarray) -> Tensor:
        """RGB image, or (h, w, c) of uint8 or of float32 in [0, 1] -> (c, size, size) float32."""
        return _normalised(image, self._cut, self._normalisation)

    def box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of what is left of an image, in its own pixels."""
        (wide, high), (left, top) = self._resized(width, height)
        across, down = width / wide, height / high
        return left * across, top * down, (left + self.size) * across, (top + self.size) * down

    def _resized(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(width, height) before the cut, and its left upper corner."""
        short, long = sorted((width, height))
        target = self.size if short <= self.size else int(self.size * 256 / 224)
        other = int(target * long / short)
        wide, high = (target, other) if width <= height else (other, target)
        return (wide, high), ((wide - self.size) // 2, (high - self.size) // 2)

    def _cut(self, image: Image.Image) -> Image.Image:
        size, (x, y) = self._resized(*image.size)
        if max(size) > _FLAT * self.size:
            left, top, right, bottom = self.box(*image.size)
            box = (left, top, min(right, image.width), min(bottom, image.height))
            return image.resize((self.size, self.size), BICUBIC, box=box)
        return image.resize(size, BICUBIC).crop((x, y, x + self.size, y + self.size))


class RandomCrop:
    """Training crop of DINO's linear probe: of 8 to 100 % of the area, bilinear, flipped every second time."""

    def __init__(self, size: int, normalisation: Normalisation) -> None:
        self.size, self.channels, self._normalisation = size, len(normalisation.mean), normalisation

    def __call__(self, image: Image.Image | np.ndarray, seed: int) -> Tensor:
        """RGB image, or (h, w, c) of uint8 or of float32 in [0, 1] -> (c, size, size) float32. The seed decides."""
        rng = random.Random(seed)
        width, height = image.size if isinstance(image, Image.Image) else image.shape[1::-1]
        box, flip = sample_box(rng, width, height, _PROBE_SCALE), rng.random() < 0.5
        return _normalised(image, lambda plane: self._cut(plane, box, flip), self._normalisation)

    def _cut(self, image: Image.Image, box: Box, flip: bool) -> Image.Image:
        crop = image.crop(box).resize((self.size, self.size), Image.Resampling.BILINEAR)
        return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else crop


def _normalised(
    image: Image.Image | np.ndarray, cut: Callable[[Image.Image], Image.Image], normalisation: Normalisation
) -> Tensor:
    """`cut` applied to an RGB image, or to each channel of (h, w, c): (c, height, width) float32."""
    if isinstance(image, Image.Image):
        return to_tensor(cut(image), normalisation)
    planes = torch.from_numpy(
        np.stack([np.asarray(cut(Image.fromarray(plane))) for plane in np.moveaxis(image, -1, 0)])
    )
    pixels = planes.clamp(0, 1) if planes.is_floating_point() else planes / 255  # bicubic overshoots, uint8 saturates
    return normalisation(pixels)

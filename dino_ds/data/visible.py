"""Display of images of any number of channels, and of the crops of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from dino_ds.config.crops import Masks
from dino_ds.data.normalisation import Normalisation

_SIDE = 512
"""Rows and columns, about, that percentiles are taken of."""


def visible(pixels: Tensor, like: Tensor | None = None) -> Tensor:
    """Pixels (c, h, w), uint8 or in [0, 1] -> (3, h, w) in [0, 1].

    RGB as it is. Of more channels the first three as red, green and blue, of fewer the first in grey, each stretched so
    that 2 and 98 % of the values in `like` (or in the image itself) become 0 and 1.
    """
    count = 3 if len(pixels) >= 3 else 1
    shown, reference = _fractions(pixels[:count]), _fractions((pixels if like is None else like)[:count])
    if len(pixels) != 3:
        height, width = reference.shape[1:]
        some = reference[:, :: max(1, height // _SIDE), :: max(1, width // _SIDE)].flatten(1)
        low, high = some.quantile(torch.tensor([0.02, 0.98]), dim=1)[:, :, None, None]
        shown = torch.where(high > low, (shown - low) / (high - low).clamp_min(1e-9), shown)
    return shown.clamp(0, 1).expand(3, -1, -1)


def how_visible(channels: int) -> str:
    """A description of what `visible` does; empty for RGB."""
    if channels == 3:
        return ""
    if channels < 3:
        return f"channel 1 of {channels} in gray, stretched from its 2nd to its 98th percentile"
    return f"channels 1, 2, 3 of {channels} in red, green, blue, each stretched from its 2nd to its 98th percentile"


def _fractions(pixels: Tensor) -> Tensor:
    return pixels.float() if pixels.is_floating_point() else pixels.float() / 255


def crops_picture(
    crops: Mapping[str, Sequence[Tensor]],
    normalisation: Normalisation,
    images: int = 8,
    masks: Masks = MappingProxyType({}),
) -> Tensor:
    """Crops of a batch, (b, c, h, w) by group -> (3, H, W) in [0, 1]: one row an image, as the student saw it."""
    shown = with_hidden_patches(crops, masks, images)
    cell = max(crop.shape[-1] for crop in shown) + 2
    rows = len(shown[0])
    sheet = torch.ones(3, rows * cell, len(shown) * cell)
    for column, crop in enumerate(shown):
        for row in range(rows):
            height, width = crop.shape[-2:]
            pixels = visible(normalisation.undone(crop[row].detach().float().cpu()))
            sheet[:, row * cell : row * cell + height, column * cell : column * cell + width] = pixels
    return sheet


def with_hidden_patches(crops: Mapping[str, Sequence[Tensor]], masks: Masks, images: int) -> list[Tensor]:
    """The first `images` of every crop (b, c, h, w), group after group, as the student sees them.

    Hidden patches are 0: of the images' mean color, a grey.
    """
    shown = []
    for name, group in crops.items():
        hidden = masks[name]["mask"].unflatten(0, (len(group), -1)) if name in masks else None
        for number, crop in enumerate(group):
            crop = crop[:images]
            shown.append(crop if hidden is None else crop.masked_fill(_pixels(hidden[number, :images], crop), 0))
    return shown


def _pixels(mask: Tensor, crops: Tensor) -> Tensor:
    """(b, n) -> (b, 1, h, w), which pixels of square `crops` (b, c, h, w) lie in hidden patches."""
    side = math.isqrt(mask.shape[1])
    stride = crops.shape[-1] // side
    return mask.view(-1, 1, side, side).repeat_interleave(stride, 2).repeat_interleave(stride, 3)

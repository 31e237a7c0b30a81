"""How images of any number of channels are shown to people."""

from __future__ import annotations

import torch
from torch import Tensor

_SIDE = 512
"""Rows and columns, about, that percentiles are taken of."""


def visible(pixels: Tensor, like: Tensor | None = None) -> Tensor:
    """Pixels (c, h, w), uint8 or in [0, 1] -> (3, h, w) in [0, 1].

    RGB as it is. Of more channels the first three as red, green and blue, of fewer the first in grey, each stretched so
    that 2 and 98 % of the values in `like` (None: of its own) become 0 and 1.
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
    """What `visible` does, in words; nothing for RGB."""
    if channels == 3:
        return ""
    if channels < 3:
        return f"channel 1 of {channels} in gray, stretched from its 2nd to its 98th percentile"
    return f"channels 1, 2, 3 of {channels} in red, green, blue, each stretched from its 2nd to its 98th percentile"


def _fractions(pixels: Tensor) -> Tensor:
    return pixels.float() if pixels.is_floating_point() else pixels.float() / 255

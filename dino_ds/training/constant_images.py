"""Finds images of one colour: there is nothing to learn from them, and neither loss nor entropy shows it."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

_NO_CONTRAST = 1e-3
"""Between the least and the greatest value of a channel, in deviations; one level of 8 bits is 17 times as much."""
_GRID = 32
_KEPT = 1000
MOST_NAMES = 20


def constant_images(crops: list[Tensor]) -> Tensor:
    """(b,) bool, on the device: which images have one colour in each of these crops (b, c, h, w) of theirs.

    Looks at every few pixels: a grid of about 32 x 32.
    """
    flat = []
    for crop in crops:
        step = max(1, crop.shape[-1] // _GRID)
        seen = crop[:, :, ::step, ::step]
        flat.append((seen.amax((2, 3)) - seen.amin((2, 3))).amax(1) < _NO_CONTRAST)
    return torch.stack(flat).all(0)


class ConstantImages:
    """This rank's images of one colour since the last `take_names`, which alone reads the device."""

    def __init__(self) -> None:
        self._seen: deque[tuple[Tensor, list[str]]] = deque(maxlen=_KEPT)

    def add(self, constant: Tensor, names: list[str]) -> None:
        self._seen.append((constant, names))

    def take_names(self) -> list[str]:
        """Names of images of one colour, each once."""
        found = {
            name: None
            for constant, names in self._seen
            for name, bad in zip(names, constant.tolist(), strict=True)
            if bad
        }
        self._seen.clear()
        return list(found)

    def forget(self) -> None:
        self._seen.clear()

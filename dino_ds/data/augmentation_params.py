"""The augmentation of each crop on the device, as a table of numbers: its columns are those that the kernels read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dino_ds.data.multicrop import CropParameters

SLOTS = 4
"""Jitter operations of one crop, in its own order."""
FLIP, GRAY, SIGMA, SOLARIZE = range(4 * SLOTS, 4 * SLOTS + 4)
COLUMNS = 4 * SLOTS + 4
"""Numbers a crop: see AugmentationParams."""
LUMA = (0.2989, 0.587, 0.114)
BLUR_REACH = 6
"""Pixels on either side that a blur looks at: 3 standard deviations of the widest one."""
_NOTHING = [1.0, 0.0, 0.0, 0.0] * SLOTS + [0.0] * 4


@dataclass(frozen=True)
class AugmentationParams:
    """The augmentation of n crops of one size: a row (COLUMNS float32) for each.

    Of each jitter slot four numbers: clamp(pixel, own grey, the crop's mean grey, weighted by the first three), then
    the hue shift in turns of the color circle. Then whether it is flipped, made grey, the blur's standard deviation in
    pixels (0: none), and whether it is solarized. `table` stays on the host, `there` is its copy beside the crops.
    """

    table: Tensor
    there: Tensor

    @staticmethod
    def build(crops: Sequence[CropParameters], channels: int) -> AugmentationParams:
        """Saturation, hue and grey are left out where the channels are not RGB. A jitter holds an operation once."""
        table = torch.from_numpy(np.array([_row(crop, channels == 3) for crop in crops], dtype=np.float32))
        return AugmentationParams(table, table)

    def moved(self, move: Callable[[Tensor], Tensor]) -> AugmentationParams:
        """The same with the copy moved."""
        return AugmentationParams(self.table, move(self.there))

    def __reduce__(self) -> tuple[Any, ...]:
        # As plain bytes: between processes a tensor would take a file of shared memory.
        return _from_array, (self.table.numpy(),)


def _row(crop: CropParameters, rgb: bool) -> list[float]:
    row = _NOTHING.copy()
    for slot, (name, factor) in enumerate(crop.jitter):
        if name == "brightness":
            row[4 * slot] = factor
        elif name == "contrast":
            row[4 * slot], row[4 * slot + 2] = factor, 1 - factor
        elif rgb and name == "saturation":
            row[4 * slot], row[4 * slot + 1] = factor, 1 - factor
        elif rgb:
            row[4 * slot + 3] = factor
    row[FLIP:] = crop.flip, crop.gray and rgb, crop.blur_radius or 0.0, crop.solarize
    return row


def _from_array(table: np.ndarray) -> AugmentationParams:
    return AugmentationParams(torch.from_numpy(table), torch.from_numpy(table))

"""Resizes position embeddings to other numbers of patches: bicubic interpolation, which is linear, as matrix products.

Their gradient is the same in every run on a GPU; the gradient of torch's `interpolate` is summed in varying order.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def resize_positions(patches: Tensor, height: int, width: int, interpolation: str) -> Tensor:
    """Resize the position embedding of a square grid of patches, (1, n, d), to a (height, width) grid, FP32."""
    side = math.isqrt(patches.shape[1])
    rows, columns = (bicubic_matrix(side, size, interpolation, patches.device) for size in (height, width))
    return resized(patches, rows, columns)


def resized(patches: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """patches (1, side * side, d), matrices (height, side) and (width, side) -> (1, height * width, d), FP32."""
    side, width = rows.shape[1], patches.shape[-1]
    with torch.autocast(patches.device.type, enabled=False):
        stretched = rows @ patches.float().reshape(side, side * width)
        return (columns @ stretched.view(-1, side, width)).view(1, -1, width)


def bicubic_matrix(side: int, size: int, interpolation: str, device: torch.device) -> Tensor:
    """The matrix (size, side) that does along one axis what torch's bicubic `interpolate` does.

    "dino": as facebookresearch/dino, and dinov2 without registers; "antialias": as dinov2 with registers, and timm.
    """
    points = torch.eye(side, device=device)[None, None]
    if interpolation == "dino":
        # The reference adds 0.1 against rounding down; this also shifts the samples, so released weights need it.
        matrix = F.interpolate(points, scale_factor=((size + 0.1) / side, 1.0), mode="bicubic")
    else:
        matrix = F.interpolate(points, size=(size, side), mode="bicubic", antialias=True)
    assert matrix.shape[-2:] == (size, side)
    return matrix[0, 0]

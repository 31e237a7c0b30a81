"""Stochastic depth whose decisions follow from the image, not from a generator's state.

Whether a crop skips a branch is a hash of (key of the image, view, block, branch): the same on any rank, for any
micro-batch, after a resume and in the recomputation of a checkpointed block, with no RNG state to save.
Source of the method: Huang et al. 2016 (arXiv 1603.09382); the rates grow linearly, as in facebookresearch/dino.
"""

from __future__ import annotations

import torch
from torch import Tensor

# splitmix64 (Steele, Lea, Flood 2014), its constants written as signed 64-bit numbers: torch has no arithmetic shift
# for unsigned ones.
_GOLDEN = -7046029254386353131
_MIX1 = -4658895280553007687
_MIX2 = -7723592293110705685


def mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64, element-wise: neighbouring inputs give unrelated outputs."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def sample_keys(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """One int64 key for each image of a batch: indices (b,) int64 on any device -> (b,) there."""
    base = mix(mix(torch.tensor(seed, dtype=torch.int64)) + epoch)
    return mix(base + indices)  # a CPU scalar is an argument of the kernel, not a copy to the device


def drop_path_scales(keys: Tensor, views: int, blocks: int, last_rate: float) -> Tensor:
    """keys (b,) -> (blocks, 2, views * b) FP32: 0 where a branch is dropped, 1 / (1 - rate) where it is kept.

    Rates grow linearly from 0 in the first block to `last_rate` in the last.
    """
    device = keys.device
    view = torch.arange(views, device=device).repeat_interleave(keys.shape[0])
    branch = torch.arange(2 * blocks, device=device)
    rows = mix(keys.repeat(views) + view)
    hashed = mix(mix(rows.unsqueeze(0) ^ mix(branch).unsqueeze(1)))
    uniform = _shift(hashed, 11).to(torch.float64) * 2.0**-53
    # Made on the device: a list of rates would be a copy from the host in every step.
    rate = torch.arange(blocks, device=device, dtype=torch.float64) * (last_rate / max(blocks - 1, 1))
    rate = rate.repeat_interleave(2).unsqueeze(1)
    return ((uniform >= rate) / (1 - rate)).float().view(blocks, 2, -1)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)

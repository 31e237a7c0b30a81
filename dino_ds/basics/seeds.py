"""Seeds and keys by splitmix64 (Steele, Lea, Flood 2014): neighboring numbers give unrelated ones."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_SIGNED_GOLDEN, _SIGNED_MIX1, _SIGNED_MIX2 = (number - (1 << 64) for number in (_GOLDEN, _MIX1, _MIX2))


def crop_seed(seed: int, epoch: int, index: int) -> int:
    """A 64-bit hash of (seed, epoch, index): crops depend on nothing else, neither on the worker nor on the rank."""
    value = 0
    for part in (seed, epoch, index):
        value = ((value ^ (part & _MASK)) + _GOLDEN) & _MASK
        value = ((value ^ (value >> 30)) * _MIX1) & _MASK
        value = ((value ^ (value >> 27)) * _MIX2) & _MASK
        value ^= value >> 31
    return value


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the global generators of Python, NumPy, torch on the CPU, and torch on `device`, with 64 bits."""
    import numpy as np
    import torch

    random.seed(int(seed))
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a stack where no GPU is used yet
    if device is not None and device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def mix(x: Tensor) -> Tensor:
    """Mix the bits of int64 numbers as a step of `crop_seed` does, element-wise."""
    x = x + _SIGNED_GOLDEN
    x = (x ^ shift_right(x, 30)) * _SIGNED_MIX1
    x = (x ^ shift_right(x, 27)) * _SIGNED_MIX2
    return x ^ shift_right(x, 31)


def sample_keys(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """One int64 key for each image of a batch: indices (b,) int64 on any device -> (b,) there."""
    import torch

    base = mix(mix(torch.tensor(seed, dtype=torch.int64)) + epoch)
    return mix(base + indices)  # a CPU scalar is an argument of the kernel, not a copy to the device


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64: torch's own keeps the sign, and it has none for unsigned numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)

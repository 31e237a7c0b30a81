"""The rules of `dino-ds advise`: functions from data and GPUs to settings. docs/notes/advice.md has their sources."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dino_ds.config.fields import MOST_PASSES

FROZEN = "vit_small_patch14_dinov2.lvd142m --size 224"
"""Arguments of `embed` for released weights whose features are worth a look before any training."""
_MANY_IMAGES = 1_000_000
"""Images from which on training starts from scratch: DINO's and DINOv2's authors had ImageNet's 1.28 million."""
_FEW_FOR_DINO = 100_000
"""Images below which training from scratch takes a recipe for small datasets."""
_TINY_SIDE = 96
"""Pixels of the shorter side below which weights and crops for 224 pixels make no sense."""
_LARGE_GIB = 39.0
LEAST_BATCH = 32
"""Fewest images of a step, and of each GPU's share of a step."""


@dataclass(frozen=True)
class Data:
    """The facts that decide: number of images, median shorter side in pixels, channels (1 and 3 are treated alike:
    gray is read as RGB)."""

    images: int
    side: int
    channels: int = 3

    @property
    def tiny(self) -> bool:
        return self.side < _TINY_SIDE

    @property
    def color(self) -> bool:
        return self.channels in (1, 3)


@dataclass(frozen=True)
class Gpus:
    """Number of GPUs, 0 for a CPU, and the memory of one."""

    count: int = 0
    memory_gib: float = 0.0


def recipe_for(data: Data, gpus: Gpus) -> str:
    """Choose the shipped recipe, which the other settings then change."""
    if data.tiny or not gpus.count:
        return "small"
    if released_weights(data, gpus):
        return "continue"
    if data.images < _FEW_FOR_DINO:
        return "small_vits16"
    if data.images < _MANY_IMAGES or gpus.count < 4:
        return "vits16"
    return "dinov2_vitl16_short" if gpus.count >= 8 and gpus.memory_gib >= _LARGE_GIB else "vitb16"


def released_weights(data: Data, gpus: Gpus) -> str | None:
    """Return timm's name of the weights to continue from, or None to train from scratch."""
    if data.tiny or not gpus.count or not data.color or data.images >= _MANY_IMAGES:
        return None
    large = gpus.count >= 4 and data.images >= 100_000
    return f"vit_{'base' if large else 'small'}_patch16_224.dino"


def epochs(images: int) -> int:
    """Return the epochs that show 20 million images in all, but 100 to 2000; from ImageNet's 1.28 million images on,
    those that show 128 million, but 5 to 100."""
    return round(min(max(20e6 / images, 100), MOST_PASSES) if images < 1_280_000 else min(max(128e6 / images, 5), 100))


def continued_length(images: int) -> int:
    """Images that a run from released weights shows, on fewer than a million: a quarter of those from scratch."""
    return min(max(5_000_000, 25 * images), 500 * images)


def useful_gpus(data: Data, gpus: Gpus) -> int:
    """Return how many of these GPUs get at least 32 images of each step; 0 without GPUs."""
    return min(gpus.count, max(1, _wanted_batch(data, gpus) // LEAST_BATCH))


def batch_size(data: Data, gpus: Gpus) -> int:
    """Return the images of an optimizer step, a multiple of the number of GPUs."""
    return max(1, _wanted_batch(data, gpus) // gpus.count) * gpus.count


def _wanted_batch(data: Data, gpus: Gpus) -> int:
    """Return a power of two that leaves at least 8 steps in an epoch, but at least 32."""
    if recipe_for(data, gpus).startswith("dinov2"):
        return 2048
    wanted = 1024 if gpus.count >= 16 else 512 if data.images >= _MANY_IMAGES else 256
    return min(wanted, max(LEAST_BATCH, 2 ** int(math.log2(data.images / 8))))


def prototypes(images: int) -> int:
    """Return a power of two, with at least 16 images for each prototype, but 1024 to 65536."""
    return min(max(2 ** int(math.log2(images / 16)), 1024), 65536)


def momentum(batch: int, steps: int) -> float:
    """Return the EMA teacher's momentum at the start: it averages as many images as DINO's (0.996 at 512), but at most
    a hundredth of the run, and is at least 0.99."""
    return round(max(0.99, min(1 - 0.004 * batch / 512, 1 - 100 / steps)), 4)


def small_momentum(batch: int) -> float:
    """Scale the momentum of recipe small from its batch of 64 to another: square-root rule, measured at 16 and 256."""
    return round(0.9 ** math.sqrt(batch / 64), 3)


def tiny_patch(data: Data) -> int:
    return 4 if data.side < 64 else 8


def cpu_patch(data: Data) -> tuple[int, int]:
    """Return the sides of the patches and of the largest crops, which have at most 64 patches."""
    return (4, 16) if data.side < 16 else (8, 64) if data.tiny else (16, 96)

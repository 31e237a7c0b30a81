"""A model for pictures: on the GPU where there is one, a few images at a time, at a size that shows enough patches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dino_ds.errors import ConfigError
from dino_ds.weights.load import Backbone, load

MAPS_AT_ONCE = 4
"""Images whose tokens or attention are computed at once."""
_FEW_PATCHES, _MANY_PATCHES = 16, 30


def load_frozen(model: str) -> Backbone:
    """Raises CheckpointError."""
    return load(model, _device())


def in_parts(function: Callable[[Tensor], Tensor], images: Tensor, at_once: int = MAPS_AT_ONCE) -> Tensor:
    """What a method of the model makes of images (b, c, h, w), FP32 on the CPU."""
    return torch.cat([function(part.to(_device())).float().cpu() for part in images.split(at_once)])


def side_of(backbone: Backbone, size: int | None) -> int:
    """Pixels of the images whose patches are shown: unless `size` says it, twice the native side, within 16 and 30
    patches, and never less than the native side. Raises ConfigError."""
    patch = backbone.patch_size
    if size is None:
        native = backbone.image_size // patch
        return patch * max(native, min(max(2 * native, _FEW_PATCHES), _MANY_PATCHES))
    if size % patch:
        near = max(round(size / patch), 1) * patch
        raise ConfigError(f"--size {size} is not a multiple of the patch size {patch}: use {near}")
    return size


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"

"""Cuts crops out of an image that is decoded no larger than they need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dino_ds.data.decode import DecodedImage, EncodedImage
from dino_ds.data.image_cache import CachedImage
from dino_ds.data.multicrop import Box, CropParameters, CropTransform

_SHRINKS = (8, 4, 2)
"""Factors by which a JPEG can be decoded smaller."""


def cut_crops(
    image: EncodedImage | DecodedImage | CachedImage,
    sampled: Sequence[CropParameters],
    sizes: Sequence[int],
    transforms: Sequence[CropTransform | None],
    places: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Crops (size, size, c) of an image: cut, resized, turned and transformed. places: tensors of their shape, each of
    which is given back with its crop in it."""
    boxes = [crop.box for crop in sampled]
    array = image.decode(largest_shrink(boxes, sizes))
    if array.shape[:2] != (image.height, image.width):
        across, down = array.shape[1] / image.width, array.shape[0] / image.height
        boxes = [shrunk_box(box, across, down) for box in boxes]
    rooms = [None] * len(boxes) if places is None else places
    crops = [resize_crop(array, *each) for each in zip(boxes, sizes, rooms, strict=True)]
    turned = [torch.rot90(crop, one.turns) if one.turns else crop for crop, one in zip(crops, sampled, strict=True)]
    changed = [
        # A copy: it may be a part of the image, and the user's function may write to it.
        crop if transform is None else torch.from_numpy(transform(np.array(crop.numpy(), order="C")))
        for crop, transform in zip(turned, transforms, strict=True)
    ]
    if places is None:
        return changed
    return [place if crop is place else place.copy_(crop) for place, crop in zip(places, changed, strict=True)]


def resize_crop(image: np.ndarray, box: Box, size: int, place: Tensor | None = None) -> Tensor:
    """Image (h, w, c) -> its `box` (left, top, right, bottom) as (size, size, c), bicubic, antialiased; in `place`, a
    tensor of that shape, if one is given.

    uint8 stays uint8, float32 stays in [0, 1]. Pillow's filter; rounding of uint8 differs by a level or two. Pixels
    stay interleaved: so torch neither copies them before nor after.
    """
    left, top, right, bottom = box
    # A batch of one with all its strides: else torch would not see that pixels are interleaved.
    pixels = torch.from_numpy(np.ascontiguousarray(image[top:bottom, left:right])[None])
    if pixels.shape[1:3] == (size, size):
        return pixels[0] if place is None else place.copy_(pixels[0])
    crop = torch.empty(size, size, image.shape[2], dtype=pixels.dtype) if place is None else place
    out = crop[None].permute(0, 3, 1, 2)
    torch._C._nn._upsample_bicubic2d_aa(pixels.permute(0, 3, 1, 2), (size, size), False, None, out=out)  # type: ignore[call-arg]
    if crop.is_floating_point():
        crop.clamp_(0, 1)  # bicubic overshoots at edges; uint8 saturates
    return crop


def largest_shrink(boxes: Sequence[Box], sizes: Sequence[int]) -> int:
    """The largest factor by which the image may be decoded smaller while no crop is enlarged: 1, 2, 4 or 8."""
    spare = min(
        min(right - left, bottom - top) / size for (left, top, right, bottom), size in zip(boxes, sizes, strict=True)
    )
    return next((shrink for shrink in _SHRINKS if shrink <= spare), 1)


def shrunk_box(box: Box, across: float, down: float) -> Box:
    """`box` in an image whose width is `across` and whose height is `down` times as large; at least one pixel."""
    left, top = round(box[0] * across), round(box[1] * down)
    return left, top, max(round(box[2] * across), left + 1), max(round(box[3] * down), top + 1)

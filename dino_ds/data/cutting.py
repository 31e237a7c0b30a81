"""Cuts crops out of images: for training from an image decoded no larger than needed, for evaluations as in DINO's
k-NN."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dino_ds.data.decode import DecodedImage, EncodedImage
from dino_ds.data.image_cache import CachedImage
from dino_ds.data.multicrop import BICUBIC, Box, CropParameters, to_tensor
from dino_ds.data.normalization import Normalization

_FLAT = 16
"""Limit of a resized image's length in crop sides: a longer image is cut before it is resized, to save memory."""
_SHRINKS = (8, 4, 2)
"""Factors by which a JPEG can be decoded smaller."""


def cut_crops(
    image: EncodedImage | DecodedImage | CachedImage,
    sampled: Sequence[CropParameters],
    sizes: Sequence[int],
    outputs: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Crops (size, size, c) of an image: cut, resized and turned; in `outputs`, tensors of that shape, if given."""
    boxes = [crop.box for crop in sampled]
    array = image.decode(largest_shrink(boxes, sizes))
    if array.shape[:2] != (image.height, image.width):
        across, down = array.shape[1] / image.width, array.shape[0] / image.height
        boxes = [shrunk_box(box, across, down) for box in boxes]
    buffers = [None] * len(boxes) if outputs is None else outputs
    crops = [resize_crop(array, *each) for each in zip(boxes, sizes, buffers, strict=True)]
    turned = [torch.rot90(crop, p.turns) if p.turns else crop for crop, p in zip(crops, sampled, strict=True)]
    if outputs is None:
        return turned
    return [out if crop is out else out.copy_(crop) for out, crop in zip(outputs, turned, strict=True)]


def resize_crop(image: np.ndarray, box: Box, size: int, output: Tensor | None = None) -> Tensor:
    """The `box` (left, top, right, bottom) of an image (h, w, c) as (size, size, c), bicubic, antialiased; in `output`,
    a tensor of that shape, if given.

    uint8 stays uint8, float32 stays in [0, 1]. The filter is Pillow's; uint8 differs by a level or two of rounding.
    Pixels stay interleaved, so that torch copies them neither before nor after.
    """
    left, top, right, bottom = box
    # A batch of one image with all its strides: otherwise torch would not see that pixels are interleaved.
    pixels = torch.from_numpy(np.ascontiguousarray(image[top:bottom, left:right])[None])
    if pixels.shape[1:3] == (size, size):
        return pixels[0] if output is None else output.copy_(pixels[0])
    crop = torch.empty(size, size, image.shape[2], dtype=pixels.dtype) if output is None else output
    out = crop[None].permute(0, 3, 1, 2)
    torch._C._nn._upsample_bicubic2d_aa(pixels.permute(0, 3, 1, 2), (size, size), False, None, out=out)  # type: ignore[call-arg]
    if crop.is_floating_point():
        crop.clamp_(0, 1)  # bicubic overshoots at edges; uint8 saturates
    return crop


def largest_shrink(boxes: Sequence[Box], sizes: Sequence[int]) -> int:
    """Largest factor (1, 2, 4 or 8) by which the image may be decoded smaller without enlarging a crop."""
    spare = min(
        min(right - left, bottom - top) / size for (left, top, right, bottom), size in zip(boxes, sizes, strict=True)
    )
    return next((shrink for shrink in _SHRINKS if shrink <= spare), 1)


def shrunk_box(box: Box, across: float, down: float) -> Box:
    """`box` in an image whose width is `across` and whose height is `down` times as large; at least one pixel."""
    left, top = round(box[0] * across), round(box[1] * down)
    return left, top, max(round(box[2] * across), left + 1), max(round(box[3] * down), top + 1)


class EvalCrop:
    """The k-NN preprocessing of DINO: shorter side to size * 256 / 224 (bicubic), center crop, normalize.

    If an image's shorter side has at most `size` pixels, it is resized to `size` and not cut. Of an odd border, the
    smaller half is cut at the left and the top, as in transformers; torchvision rounds half to even: from borders of 3,
    7, 11, ... pixels it cuts one more there.
    """

    def __init__(self, size: int, normalization: Normalization) -> None:
        self.size, self.channels, self._normalization = size, len(normalization.mean), normalization

    def __call__(self, image: Image.Image | np.ndarray) -> Tensor:
        """RGB image, or (h, w, c) of uint8 or of float32 in [0, 1] -> (c, size, size) float32."""
        return _normalized(image, self._cut, self._normalization)

    def box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of the kept part of an image, in its pixels."""
        (wide, high), (left, top) = self._resized(width, height)
        across, down = width / wide, height / high
        return left * across, top * down, (left + self.size) * across, (top + self.size) * down

    def _resized(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(width, height) of the resized image before the cut, and the upper left corner of the cut."""
        short, long = sorted((width, height))
        target = self.size if short <= self.size else int(self.size * 256 / 224)
        other = int(target * long / short)
        wide, high = (target, other) if width <= height else (other, target)
        return (wide, high), ((wide - self.size) // 2, (high - self.size) // 2)

    def _cut(self, image: Image.Image) -> Image.Image:
        size, (x, y) = self._resized(*image.size)
        if max(size) > _FLAT * self.size:
            left, top, right, bottom = self.box(*image.size)
            box = (left, top, min(right, image.width), min(bottom, image.height))
            return image.resize((self.size, self.size), BICUBIC, box=box)
        return image.resize(size, BICUBIC).crop((x, y, x + self.size, y + self.size))


def _normalized(
    image: Image.Image | np.ndarray, cut: Callable[[Image.Image], Image.Image], normalization: Normalization
) -> Tensor:
    """Apply `cut` to an RGB image, or to each channel of (h, w, c), and normalize: (c, height, width) float32."""
    if isinstance(image, Image.Image):
        return to_tensor(cut(image), normalization)
    planes = torch.from_numpy(
        np.stack([np.asarray(cut(Image.fromarray(plane))) for plane in np.moveaxis(image, -1, 0)])
    )
    pixels = planes.clamp(0, 1) if planes.is_floating_point() else planes / 255  # bicubic overshoots, uint8 saturates
    return normalization(pixels)

"""Values deeper than 8 bits -> float32 in [0, 1], by the one range that a run has for all such images."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from dino_ds.data.images import UnreadableImage, check_keeps_bits, deep_values

ValueRange = tuple[float, float]
"""The values that become 0 and 1. 8-bit images have 0 and 255 whatever it is."""


def to_unit(values: np.ndarray, value_range: ValueRange | None, name: str) -> np.ndarray:
    """uint8 divided by 255, all else scaled by the range: float32 in [0, 1].

    Raises UnreadableImage for values beyond the range, for NaN and infinity, and where there is no range.
    """
    if values.dtype == np.uint8:
        return values.astype(np.float32) / np.float32(255)
    low, high = extremes(values, name)
    found = f"{values.dtype.name} values, {low:.10g} to {high:.10g}"
    if value_range is None:
        raise UnreadableImage(name, f"{found}: deeper than 8 bits, and no data.value_range was given or found")
    black, white = value_range
    limit = values.dtype.type if values.dtype.kind == "f" else float  # FP32 has neither 0.1 nor 1.2
    if low < limit(black) or high > limit(white):
        raise UnreadableImage(name, f"{found}: beyond data.value_range {range_text(value_range)}")
    fits = values.dtype.itemsize <= 2 or values.dtype == np.float32  # FP32 has no place for every larger integer
    exact = values.astype(np.float32 if fits else np.float64)
    scaled = (exact - exact.dtype.type(black)) / exact.dtype.type(white - black)
    return np.clip(scaled, 0, 1, out=scaled).astype(np.float32)  # the last bit of a division


def extremes(values: np.ndarray, name: str) -> ValueRange:
    """The lowest and the highest value. Raises UnreadableImage for NaN, infinity and what is not numbers."""
    if values.dtype.kind not in "uif" or not values.size:
        raise UnreadableImage(name, f"{values.dtype.name} of shape {values.shape} is not an image")
    low, high = float(values.min()), float(values.max())  # a NaN makes both NaN
    if not math.isfinite(low + high):
        raise UnreadableImage(name, "NaN or infinite pixels")
    return low, high


def prepared(image: Image.Image | np.ndarray, value_range: ValueRange | None, name: str) -> Image.Image | np.ndarray:
    """What evaluations take of what a source loads: 8 bits as they are, (h, w, c) in [0, 1] of deeper values.

    Raises UnreadableImage as `to_unit`.
    """
    if isinstance(image, Image.Image):
        check_keeps_bits(image, name)
        if image.mode[0] not in "IF":
            return image
        image = deep_values(image)
    image = image.reshape(*image.shape[:2], -1)
    return image if image.dtype == np.uint8 else to_unit(image, value_range, name)


def range_text(value_range: ValueRange) -> str:
    """As one gives it on the command line."""
    return ",".join(f"{value:.10g}" for value in value_range)

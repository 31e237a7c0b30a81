"""Any Pillow image -> RGB, whatever its mode; and how one that can't be read says which it is and why."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageCms

FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "JPEG2000", "AVIF")
"""Of a file's content, by Pillow's names. Its other decoders (PSD, EPS, FLI, ...) see no file of the user's."""


class UnreadableImage(Exception):
    """An image that can't be decoded: `name` as the source calls it, `reason` in a few words."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode -> RGB: 16 bits scaled to 8, transparency on white.

    Float images (mode F) are taken as [0, 1] if nothing in them exceeds 1, else as [0, 255].
    """
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image
    if mode.startswith("I"):
        # Pillow's own conversion clips at 255, which turns a 16-bit grey image white.
        grey = np.clip(np.asarray(image) >> 8, 0, 255)
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if mode == "F":
        values = np.nan_to_num(np.asarray(image, dtype=np.float32), nan=0.0, posinf=255.0, neginf=0.0)
        scale = 255.0 if values.max(initial=0.0) <= 1 else 1.0
        return Image.fromarray((values * scale).clip(0, 255).round().astype(np.uint8)).convert("RGB")
    if mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.applyTransform(image, ImageCms.buildTransform(lab, srgb, "LAB", "RGB"))
        assert converted is not None
        return converted
    if mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        # What lies under full transparency is arbitrary, so it must not become visible.
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")

"""Any Pillow image -> RGB of 8 bits, or its values where they are deeper; and how an unreadable one says why."""

from __future__ import annotations

import io
import re

import numpy as np
from PIL import Image, ImageCms, ImageFile

FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "JPEG2000", "AVIF")
"""Of a file's content, by Pillow's names. Its other decoders (PSD, EPS, FLI, ...) see no file of the user's."""
_BITS_PER_SAMPLE = 258
_WHITE = 65535


class UnreadableImage(Exception):
    """An image that can't be decoded: `name` as the source calls it, `reason` in a few words."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def evenly_spaced_indices(images: int, wanted: int) -> list[int]:
    """At most `wanted` of `images` indices, evenly spread, so that sorted class folders are all met."""
    count = min(images, wanted)
    return [i * images // count for i in range(count)]


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode of at most 8 bits -> RGB, transparency on white. Raises ValueError for a deeper one."""
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image
    if mode[0] in "IF":
        raise ValueError(f"mode {mode} is deeper than 8 bits")  # Pillow's own conversion clips at 255
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


def is_deep(image: ImageFile.ImageFile, data: bytes) -> bool:
    """Whether a file, of which only the header was read, has more than 8 bits a channel: Pillow may not tell."""
    if image.mode[0] in "IF":
        return True
    if image.format == "PNG":
        return any(";16" in mode for mode in _raw_modes(image))
    if image.format == "TIFF":
        bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, 8)
        return max(bits if isinstance(bits, tuple) else (bits,)) > 8
    if image.format == "PPM":
        return any(isinstance(tile.args, tuple) and int(tile.args[1]) > 255 for tile in image.tile)
    return image.format == "JPEG2000" and _jpeg2000_bits(data) > 8


def check_keeps_bits(image: Image.Image, name: str) -> None:
    """Raises UnreadableImage for an opened file of more than 8 bits a channel of which Pillow would give only 8."""
    if isinstance(image, ImageFile.ImageFile) and image.mode[0] not in "IF" and is_deep(image, b""):
        raise UnreadableImage(name, f"more than 8 bits a channel, and Pillow's {image.mode} has 8: give it as an array")


def deep_values(image: Image.Image, data: bytes | None = None) -> np.ndarray:
    """What a deep image stores: uint16, int32 or float32, grey (h, w) or RGB (h, w, 3); transparency on white.

    `data` is its file, which is needed for RGB. Raises ValueError for what can't be read without loss.
    """
    if image.mode[0] in "IF":
        _mend_byte_order(image)
        # Pillow scales the deeper PGMs, which say what white is, to 16 bits.
        is_short = image.mode[0] == "I" and (image.mode != "I" or image.format == "PPM")
        return np.array(image).astype(np.uint16 if is_short else np.float32 if image.mode == "F" else np.int32)
    values = None if data is None else _both_bytes(image, data)
    if values is None:
        raise ValueError(f"more than 8 bits a channel can't be read from {image.format} {image.mode}: make it RGB PNG")
    if values.shape[2] == 4:
        alpha = values[:, :, 3:].astype(np.uint64)
        values = ((values[:, :, :3] * alpha + _WHITE * (_WHITE - alpha) + _WHITE // 2) // _WHITE).astype(np.uint16)
    return values


def _mend_byte_order(image: Image.Image) -> None:
    """libtiff gives compressed values in the machine's byte order; Pillow may take them for the file's."""
    if isinstance(image, ImageFile.ImageFile):
        image.tile = [
            _with_raw_mode(tile, mode.replace("BS", "S").replace("BF", "F")) if tile.codec_name == "libtiff" else tile
            for tile, mode in zip(image.tile, _raw_modes(image), strict=True)
        ]


def _both_bytes(image: Image.Image, data: bytes) -> np.ndarray | None:
    """uint16 (h, w, 3 or 4); None where Pillow has no such mode.

    Pillow keeps the high byte of two; told of the other byte order, it keeps the low one.
    """
    with Image.open(io.BytesIO(data), formats=[image.format or ""]) as other:
        modes = _raw_modes(other)
        if not all(re.fullmatch("RGBA?;16[BLN]", mode) for mode in modes):
            return None
        swapped = [mode[:-1] + ("L" if mode.endswith("B") else "B") for mode in modes]  # N, the machine's, is L
        other.tile = [_with_raw_mode(tile, mode) for tile, mode in zip(other.tile, swapped, strict=True)]
        return np.asarray(image).astype(np.uint16) << 8 | np.asarray(other)


def _raw_modes(image: ImageFile.ImageFile) -> list[str]:
    """How Pillow will read each part of a file, such as RGB;16B; none are left once it was decoded."""
    return [str(tile.args[0] if isinstance(tile.args, tuple) else tile.args) for tile in image.tile]


def _with_raw_mode(tile: ImageFile._Tile, mode: str) -> ImageFile._Tile:
    return tile._replace(args=(mode, *tile.args[1:]) if isinstance(tile.args, tuple) else mode)


def _jpeg2000_bits(data: bytes) -> int:
    """Of the first channel, as the codestream's header says."""
    start = data.find(b"\xff\x4f\xff\x51")
    return (data[start + 42] & 0x7F) + 1 if 0 <= start < len(data) - 42 else 8

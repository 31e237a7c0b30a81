"""The contract of a source of images, and the conversion of Pillow's images to RGB of 8 bits, or of deeper values to
[0, 1] by the value range of a run."""

from __future__ import annotations

import io
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from PIL import Image, ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from dino_ds.basics.formatting import range_text

_HEAD = 500
PILLOW = {  # endings of files by Pillow's name of the format. Its other decoders (PSD, EPS, FLI, ...) are never used.
    "JPEG": (".jpg", ".jpeg", ".jfif", ".jpe"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm"),
    "JPEG2000": (".jp2",),
    "AVIF": (".avif",),
}
ValueRange = tuple[float, float]  # values that become 0 and 1; for 8-bit images always 0 and 255
_BITS_PER_SAMPLE, _PLANES, _SAMPLE_FORMAT = 258, 284, 339
PHOTOMETRIC, WHITE_IS_ZERO = 262, 0  # a TIFF tag, and its value in files whose lowest number is white
_SEPARATE, _UNSIGNED, _SIGNED = 2, 1, 2
"""Values of these tags: a plane for each channel; integers without and with a sign."""
_WHITE = 65535
WITH_ALPHA = {"RGBA": 4, "LA": 2, "RGBa": 4, "La": 2}
"""Modes whose last channel is alpha, and their numbers of channels."""
_STORED = {"LA": 2, "RGBA": 4, "RGBX": 4, "CMYK": 4}
"""Modes of in-memory images whose channels may be wanted unchanged, and their numbers of channels."""
_BOTH_BYTES = re.compile("RGBA?;16[BLN]")
"""Raw modes of two bytes a value: Pillow keeps one of them, and can be told which."""


class Source(Protocol):
    """Images by index, always in the same order; picklable, since loader processes get a copy. A source of encoded
    files also has `read(index) -> bytes`, which lets the pipeline choose the decoder. A source whose images are not
    drawn equally often has `draws` (`dino_ds.data.mixture`)."""

    @property
    def labels(self) -> Sequence[int] | None:
        """Class number of each image, an index into `classes`; -1 = no class. None = no labels at all."""

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, each a printable line."""

    def __len__(self) -> int: ...

    def load(self, index: int) -> Image.Image | Any:
        """RGB image, or an array (h, w, c) of uint8 or of deeper values as stored. Raises UnreadableImage."""

    def name(self, index: int) -> str:
        """Name in messages, a printable line: the file's path, or a name like cifar10/train/17."""


class Joined(ABC):
    """A source made of several others."""

    @property
    @abstractmethod
    def joined(self) -> Sequence[tuple[str, Source]]:
        """The joined sources in order, each with the path or address that the user wrote."""

    @abstractmethod
    def another(self, index: int, number: int) -> int:
        """Index of another image from the same part as image `index`; `number`, any integer, chooses it."""


class UnreadableImage(Exception):
    """An image can't be decoded: `name` as its source calls it, `reason` in a few words."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def is_remote(source: Source) -> bool:
    """Whether images of a source are in a bucket or on a web server, and are to be announced by `prepare_images`."""
    return bool(getattr(source, "elsewhere", False))


def prepare_images(source: Source, indices: Sequence[int], seconds: float | None = None) -> None:
    """Tell a source which images are read next, so that it fetches remote ones together.

    Args:
        source: any source; a local one ignores the call.
        indices: images that are read next.
        seconds: time after which an image that has not arrived counts as lost.
    """
    if is_remote(source):
        source.prepare(indices, seconds)  # type: ignore[attr-defined]


def evenly_spaced_indices(images: int, wanted: int) -> list[int]:
    """At most `wanted` of `images` indices, evenly spread, so that they cover the sorted class folders."""
    count = min(images, wanted)
    return [i * images // count for i in range(count)]


def find_placeholder(path: str) -> str | None:
    """Name the placeholder at `path`, such as a Git LFS pointer or a web page; None for any other file."""
    with suppress(OSError), open(path, "rb") as file:
        return name_placeholder(file.read(_HEAD))
    return None


def name_placeholder(head: bytes) -> str | None:
    """Name the placeholder, such as a Git LFS pointer, that begins with `head`; None for any other file."""
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS in place of the file: git lfs pull fetches it"
    if re.match(rb"\s*(<\?xml[^>]*>\s*)?<(!doctype\s+html|html)", head[:_HEAD], re.IGNORECASE):
        return "a web page in place of the file: download it again"
    return None


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode of at most 8 bits -> RGB, transparency on white. Raises ValueError for a deeper one."""
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image
    if mode[0] in "IF":
        raise ValueError(f"mode {mode} is deeper than 8 bits")  # Pillow's own conversion clips at 255
    if mode == "La":
        image = image.convert("LA")  # the only conversion that Pillow has
    if mode in (*WITH_ALPHA, "PA") or "transparency" in image.info:
        layer = image.convert("RGBA")  # what lies under full transparency is arbitrary, so it must not become visible
        alpha = layer.getchannel("A")
        if alpha.getextrema()[0] == 255:
            return layer.convert("RGB")
        if mode in WITH_ALPHA:
            _check_alpha(np.asarray(alpha), 255)
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def is_gray(image: Image.Image) -> bool:
    """Whether an image has brightness alone: neither colors, nor a palette, nor transparency."""
    return (image.mode in ("1", "L") or image.mode[0] in "IF") and "transparency" not in image.info


def is_deep(image: ImageFile.ImageFile, data: bytes) -> bool:
    """Whether a file has more than 8 bits a channel, by its header: Pillow's mode may not tell."""
    if image.mode[0] in "IF":
        return True
    if image.format == "PNG":
        return any(";16" in mode for mode in _raw_modes(image))
    if image.format == "TIFF":
        bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, 8)
        return max(bits if isinstance(bits, tuple) else (bits,)) > 8
    if image.format == "PPM":
        return any(isinstance(tile.args, tuple) and int(tile.args[1]) > 255 for tile in image.tile)
    if image.format != "JPEG2000":
        return False
    start = data.find(b"\xff\x4f\xff\x51")  # the codestream, whose header has the bits of the first channel, less one
    return 0 <= start < len(data) - 42 and data[start + 42] & 0x7F >= 8


def reads_all_bits(image: ImageFile.ImageFile) -> bool:
    """Whether `deep_values` can read a deep file, by its header."""
    if image.mode[0] in "IF":
        return True
    by_libtiff = any(tile.codec_name == "libtiff" for tile in image.tile)
    if by_libtiff and getattr(image, "tag_v2", {}).get(_PLANES) == _SEPARATE:
        return False  # Pillow returns the high byte, whichever it is asked for
    return all(map(_BOTH_BYTES.fullmatch, _raw_modes(image)))


def reads_as_stored(image: TiffImageFile) -> bool:
    """Whether Pillow has a type for a TIFF's numbers: it confuses signed and unsigned ones of 8 and of 32 bits."""
    formats, bits = (image.tag_v2.get(tag, (1,)) for tag in (_SAMPLE_FORMAT, _BITS_PER_SAMPLE))
    return (formats[0], bits[0]) not in ((_SIGNED, 8), (_UNSIGNED, 32))


def pillow_values(image: Image.Image, channels: int, name: str) -> np.ndarray:
    """Pixels (h, w, c) of an in-memory image of any mode, in its own type, as if read with `channels` from a file of
    that mode; RGBA, CMYK and gray with alpha stay unchanged if their number of channels is wanted. The image is not
    turned by its orientation. Raises UnreadableImage for values that Pillow would not return in full."""
    if isinstance(image, ImageFile.ImageFile) and image.mode[0] not in "IF" and is_deep(image, b""):
        raise UnreadableImage(name, f"more than 8 bits a channel, and Pillow's {image.mode} has 8: give it as an array")
    if _STORED.get(image.mode) == channels:
        return np.array(image)
    try:
        if image.mode[0] in "IF":
            return in_channels(deep_values(image), channels)
        shown = image.convert("L") if channels == 1 and is_gray(image) else to_rgb(image)
        return in_channels(np.array(shown), channels)
    except ValueError as error:
        raise UnreadableImage(name, str(error)) from None


def in_channels(values: np.ndarray, channels: int) -> np.ndarray:
    """Values (h, w, c): gray (h, w) in one channel if one is wanted, else in three; (h, w, c) unchanged."""
    return values if values.ndim == 3 else np.repeat(values[:, :, None], 1 if channels == 1 else 3, axis=2)


def deep_values(image: Image.Image, data: bytes | None = None, channels: int = 3) -> np.ndarray:
    """Stored values of a deep image: uint16, int32 or float32, gray (h, w) or RGB (h, w, 3) with transparency on white,
    or RGBA (h, w, 4) if 4 `channels` are wanted. data: the image's file, needed for RGB. Raises ValueError for values
    that can't be read without loss."""
    if image.mode[0] in "IF":
        # libtiff returns the machine's byte order, Pillow may assume the file's.
        if isinstance(image, ImageFile.ImageFile):
            image.tile = [
                _with_raw_mode(tile, mode.replace("BS", "S").replace("BF", "F"))
                if tile.codec_name == "libtiff"
                else tile
                for tile, mode in zip(image.tile, _raw_modes(image), strict=True)
            ]
        # Pillow scales deeper PGMs, whose header has the value of white, to 16 bits.
        is_short = image.mode[0] == "I" and (image.mode != "I" or image.format == "PPM")
        gray = np.array(image).astype(np.uint16 if is_short else np.float32 if image.mode == "F" else np.int32)
        is_white_zero = isinstance(image, TiffImageFile) and image.tag_v2.get(PHOTOMETRIC) == WHITE_IS_ZERO
        return black_first(gray, 16) if is_white_zero else gray
    values = None if data is None else _both_bytes(image, data)
    if values is None:
        raise ValueError(f"more than 8 bits a channel can't be read from {image.format} {image.mode}: make it RGB PNG")
    if values.shape[2] == 4 and channels != 4:
        _check_alpha(values[:, :, 3], _WHITE)
        alpha = values[:, :, 3:].astype(np.uint64)
        values = ((values[:, :, :3] * alpha + _WHITE * (_WHITE - alpha) + _WHITE // 2) // _WHITE).astype(np.uint16)
    return values


def _check_alpha(alpha: np.ndarray, white: int) -> None:
    """Raises ValueError for an alpha channel of mostly partial values, over 16 distinct: it may be an infrared band."""
    counts = np.bincount(alpha.reshape(-1), minlength=white + 1)
    between = counts[1:white]
    if between.sum() > counts[white] and np.count_nonzero(between) > 16:
        why = "its last channel is called alpha and varies like an image's"
        more = "take all channels (--model.in_chans 4 for RGB and one more)"
        raise ValueError(f"{why}: {more}, or write the file without it")


def black_first(values: np.ndarray, bits: int, signed: bool = False) -> np.ndarray:
    """Invert integers of `bits` bits whose lowest value is white. Raises ValueError for other types."""
    if values.dtype.kind != ("i" if signed else "u"):
        raise ValueError(f"{values.dtype} values of which 0 is white: save them so that 0 is black")
    both_ends = -1 if signed else (1 << bits) - 1
    return values.dtype.type(both_ends) - values


def to_unit(values: np.ndarray, value_range: ValueRange | None, name: str) -> np.ndarray:
    """Values scaled to float32 in [0, 1]: uint8 divided by 255, other types by the range. Raises UnreadableImage for
    values beyond the range, for NaN and infinity, and where there is no range."""
    if values.dtype == np.uint8:
        return values.astype(np.float32) / np.float32(255)
    low, high = extremes(values, name)
    if why := why_not_scaled(values.dtype, low, high, value_range):
        raise UnreadableImage(name, why)
    assert value_range is not None
    black, white = value_range
    fits = values.dtype.itemsize <= 2 or values.dtype == np.float32  # FP32 can't represent all larger integers
    exact = values.astype(np.float32 if fits else np.float64)
    scaled = (exact - exact.dtype.type(black)) / exact.dtype.type(white - black)
    return np.clip(scaled, 0, 1, out=scaled).astype(np.float32)  # a division may exceed 1 by its last bit


def why_not_scaled(dtype: np.dtype, low: float, high: float, value_range: ValueRange | None) -> str:
    """Reason why deep values from `low` to `high` do not fit the range; "" if they fit."""
    values = f"{dtype.name} values, {low:.10g} to {high:.10g}"
    if value_range is None:
        return f"{values}: deeper than 8 bits, and no data.value_range was given or found"
    black, white = value_range
    limit = dtype.type if dtype.kind == "f" else float  # FP32 can't represent 0.1 or 1.2
    is_within = limit(black) <= low and high <= limit(white)
    return "" if is_within else f"{values}: beyond data.value_range {range_text(value_range)}"


def extremes(values: np.ndarray, name: str) -> ValueRange:
    """Lowest and highest value. Raises UnreadableImage for NaN, infinity and other types than numbers."""
    if values.dtype.kind not in "uif" or not values.size:
        raise UnreadableImage(name, f"{values.dtype.name} of shape {values.shape} is not an image")
    low, high = float(values.min()), float(values.max())  # a NaN makes both NaN
    if not math.isfinite(low + high):
        raise UnreadableImage(name, "NaN or infinite pixels")
    return low, high


def _both_bytes(image: Image.Image, data: bytes) -> np.ndarray | None:
    """Values (h, w, 3 or 4) of uint16 from two decodings: Pillow keeps the high byte of each value, and if told the
    other byte order, the low byte. None for other modes than `_BOTH_BYTES`."""
    with Image.open(io.BytesIO(data), formats=[image.format or ""]) as other:
        modes = _raw_modes(other)
        if not all(map(_BOTH_BYTES.fullmatch, modes)):
            return None
        swapped = [mode[:-1] + ("L" if mode.endswith("B") else "B") for mode in modes]  # N, the machine's, is L
        other.tile = [_with_raw_mode(tile, mode) for tile, mode in zip(other.tile, swapped, strict=True)]
        return np.asarray(image).astype(np.uint16) << 8 | np.asarray(other)


def _raw_modes(image: ImageFile.ImageFile) -> list[str]:
    """Raw mode of each tile that Pillow will read, such as RGB;16B; empty once the file is decoded."""
    return [str(tile.args[0] if isinstance(tile.args, tuple) else tile.args) for tile in image.tile]


def _with_raw_mode(tile: ImageFile._Tile, mode: str) -> ImageFile._Tile:
    return tile._replace(args=(mode, *tile.args[1:]) if isinstance(tile.args, tuple) else mode)

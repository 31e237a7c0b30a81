"""One image of any source as a file for an archive: its name within the data set, and its bytes, perhaps shrunk."""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from dino_ds.data.base import Source, UnreadableImage
from dino_ds.data.encoded import EXTENSIONS
from dino_ds.data.images import FORMATS, is_deep, to_rgb
from dino_ds.errors import DataError

_MAX_PIXELS = 178956970
"""Pillow's own limit: shrinking is how images come below the recipe's."""
_MOST_PARTS = 64
"""Folders deeper than this can't be made everywhere."""
_ENDINGS = {
    "JPEG": ".jpg",
    "MPO": ".jpg",
    "PNG": ".png",
    "WEBP": ".webp",
    "BMP": ".bmp",
    "GIF": ".gif",
    "TIFF": ".tif",
    "PPM": ".ppm",
}


@dataclass(frozen=True)
class Shrink:
    """Images whose shorter side has more than `side` pixels become JPEGs of that size; None = all stay as they are."""

    side: int | None
    quality: int


def member_of(source: Source, index: int) -> str:
    """The image's name within the data set as a safe relative path: never absolute, no .. and nothing hidden."""
    text: str = getattr(source, "member", source.name)(index)
    parts = [part for part in text.replace("\0", "?").split("/") if part not in ("", ".", "..")]
    if not parts:
        return str(index)
    return "/".join([*parts[-_MOST_PARTS:-1], f"_{parts[-1]}" if parts[-1].startswith(".") else parts[-1]])


def names_digest(source: Source) -> str:
    """Tells one set of images from another."""
    digest = hashlib.sha256(str(len(source)).encode())
    for index in range(len(source)):
        digest.update(os.fsencode(member_of(source, index)) + b"\n")
    return digest.hexdigest()


def repack(source: Source, index: int, shrink: Shrink) -> tuple[str, bytes]:
    """Name and bytes: the source's own file unless it has to be shrunk, PNG where it has none.

    Raises UnreadableImage, DataError for an array that is no RGB image.
    """
    name = member_of(source, index)
    read = getattr(source, "read", None)
    data = _as_png(source.load(index), source.name(index)) if read is None else read(index)
    if shrink.side is not None:
        data, changed = _shrunk(data, shrink.side, shrink.quality, source.name(index))
        if changed:
            stem, ending = os.path.splitext(name)
            name = f"{stem if ending.lower() in EXTENSIONS else name}.jpg"
    if not name.lower().endswith(EXTENSIONS):
        name += _ending(data, source.name(index))
    return name, data


def _as_png(image: Image.Image | Any, name: str) -> bytes:
    if isinstance(image, np.ndarray):
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            what = f"{image.dtype} of shape {image.shape}"
            raise DataError(f"{name} is an array of {what}; only RGB images of 8 bits can be put into shards")
        image = Image.fromarray(image)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def _shrunk(data: bytes, side: int, quality: int, name: str) -> tuple[bytes, bool]:
    """A JPEG whose shorter side is `side`, upright, and True; or the same bytes and False."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > _MAX_PIXELS:
                raise UnreadableImage(name, f"{width} x {height} pixels are more than {_MAX_PIXELS}")
            factor = side / min(width, height)
            if factor >= 1 or is_deep(image, data):  # a JPEG has 8 bits
                return data, False
            # At least twice the pixels wanted, so that the resampling decides what is seen.
            image.draft(None, (2 * round(width * factor), 2 * round(height * factor)))
            image.load()
            upright = to_rgb(ImageOps.exif_transpose(image))
        factor = side / min(upright.size)
        size = (max(side, round(upright.width * factor)), max(side, round(upright.height * factor)))
        stream = io.BytesIO()
        upright.resize(size, Image.Resampling.LANCZOS).save(stream, "JPEG", quality=quality)
        return stream.getvalue(), True
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage(name, "not an image") from None
    except Exception as error:  # Pillow's decoders raise anything on broken files
        raise UnreadableImage(name, str(error).partition("\n")[0] or type(error).__name__) from None


def _ending(data: bytes, name: str) -> str:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return _ENDINGS[image.format or ""]
    except Exception:
        raise UnreadableImage(name, "not an image of a known format") from None

"""Images of any source as files of an archive, perhaps made smaller."""

from __future__ import annotations

import io
import os
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from dino_ds.data.base import Source, UnreadableImage
from dino_ds.data.decode import EncodedImage
from dino_ds.data.formats import ENDINGS, EXTENSIONS
from dino_ds.data.images import pillow_values
from dino_ds.errors import DataError

_MAX_PIXELS = 178956970
"""Pillow's own limit: shrinking is how images come below the recipe's."""
_MOST_PARTS = 64
"""Folders deeper than this can't be made everywhere."""
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16")
_ENDINGS = {"MPO": ".jpg"} | {name: endings[0] for name, endings in ENDINGS.items()}


class Shrink(NamedTuple):
    """Images whose shorter side has more than `side` pixels become JPEGs of that size; None = all stay as they are."""

    side: int | None
    quality: int = 90


def repack(source: Source, index: int, shrink: Shrink) -> tuple[str, bytes]:
    """Name and bytes: the source's own file unless it has to be shrunk, PNG where it has none.

    Raises UnreadableImage, DataError for an array that is not an RGB image.
    """
    name = _member_of(source, index)
    read = getattr(source, "read", None)
    data = _as_png(source.load(index), source.name(index)) if read is None else read(index)
    smaller = None if shrink.side is None else _shrunk(data, shrink.side, shrink.quality, source.name(index))
    if smaller is not None:
        data = smaller
        stem, ending = os.path.splitext(name)
        name = f"{stem if ending.lower() in EXTENSIONS else name}.jpg"
    if not name.lower().endswith(EXTENSIONS):
        try:
            name += _ENDINGS[EncodedImage(data, name, None, channels=None).format]
        except Exception:
            raise UnreadableImage(source.name(index), "not an image of a known format") from None
    return name, data


def _member_of(source: Source, index: int) -> str:
    """The image's name within the data set as a safe relative path: never absolute, no .. and nothing hidden."""
    text: str = getattr(source, "member", source.name)(index)
    parts = [part for part in text.replace("\0", "?").split("/") if part not in ("", ".", "..")]
    if not parts:
        return str(index)
    return "/".join([*parts[-_MOST_PARTS:-1], f"_{parts[-1]}" if parts[-1].startswith(".") else parts[-1]])


def _as_png(image: Image.Image | Any, name: str) -> bytes:
    if isinstance(image, Image.Image) and image.mode not in _PNG_MODES:
        image = pillow_values(image, 3, name)
    if isinstance(image, np.ndarray):
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            what = f"{image.dtype} of shape {image.shape}"
            raise DataError(f"{name} is an array of {what}; only RGB images of 8 bits can be put into shards")
        image = Image.fromarray(image)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def _shrunk(data: bytes, side: int, quality: int, name: str) -> bytes | None:
    """A JPEG whose shorter side is `side`, upright, or None if the file stays as it is. Raises UnreadableImage."""
    image = EncodedImage(data, name, None, channels=None)
    shorter = min(image.width, image.height)
    if shorter <= side or image.deep or image.is_raster:  # a JPEG has 8 bits
        return None
    if image.width * image.height > _MAX_PIXELS:
        raise UnreadableImage(name, f"{image.width} x {image.height} pixels are more than {_MAX_PIXELS}")
    # At least twice the pixels wanted, so that the resampling decides what is seen.
    upright = Image.fromarray(image.decode(max((n for n in (2, 4, 8) if shorter >= 2 * side * n), default=1)))
    factor = side / min(upright.size)
    size = (max(side, round(upright.width * factor)), max(side, round(upright.height * factor)))
    stream = io.BytesIO()
    upright.resize(size, Image.Resampling.LANCZOS).save(stream, "JPEG", quality=quality)
    return stream.getvalue()

"""An image file's bytes -> upright RGB by the fastest decoder at hand, within a limit of pixels.

8 bits a channel give uint8. Deeper files keep their values: float32 in [0, 1] by the run's value range.

JPEG: simplejpeg, which gives Pillow's pixels (both are libjpeg-turbo) without its detours through memory. All else,
and JPEGs that simplejpeg finds fault with or that are neither RGB nor grey: Pillow.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image, ImageOps

from dino_ds.data.base import Source, UnreadableImage
from dino_ds.data.images import FORMATS, ValueRange, check_keeps_bits, deep_values, is_deep, prepared, to_rgb, to_unit

MAX_PIXELS = 50_000_000
"""Of an image where the recipe doesn't say: half a gigabyte while it is decoded."""
_ORIENTATION = 0x0112
_LITTLE = 64 * 2**20
_EXIF_TRANSFORMS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}
"""By the EXIF tag's value; 1 and anything unknown = upright already."""


def decode_rgb(data: bytes, name: str, max_pixels: int | None) -> np.ndarray:
    """uint8 (h, w, 3), upright; an animation's first frame. Raises UnreadableImage, also for more than 8 bits."""
    return EncodedImage(data, name, max_pixels).decode()


def pixels(source: Source, index: int, max_pixels: int | None, value_range: ValueRange | None = None) -> np.ndarray:
    """Image `index` as `decode` gives it: read and decoded where the source has files, loaded else."""
    return open_image(source, index, max_pixels, value_range).decode()


def load_image(source: Source, index: int, value_range: ValueRange | None) -> Image.Image | np.ndarray:
    """Image `index` for evaluations, loaded and `prepared`. Raises UnreadableImage."""
    image = prepared(source.load(index), value_range, source.name(index))
    if isinstance(image, Image.Image) and image.mode != "RGB":  # of a class of the user's: its channels, as in training
        return np.asarray(image).reshape(image.height, image.width, -1)
    return image


def open_image(
    source: Source, index: int, max_pixels: int | None, value_range: ValueRange | None = None
) -> EncodedImage | DecodedImage:
    """The file with its header read, where the source has files; else the pixels. Raises UnreadableImage."""
    read = getattr(source, "read", None)
    if read is not None:
        return EncodedImage(read(index), source.name(index), max_pixels, value_range)
    image, name = source.load(index), source.name(index)
    if isinstance(image, Image.Image):
        check_keeps_bits(image, name)
    return DecodedImage(np.array(image), name, max_pixels, value_range)


def is_deep_file(data: bytes) -> bool:
    """Whether an image file has more than 8 bits a channel, by its header alone. Raises what Pillow does."""
    Image.MAX_IMAGE_PIXELS = None  # no pixel is decoded
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        return is_deep(image, data)


class DecodedImage:
    """Pixels (h, w) or (h, w, c) of a source that has no files; the interface of EncodedImage."""

    def __init__(
        self, array: np.ndarray, name: str, max_pixels: int | None, value_range: ValueRange | None = None
    ) -> None:
        self.height, self.width = array.shape[:2]
        _check_size(self.width, self.height, name, max_pixels)
        self._array, self._name, self._range = array.reshape(self.height, self.width, -1), name, value_range
        self.channels, self.deep = self._array.shape[2], array.dtype != np.uint8

    def values(self) -> np.ndarray:
        return self._array

    def decode(self, shrink: int = 1) -> np.ndarray:
        return _as_trained(self._array, self._range, self._name)


class EncodedImage:
    """A file of which only the header has been looked at; `width` and `height` (pixels) are the upright image's.

    `deep`: more than 8 bits a channel; `value_range` scales these. Raises UnreadableImage, before memory is taken, if
    it is no image or has more than `max_pixels` pixels (None = any number).
    """

    channels = 3

    def __init__(self, data: bytes, name: str, max_pixels: int | None, value_range: ValueRange | None = None) -> None:
        self._data, self._name, self._range = data, name, value_range
        if not data:
            raise UnreadableImage(name, "empty file")
        with self._naming_errors():
            Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit only warns, up to twice as many
            self._image = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = self._image.size
            _check_size(width, height, name, max_pixels)
            self.deep = is_deep(self._image, data)
            orientation: Any = self._image.getexif().get(_ORIENTATION)  # some formats decode to find it
        self._upright = _EXIF_TRANSFORMS.get(orientation)
        lies = self._upright is not None and orientation >= 5
        self.width, self.height = (height, width) if lies else (width, height)

    def decode(self, shrink: int = 1) -> np.ndarray:
        """(h, w, 3): uint8 without a value range, float32 in [0, 1] with one, also of 8 bits.

        `shrink` 2, 4 or 8: a JPEG's sides that many times smaller, at a part of the cost; other formats come in full
        size. Raises UnreadableImage, also for a deep file without a range and for values beyond it.
        """
        values = _as_trained(self.values(shrink), self._range, self._name)
        return values if values.ndim == 3 else np.repeat(values[:, :, None], 3, axis=2)

    def values(self, shrink: int = 1) -> np.ndarray:
        """uint8 (h, w, 3), or what a deep file stores: (h, w) or (h, w, 3), unscaled. Raises UnreadableImage."""
        with self._naming_errors():
            image = self._image
            if self.deep:
                stored = deep_values(image, self._data)
                return stored if self._upright is None else np.ascontiguousarray(self._upright(stored))
            if image.format == "JPEG" and image.mode in ("RGB", "L"):
                array = _decode_jpeg(self._data, *image.size, shrink)
                if array is not None:
                    return array if self._upright is None else np.ascontiguousarray(self._upright(array))
            return np.array(to_rgb(image if self._upright is None else ImageOps.exif_transpose(image)))

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except UnreadableImage:
            raise
        except Image.UnidentifiedImageError:
            raise UnreadableImage(self._name, "not an image") from None
        except MemoryError:
            # An image too large for a decoder is the image's fault; where little is left either, nothing can go on.
            bytearray(_LITTLE)
            raise UnreadableImage(self._name, "too large for the memory") from None
        except Exception as error:  # decoders raise anything from struct.error to SyntaxError on broken files
            reason = str(error).partition("\n")[0]
            raise UnreadableImage(self._name, reason or type(error).__name__) from error


def _as_trained(values: np.ndarray, value_range: ValueRange | None, name: str) -> np.ndarray:
    return values if value_range is None and values.dtype == np.uint8 else to_unit(values, value_range, name)


def _decode_jpeg(data: bytes, width: int, height: int, shrink: int) -> np.ndarray | None:
    """uint8 (height / shrink, width / shrink, 3), rounded up; None if there is any fault in it: Pillow then decides."""
    try:
        return simplejpeg.decode_jpeg(
            data, "RGB", min_width=-(-width // shrink), min_height=-(-height // shrink), min_factor=shrink
        )
    except ValueError:
        return None


def _check_size(width: int, height: int, name: str, max_pixels: int | None) -> None:
    if max_pixels is not None and width * height > max_pixels:
        raise UnreadableImage(name, f"{width} x {height} pixels, data.max_pixels allows {max_pixels}")

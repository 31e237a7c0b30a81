"""The contract of image files that Pillow does not read, or not whole, what their readers share, and NumPy's files."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import ImageFile

EXTRA = "pip install 'dino_ds[images]'"


@dataclass(frozen=True)
class Raster:
    """A file of which the header has been read. `read` gives (height, width), of several channels (height, width,
    channels), in the machine's byte order; it raises any Exception where the file is broken.

    `deep`: the values are not uint8. `orientation`: the EXIF tag's value; width and height are those before turning.
    `nodata`: the number of pixels without a value, as GDAL writes it.
    """

    format: str
    width: int
    height: int
    channels: int
    deep: bool
    read: Callable[[], np.ndarray]
    orientation: int = 1
    nodata: str | None = None

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    @property
    def mode(self) -> str:
        """The kind of pixels in Pillow's words, where it has some."""
        return {1: "L", 3: "RGB"}.get(self.channels, f"{self.channels} channels")


@dataclass(frozen=True)
class Format:
    """A kind of image file, called `name` as in `Raster.format`, and the endings of such files, the usual one first.

    `is_kind_of` tells it by a file's content. `open` reads the header, for a number of channels that is wanted (or None
    for however many there are); it gives Pillow's image where that reads all of the file, and raises any Exception for
    a broken one.
    """

    name: str
    endings: tuple[str, ...]
    is_kind_of: Callable[[bytes], bool]
    open: Callable[[bytes, int | None], Raster | ImageFile.ImageFile]


def check_type(dtype: np.dtype) -> None:
    """Raises ValueError for what is neither integers nor floats of at most 64 bits."""
    if dtype.kind not in "uif" or dtype.itemsize > 8:
        raise ValueError(f"values of type {dtype}: save them as integers or floats")


def band_axis(shape: Sequence[int]) -> int:
    """The first or the last of three, whichever is shorter than both others. Raises ValueError where neither is."""
    if min(shape) == shape[2] < min(shape[:2]):
        return 2
    if min(shape) == shape[0] < min(shape[1:]):
        return 0
    text = " x ".join(map(str, shape))
    raise ValueError(f"{text}: bands must be the first or the last axis, and fewer than the pixels of either side")


def bands_last(array: np.ndarray, axis: int | None) -> np.ndarray:
    """A copy, (h, w, c), of one band (h, w); writable, and in the machine's byte order."""
    if axis is not None:
        array = array.take(0, axis) if array.shape[axis] == 1 else np.moveaxis(array, axis, -1)
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def spread(values: np.ndarray, bits: int) -> np.ndarray:
    """Stored uint8 of fewer than 8 bits -> 0 to 255, as other files of so few bits are read; all else as it is."""
    if values.dtype != np.uint8 or bits >= 8:
        return values
    white = (1 << bits) - 1
    return ((values.astype(np.uint16) * 255 + white // 2) // white).astype(np.uint8)


def _open_npy(data: bytes, wanted: int | None) -> Raster:
    """An array (h, w), (h, w, c) or (c, h, w). Nothing is unpickled. Raises ValueError for any other."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f".npy of version {version[0]}: save a plain array of numbers")
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read_header(stream)
    check_type(dtype)
    begin = stream.tell()
    if len(shape) not in (2, 3) or min(shape) < 1:
        several = "; save one file an image" if len(shape) > 3 else ""
        raise ValueError(f"an array of shape {shape}: an image is (h, w), (h, w, c) or (c, h, w){several}")
    if math.prod(shape) * dtype.itemsize != len(data) - begin:
        raise ValueError(f"an array of shape {shape} in {dtype} does not have {len(data) - begin} bytes")
    axis = band_axis(shape) if len(shape) == 3 else None

    def read() -> np.ndarray:
        array = np.frombuffer(data, dtype, offset=begin).reshape(shape, order="F" if by_columns else "C")
        return bands_last(array, axis)

    height, width = (side for place, side in enumerate(shape) if place != axis)
    return Raster("NPY", width, height, 1 if axis is None else shape[axis], dtype != np.uint8, read)


NPY = Format("NPY", (".npy",), lambda data: data.startswith(b"\x93NUMPY"), _open_npy)

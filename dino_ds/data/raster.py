"""The contract of readers for image files that Pillow can't read in full, their common parts, and the NumPy reader."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import ImageFile

EXTRA = "pip install 'dino_ds[images]'"


@dataclass(frozen=True)
class Raster:
    """An image file whose header has been read."""

    format: str
    width: int
    """Pixels of the stored image, before `orientation` is applied; so is `height`."""
    height: int
    channels: int
    deep: bool
    """Whether values are not uint8."""
    read: Callable[[], np.ndarray]
    """Returns (height, width), or (height, width, channels); raises any Exception for a damaged file."""
    orientation: int = 1
    """Value of the EXIF tag."""
    nodata: str | None = None
    """Number that marks pixels without a value, as GDAL writes it."""
    pages: int = 1
    """Pages that are taken as channels, and that the file does not call so: they may be slices of a volume."""

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    @property
    def mode(self) -> str:
        """Pillow's mode where there is one, else the number of channels in words."""
        return {1: "L", 3: "RGB"}.get(self.channels, f"{self.channels} channels")


@dataclass(frozen=True)
class Format:
    """A kind of image file and its reader."""

    name: str
    """Name of the format, which its `Raster.format` repeats."""
    endings: tuple[str, ...]
    """Endings of file names, the usual one first."""
    is_kind_of: Callable[[bytes], bool]
    """Whether a file is of this kind, by its content."""
    open: Callable[[bytes, int | None], Raster | ImageFile.ImageFile]
    """Reads the header of a file, for a number of channels (None = all); returns Pillow's image if Pillow can read all
    of it. Raises any Exception for a damaged file."""


def check_type(dtype: np.dtype) -> None:
    """Raises ValueError for a type other than integers and floats of at most 64 bits."""
    if dtype.kind not in "uif" or dtype.itemsize > 8:
        raise ValueError(f"values of type {dtype}: save them as integers or floats")


def band_axis(shape: Sequence[int]) -> int:
    """Axis of the bands: the first or the last of three, if shorter than both others. Raises ValueError if not."""
    if min(shape) == shape[2] < min(shape[:2]):
        return 2
    if min(shape) == shape[0] < min(shape[1:]):
        return 0
    text = " x ".join(map(str, shape))
    raise ValueError(f"{text}: bands must be the first or the last axis, and fewer than the pixels of either side")


def bands_last(array: np.ndarray, axis: int | None) -> np.ndarray:
    """Return a writable copy (h, w, c), or (h, w) for one band, in the machine's byte order."""
    if axis is not None:
        array = array.take(0, axis) if array.shape[axis] == 1 else np.moveaxis(array, axis, -1)
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def spread(values: np.ndarray, bits: int) -> np.ndarray:
    """Scale stored uint8 values of fewer than 8 bits to 0 to 255; return other values unchanged."""
    if values.dtype != np.uint8 or bits >= 8:
        return values
    white = (1 << bits) - 1
    return ((values.astype(np.uint16) * 255 + white // 2) // white).astype(np.uint8)


def _open_npy(data: bytes, wanted: int | None) -> Raster:
    """Read an array (h, w), (h, w, c) or (c, h, w) without unpickling. Raises ValueError for any other array."""
    array = np.load(io.BytesIO(data), allow_pickle=False)
    shape = array.shape
    check_type(array.dtype)
    if len(shape) not in (2, 3) or min(shape) < 1:
        several = "; save one file an image" if len(shape) > 3 else ""
        raise ValueError(f"an array of shape {shape}: an image is (h, w), (h, w, c) or (c, h, w){several}")
    axis = band_axis(shape) if len(shape) == 3 else None
    height, width = (side for number, side in enumerate(shape) if number != axis)
    channels = 1 if axis is None else shape[axis]
    return Raster("NPY", width, height, channels, array.dtype != np.uint8, lambda: bands_last(array, axis))


NPY = Format("NPY", (".npy",), lambda data: data.startswith(b"\x93NUMPY"), _open_npy)

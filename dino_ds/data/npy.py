"""NumPy's .npy files of one array."""

from __future__ import annotations

import io
import math

import numpy as np

from dino_ds.data.raster import Format, Raster, band_axis, bands_last, check_type


def _open(data: bytes, wanted: int | None) -> Raster:
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


NPY = Format("NPY", (".npy",), lambda data: data.startswith(b"\x93NUMPY"), _open)

"""Every kind of image file: the endings by which it is found, and who reads it.

A kind that Pillow reads is one line of `images.PILLOW`; another is a file with a `Format`, and its name in `_OWN`.
"""

from __future__ import annotations

import itertools

from dino_ds.data.dicom import DICOM
from dino_ds.data.images import PILLOW
from dino_ds.data.npy import NPY
from dino_ds.data.raster import Raster
from dino_ds.data.tiff import TIFF

_OWN = (NPY, DICOM, TIFF)
ENDINGS = PILLOW | {one.name: one.endings for one in _OWN}
"""Endings of each kind of file, the usual one first."""
EXTENSIONS = tuple(itertools.chain.from_iterable(ENDINGS.values()))
"""Endings of all files that are taken for images."""
HDF5 = (".h5", ".hdf5", ".he5")
"""Endings of HDF5 files, which hold many images (`dino_ds.data.hdf5`)."""
OTHER_KINDS = (
    *b".heic .heif .jxl .exr .dng .cr2 .cr3 .nef .arw .psd .npz .nii .svs".split(),
    *(ending.encode() for ending in HDF5),
)
"""Endings of images that nothing here reads in a folder: left out, but not in silence."""


def open_raster(data: bytes, channels: int | None) -> Raster | None:
    """The header of a file that Pillow can't read, or not whole; None where Pillow reads it. Raises any Exception for
    broken files."""
    found = next((one for one in _OWN if one.is_kind_of(data)), None)
    return None if found is None else found.open(data, channels)

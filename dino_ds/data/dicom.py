"""Reads the rescaled values of DICOM files with one frame, by pydicom."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image

from dino_ds.data.images import black_first
from dino_ds.data.raster import EXTRA, Format, Raster, spread

_COLORS = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_RCT", "YBR_ICT")
_GRAYS = ("MONOCHROME1", "MONOCHROME2")
_TAGS = (
    "Rows", "Columns", "SamplesPerPixel", "NumberOfFrames", "PhotometricInterpretation", "PlanarConfiguration",
    "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "RescaleSlope", "RescaleIntercept",
    "ModalityLUTSequence", "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence",
    "ExtendedOffsetTable", "ExtendedOffsetTableLengths", "PixelData",
)  # fmt: skip
_DEFLATED = b"1.2.840.10008.1.2.1.99"
_IMPLICIT, _EXPLICIT = "1.2.840.10008.1.2", "1.2.840.10008.1.2.1"
_TYPES = (b"UL", b"OB", b"UI", b"CS", b"DA", b"SH", b"LO")
"""Value representations that a file's first element may have."""
_SPARE = 1 << 16


def _open(data: bytes, wanted: int | None) -> Raster:
    """Open a DICOM file: gray values times the rescale slope plus the intercept, MONOCHROME1 inverted; or RGB.

    Integers stay integers if slope and intercept are; unscaled values of fewer than 8 bits become 0 to 255. Raises
    ValueError for several frames, palettes and modality LUTs, for bits that are not the lowest ones, if pydicom or a
    decoder is missing, and any Exception for damaged files.
    """
    try:
        import pydicom
    except ImportError:
        raise ValueError(f"DICOM files need pydicom: {EXTRA}") from None
    if _DEFLATED in data:  # pydicom would inflate it without a limit
        raise ValueError("a deflated DICOM file: write it uncompressed")
    with _quiet():
        file = pydicom.dcmread(io.BytesIO(data), specific_tags=list(_TAGS), force=True)
        if "TransferSyntaxUID" not in file.file_meta:  # as in files without a header, which are not compressed
            is_implicit = file.original_encoding[0]
            file.file_meta.TransferSyntaxUID = pydicom.uid.UID(_IMPLICIT if is_implicit else _EXPLICIT)
        frames, color = int(file.get("NumberOfFrames") or 1), str(file.get("PhotometricInterpretation"))
        if "PixelData" not in file:
            raise ValueError("a DICOM file without an image")
        if frames > 1:
            raise ValueError(f"{frames} frames in one DICOM file: write one frame a file")
        transforms = _transforms(file)
        if color not in _COLORS + _GRAYS or any(dataset.get("ModalityLUTSequence") for dataset in transforms):
            problem = "a modality LUT" if color in _GRAYS else f"colors as {color}"
            raise ValueError(f"{problem} in a DICOM file: apply it, and write MONOCHROME2 or RGB")
        width, height, bits = (int(file[name].value) for name in ("Columns", "Rows", "BitsAllocated"))
        rescale = _number(transforms, "RescaleSlope", 1.0), _number(transforms, "RescaleIntercept", 0.0)
        if not rescale[0]:
            raise ValueError("a rescale slope of 0 in a DICOM file, which makes all pixels equal")
        stored_bits = int(file.BitsStored)
        highest = int(file.get("HighBit", stored_bits - 1))
        if highest != stored_bits - 1:
            raise ValueError(f"{stored_bits} bits up to bit {highest} of a DICOM file: write them as its lowest bits")
        _check_coding(file, width * height * int(file.SamplesPerPixel) * bits // 8)
    rescaled = color in _GRAYS and rescale != (1, 0)
    signed = bool(file.PixelRepresentation)
    deep = bits > 8 or signed or rescaled

    def read() -> np.ndarray:
        with _quiet():
            stored = np.array(file.pixel_array)
        if color == "MONOCHROME1":
            stored = black_first(stored, stored_bits, signed)
        return _rescaled(stored, *rescale) if rescaled else spread(stored, stored_bits)

    return Raster("DICOM", width, height, int(file.SamplesPerPixel), deep, read)


def _transforms(file: Any) -> list[Any]:
    """Datasets that may hold slope and intercept: of the frame, of all frames, and the file itself."""
    groups = (file.get(name) or () for name in ("PerFrameFunctionalGroupsSequence", "SharedFunctionalGroupsSequence"))
    items = (item.get("PixelValueTransformationSequence") or () for group in groups for item in group[:1])
    return [*(dataset for sequence in items for dataset in sequence[:1]), file]


def _number(datasets: list[Any], name: str, default: float) -> float:
    """First number called `name` in the datasets that is not empty, or `default`."""
    values = (dataset.get(name) for dataset in datasets)
    return next((float(value) for value in values if value not in (None, "")), default)


def _is_dicom(data: bytes) -> bool:
    """Whether a file is DICOM: it has the preamble, or its first element is of group 2 or 8 and of a fitting type."""
    if data[128:132] == b"DICM":
        return True
    return data[:2] in (b"\2\0", b"\x08\0") and data[3:4] == b"\0" and (data[4:6] in _TYPES or data[5:8] == bytes(3))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence pydicom: our errors say in one line what is wrong."""
    logging.getLogger("pydicom").setLevel(logging.CRITICAL + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _rescaled(stored: np.ndarray, slope: float, intercept: float) -> np.ndarray:
    """Rescaled values, int32 or float32. Raises ValueError for values beyond int32."""
    if not (slope.is_integer() and intercept.is_integer()):
        return (stored * slope + intercept).astype(np.float32)
    values = stored.astype(np.int64) * int(slope) + int(intercept)
    if values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
        raise ValueError("values that 32 bits can't hold")
    return values.astype(np.int32)


def _check_coding(file: Any, size: int) -> None:
    """Raises ValueError for compressed pixels, `size` bytes once decoded, that can't be decoded safely."""
    from pydicom.encaps import generate_frames
    from pydicom.pixels import get_decoder

    syntax = file.file_meta.TransferSyntaxUID
    if not syntax.is_compressed:
        return
    if not get_decoder(syntax).is_available:
        raise ValueError(f"pixels as {syntax.name}: install a decoder for pydicom (pylibjpeg), or uncompress the files")
    if len(file.PixelData) > 2 * size + _SPARE:
        raise ValueError(f"{len(file.PixelData)} compressed bytes for {size} of pixels")
    frame = next(generate_frames(file.PixelData, number_of_frames=1))
    try:
        with Image.open(io.BytesIO(frame), formats=["JPEG", "JPEG2000"]) as image:
            if image.size != (file.Columns, file.Rows):
                raise ValueError(f"a frame of {image.size} pixels, and the header says others")
    except Image.UnidentifiedImageError:
        pass  # run-length encoding, or a kind of JPEG that Pillow doesn't know


DICOM = Format("DICOM", (".dcm", ".dicom", ".ima"), _is_dicom, _open)

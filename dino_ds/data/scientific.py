"""Readers of image files that Pillow can't read in full: NumPy arrays, TIFFs with more bands than colors or numbers of
any type, and DICOM files with one frame."""

from __future__ import annotations

import io
import itertools
import logging
import math
import re
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image, ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from dino_ds.data.images import PHOTOMETRIC, PILLOW, black_first, is_deep, reads_all_bits, reads_as_stored

EXTRA = "pip install 'dino_ds[images]'"
_BIG_ENDIAN_BIGTIFF = b"MM\0+"
_MARKS = (b"II*\0", b"MM\0*", b"II+\0", _BIG_ENDIAN_BIGTIFF)  # first bytes of TIFF files; the last two are BigTIFF's
_SUBFILE, _COMPRESSION, _ORIENTATION, _SAMPLES, _PLANES, _NODATA = 254, 259, 274, 277, 284, 42113
_BYTES, _TILE_WIDTH, _TILE_LENGTH = 279, 322, 323
_REDUCED_OR_MASK = 0b101
_GRAY, _GRAY_OR_RGB, _CMYK, _YCBCR = (0, 1), (0, 1, 2), 5, 6
_AXES, _MOST_PAGES = ("YX", "YXS", "SYX"), 10_000
_CODECS = {5: "LZW", 8: "deflate", 32773: "PackBits", 32946: "deflate", 34925: "LZMA", 50000: "zstd"}
"""Compressions whose decoders limit their output."""
_DEPTH_OR_TIME = re.compile(r"""\b(slices|frames)=(?!1\b)\d|\bSize[ZT]="(?!1")\d|"axes": "[^"]*[ZT]""")
"""Descriptions by ImageJ, OME and tifffile of pages that are slices of a volume or frames of a film."""
_CHANNELS = re.compile(r"""\bchannels=(?!1\b)\d|\bSizeC="(?!1")\d|"axes": "[^"]*C""")
"""Descriptions by the same programs of pages that are channels."""
_COLORS = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_RCT", "YBR_ICT")
_GRAYS = ("MONOCHROME1", "MONOCHROME2")
_TAGS = (
    "Rows", "Columns", "SamplesPerPixel", "NumberOfFrames", "PhotometricInterpretation", "PlanarConfiguration",
    "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "RescaleSlope", "RescaleIntercept",
    "ModalityLUTSequence", "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence",
    "ExtendedOffsetTable", "ExtendedOffsetTableLengths", "PixelData",
)  # fmt: skip
_TYPES = (b"UL", b"OB", b"UI", b"CS", b"DA", b"SH", b"LO")  # value representations that a file's first element may have


@dataclass(frozen=True)
class Raster:
    """An image file whose header has been read."""

    format: str
    width: int  # pixels of the stored image, before `orientation` is applied; so is `height`
    height: int
    channels: int
    deep: bool  # whether values are not uint8
    read: Callable[[], np.ndarray]
    """Returns (height, width), or (height, width, channels); raises any Exception for a damaged file."""
    orientation: int = 1  # value of the EXIF tag
    nodata: str | None = None  # number that marks pixels without a value, as GDAL writes it
    pages: int = 1
    """Number of pages taken as channels though the file does not call them so: they may be slices of a volume."""

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

    name: str  # name of the format, which its `Raster.format` repeats
    endings: tuple[str, ...]  # endings of file names, the usual one first
    is_kind_of: Callable[[bytes], bool]  # whether a file is of this kind, by its content
    open: Callable[[bytes, int | None], Raster | ImageFile.ImageFile]
    """Reads the header of a file, for a number of channels (None = all); returns Pillow's image if Pillow can read all
    of it. Raises any Exception for a damaged file."""


def check_type(dtype: np.dtype) -> None:
    """Raises ValueError for a type other than integers and floats of at most 64 bits."""
    if dtype.kind not in "uif" or dtype.itemsize > 8:
        raise ValueError(f"values of type {dtype}: save them as integers or floats")


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
    axis = None
    if len(shape) == 3:
        axis = 2 if min(shape) == shape[2] < min(shape[:2]) else 0
        if axis == 0 and not min(shape) == shape[0] < min(shape[1:]):
            wanted_axis = "bands must be the first or the last axis, and fewer than the pixels of either side"
            raise ValueError(f"{' x '.join(map(str, shape))}: {wanted_axis}")
    height, width = (side for number, side in enumerate(shape) if number != axis)
    channels = 1 if axis is None else shape[axis]
    return Raster("NPY", width, height, channels, array.dtype != np.uint8, lambda: bands_last(array, axis))


NPY = Format("NPY", (".npy",), lambda data: data.startswith(b"\x93NUMPY"), _open_npy)


def _open_tiff(data: bytes, wanted: int | None) -> Raster | TiffImageFile:
    """Open a file by Pillow if that reads all `wanted` channels (None = all), else by tifffile its bands: the first
    page, or all pages if they are gray. Reduced pages and masks do not count."""
    if image := _open_by_pillow(data, wanted):
        return image
    import tifffile

    logging.getLogger("tifffile").setLevel(logging.CRITICAL + 1)  # our error says it in one line
    # Microscopes' metadata, which such flags would switch on, may claim lists that take all memory.
    flags = (f"is_{name}" for name in tifffile.TIFF.FILE_FLAGS)
    known = {flag: getattr(tifffile.TiffFile, flag, None) for flag in flags}
    # Some are read-only properties: is_sis in 2025, is_motic in 2026.
    off: dict[str, Any] = {flag: False for flag, known_as in known.items() if getattr(known_as, "fset", True)}
    file = tifffile.TiffFile(io.BytesIO(data), **off)
    bands = _find_bands(data, file, wanted)
    page = bands[0]
    by_pillow = len(bands) == 1 and (page.index == 0 or page.photometric not in _GRAY_OR_RGB)
    if by_pillow and (image := _open_by_pillow(data, wanted, page.index)):
        return image
    if page.photometric not in _GRAY_OR_RGB and (page.photometric != _CMYK or page.samplesperpixel != wanted):
        color = getattr(page.photometric, "name", page.photometric)
        raise ValueError(f"colors as {color} of {page.bitspersample} bits are not converted: write RGB or gray")
    check_type(page.dtype)
    for band in bands:  # its strips or tiles must be safe to decode, and all of them there
        _check_tile(math.prod(band.chunks), math.prod(band.shape))
        if band.compression not in (1, *_CODECS):
            raise ValueError(f"compression {band.compression} of bands is not read: write LZW, deflate or zstd")
        if band.compression != 1 and find_spec("imagecodecs") is None:
            raise ValueError(f"bands compressed by {_CODECS[band.compression]} need imagecodecs: {EXTRA}")
        parts = list(zip(band.dataoffsets, band.databytecounts, strict=True))
        # tifffile fills missing parts with zeros.
        if len(parts) < math.prod(band.chunked) or any(begin + size > len(data) for begin, size in parts):
            raise ValueError("cut off")

    def read() -> np.ndarray:
        stored, bits = [page.asarray(maxworkers=1) for page in bands], int(page.bitspersample)
        values = stored[0] if len(stored) == 1 else np.stack(stored, axis=-1)
        if page.photometric == tifffile.PHOTOMETRIC.MINISWHITE:
            values = black_first(values, bits)
        return bands_last(spread(values, bits), 0 if page.axes == "SYX" else None)

    channels, orientation = len(bands) * page.samplesperpixel, page.tags.valueof(_ORIENTATION)
    width, height, deep = page.imagewidth, page.imagelength, page.dtype != np.uint8
    pages = 1 if _CHANNELS.search(page.description) else len(bands)
    return Raster("TIFF", width, height, channels, deep, read, orientation or 1, page.tags.valueof(_NODATA), pages)


def _open_by_pillow(data: bytes, wanted: int | None, page: int | None = None) -> TiffImageFile | None:
    """Open by Pillow if that reads all values of the only page, or of `page`, and all `wanted` channels; else None."""
    if data.startswith(_BIG_ENDIAN_BIGTIFF):
        return None  # Pillow reads its header as that of a plain TIFF, and warns of what it finds there
    try:
        image = Image.open(io.BytesIO(data), formats=["TIFF"])
        assert isinstance(image, TiffImageFile)
        image.seek(page or 0)
    except (Image.UnidentifiedImageError, SyntaxError):
        return None
    tags, bands = image.tag_v2, len(image.getbands())
    samples, color, planes = tags.get(_SAMPLES, 1), tags.get(PHOTOMETRIC), tags.get(_PLANES, 1)
    if tags.get(_SUBFILE, 0) & _REDUCED_OR_MASK or (tags.next and page is None):
        return None
    _check_tile(tags.get(_TILE_WIDTH, 0) * tags.get(_TILE_LENGTH, 0) * bands, image.width * image.height * bands)
    if samples > bands or (samples == wanted and samples not in (1, 3)) or not reads_as_stored(image):
        return None
    if planes != 1 and (color == _YCBCR or image.mode in ("LA", "La")):
        return None  # Pillow returns one plane twice, or none
    is_subsampled = sum(tags.get(_BYTES, ())) < 3 * image.width * image.height
    if color == _YCBCR and tags.get(_COMPRESSION, 1) == 1 and is_subsampled:
        return None  # Pillow takes subsampled colors for pixels
    return image if not is_deep(image, data) or reads_all_bits(image) else None


def check_nodata(image: Raster | ImageFile.ImageFile, values: np.ndarray) -> None:
    """Raises ValueError for pixels with GDAL's number for no data, outside the range of all other pixels."""
    text = image.nodata if isinstance(image, Raster) else getattr(image, "tag_v2", {}).get(_NODATA)
    try:
        number = float(str(text).strip("\0 "))
    except ValueError:
        return
    with np.errstate(over="ignore"):
        empty = np.isnan(values) if math.isnan(number) else values == number
    if number == 0 or not empty.any():
        return
    others = values[~empty]
    if not others.size or not others.min() <= number <= others.max():
        raise ValueError(f"{int(empty.sum())} values without data (GDAL's nodata {number:g}): fill or cut them")


def note_stacks(names: Sequence[str]) -> list[str]:
    """A note on images of three gray pages that are taken for colors."""
    said = f"{len(names)} images looked at have three gray pages, which are taken as three channels, such as"
    return [f"{said} {names[0]}: slices of a volume write as one image a file"] if names else []


def _find_bands(data: bytes, file: Any, wanted: int | None) -> list[Any]:
    """The page of the image, or its gray bands. Raises ValueError for pages that may be something else."""
    pages, form = list(itertools.islice(file.pages, _MOST_PAGES)), file.tiff
    tags = struct.unpack_from(form.tagnoformat, data, pages[-1].offset)[0]
    if struct.unpack_from(form.offsetformat, data, pages[-1].offset + form.tagnosize + tags * form.tagsize)[0]:
        raise ValueError("cut off" if len(pages) < _MOST_PAGES else f"more than {_MOST_PAGES:,} pages")
    whole = [page for page in pages if not (page.is_reduced or page.is_mask)]
    if not whole:
        raise ValueError("a TIFF without an image")
    page = whole[0]
    bands = whole if page.axes == "YX" and page.photometric in _GRAY else whole[:1]
    alike = page.axes in _AXES and len({(page.axes, page.shape, page.dtype) for page in whole}) == 1
    other_axis = len(bands) > 1 and _DEPTH_OR_TIME.search(page.description)
    if not alike or other_axis or (len(bands) > 1 and wanted not in (None, len(bands))):
        there = f"{len(whole)} pages, the first of {page.imagewidth} x {page.imagelength} pixels"
        remedy = "bands write as (h, w, c) by tifffile.imwrite with planarconfig='contig', or set model.in_chans to "
        remedy += "the number of pages of one shape"
        raise ValueError(f"{there}: of a volume or film write one image a file; {remedy}")
    return bands


def _check_tile(tile: int, values: int) -> None:
    """Raises ValueError for tiles far larger than the image: decoders allocate whole tiles."""
    if tile > max(4 * values, 1 << 24):
        raise ValueError(f"tiles of {tile} values in an image of {values}")


TIFF = Format("TIFF", PILLOW["TIFF"], lambda data: data.startswith(_MARKS), _open_tiff)


def _open_dicom(data: bytes, wanted: int | None) -> Raster:
    """Open a DICOM file: gray values times the rescale slope plus the intercept, MONOCHROME1 inverted; or RGB. Integers
    stay integers if slope and intercept are; unscaled values of fewer than 8 bits become 0 to 255."""
    try:
        import pydicom
    except ImportError:
        raise ValueError(f"DICOM files need pydicom: {EXTRA}") from None
    if b"1.2.840.10008.1.2.1.99" in data:  # pydicom would inflate it without a limit
        raise ValueError("a deflated DICOM file: write it uncompressed")
    with _quiet():
        file = pydicom.dcmread(io.BytesIO(data), specific_tags=list(_TAGS), force=True)
        if "TransferSyntaxUID" not in file.file_meta:  # as in files without a header, which are not compressed
            explicit = "" if file.original_encoding[0] else ".1"
            file.file_meta.TransferSyntaxUID = pydicom.uid.UID(f"1.2.840.10008.1.2{explicit}")
        frames, color = int(file.get("NumberOfFrames") or 1), str(file.get("PhotometricInterpretation"))
        if "PixelData" not in file:
            raise ValueError("a DICOM file without an image")
        if frames > 1:
            raise ValueError(f"{frames} frames in one DICOM file: write one frame a file")
        # Slope and intercept may be those of the frame, of all frames, or of the file itself.
        groups = (file.get(f"{name}FunctionalGroupsSequence") or () for name in ("PerFrame", "Shared"))
        items = (item.get("PixelValueTransformationSequence") or () for group in groups for item in group[:1])
        transforms = [*(dataset for sequence in items for dataset in sequence[:1]), file]
        if color not in _COLORS + _GRAYS or any(dataset.get("ModalityLUTSequence") for dataset in transforms):
            problem = "a modality LUT" if color in _GRAYS else f"colors as {color}"
            raise ValueError(f"{problem} in a DICOM file: apply it, and write MONOCHROME2 or RGB")
        width, height, bits = (int(file[name].value) for name in ("Columns", "Rows", "BitsAllocated"))
        rescale = _number(transforms, "RescaleSlope", 1.0), _number(transforms, "RescaleIntercept", 0.0)
        if not rescale[0]:
            raise ValueError("a rescale slope of 0 in a DICOM file, which makes all pixels equal")
        stored_bits = int(file.BitsStored)
        if (highest := int(file.get("HighBit", stored_bits - 1))) != stored_bits - 1:
            raise ValueError(f"{stored_bits} bits up to bit {highest} of a DICOM file: write them as its lowest bits")
        _check_coding(file, width * height * int(file.SamplesPerPixel) * bits // 8)
    rescaled, signed = color in _GRAYS and rescale != (1, 0), bool(file.PixelRepresentation)

    def read() -> np.ndarray:
        with _quiet():
            stored = np.array(file.pixel_array)
        if color == "MONOCHROME1":
            stored = black_first(stored, stored_bits, signed)
        return _rescaled(stored, *rescale) if rescaled else spread(stored, stored_bits)

    return Raster("DICOM", width, height, int(file.SamplesPerPixel), bits > 8 or signed or rescaled, read)


def _number(datasets: list[Any], name: str, default: float) -> float:
    """First number called `name` in the datasets that is not empty, or `default`."""
    values = (dataset.get(name) for dataset in datasets)
    return next((float(value) for value in values if value not in (None, "")), default)


def _is_dicom(data: bytes) -> bool:
    """Whether a file is DICOM: it has the preamble, or its first element is of group 2 or 8 and of a fitting type."""
    fits = data[4:6] in _TYPES or data[5:8] == bytes(3)
    return data[128:132] == b"DICM" or (data[:2] in (b"\2\0", b"\x08\0") and data[3:4] == b"\0" and fits)


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
    if len(file.PixelData) > 2 * size + (1 << 16):
        raise ValueError(f"{len(file.PixelData)} compressed bytes for {size} of pixels")
    frame = next(generate_frames(file.PixelData, number_of_frames=1))
    with suppress(Image.UnidentifiedImageError):  # run-length encoding, or a kind of JPEG that Pillow doesn't know
        image = Image.open(io.BytesIO(frame), formats=["JPEG", "JPEG2000"])
        if image.size != (file.Columns, file.Rows):
            raise ValueError(f"a frame of {image.size} pixels, and the header says others")


DICOM = Format("DICOM", (".dcm", ".dicom", ".ima"), _is_dicom, _open_dicom)

"""Reader of TIFFs that Pillow can't read in full: more bands than colors, pages that are bands, numbers of any type."""

from __future__ import annotations

import io
import itertools
import logging
import math
import re
import struct
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image, ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from dino_ds.data.images import (
    PHOTOMETRIC,
    PILLOW,
    WHITE_IS_ZERO,
    black_first,
    is_deep,
    reads_all_bits,
    reads_as_stored,
)
from dino_ds.data.raster import EXTRA, Format, Raster, bands_last, check_type, spread

_BIG_ENDIAN_BIGTIFF = b"MM\0+"
_MARKS = (b"II*\0", b"MM\0*", b"II+\0", _BIG_ENDIAN_BIGTIFF)
"""First bytes of TIFF files; the last two are BigTIFF's."""
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
"""Those of pages that are channels."""


def _open(data: bytes, wanted: int | None) -> Raster | TiffImageFile:
    """Open the bands of a file, for `wanted` channels (None = all); by Pillow if it reads all of them.

    Reduced pages and masks aside, the image is the first page, or all gray pages if `wanted` is their number or None.
    Raises ValueError for other pages, colors and compressions, any Exception for damaged files.
    """
    if image := _open_by_pillow(data, wanted):
        return image
    import tifffile

    logging.getLogger("tifffile").setLevel(logging.CRITICAL + 1)  # our error says it in one line
    # Microscopes' metadata, which such flags would switch on, may claim lists that take all memory.
    flags = (f"is_{name}" for name in tifffile.TIFF.FILE_FLAGS)
    off: dict[str, Any] = {flag: False for flag in flags if _can_be_set(tifffile.TiffFile, flag)}
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
    _check_parts(bands, len(data))

    def read() -> np.ndarray:
        stored, bits = [page.asarray(maxworkers=1) for page in bands], int(page.bitspersample)
        values = stored[0] if len(stored) == 1 else np.stack(stored, axis=-1)
        values = spread(black_first(values, bits) if page.photometric == WHITE_IS_ZERO else values, bits)
        return bands_last(values, 0 if page.axes == "SYX" else None)

    channels, orientation = len(bands) * page.samplesperpixel, page.tags.valueof(_ORIENTATION)
    width, height, deep = page.imagewidth, page.imagelength, page.dtype != np.uint8
    pages = 1 if _CHANNELS.search(page.description) else len(bands)
    return Raster("TIFF", width, height, channels, deep, read, orientation or 1, page.tags.valueof(_NODATA), pages)


def _can_be_set(file: type, flag: str) -> bool:
    """Whether tifffile accepts a flag: some are read-only properties, is_sis in 2025, is_motic in 2026."""
    attribute = getattr(file, flag, None)
    return not isinstance(attribute, property) or attribute.fset is not None


def _open_by_pillow(data: bytes, wanted: int | None, page: int | None = None) -> TiffImageFile | None:
    """Open by Pillow if that reads all values of the only page, or of `page`, and all `wanted` channels; else None.

    Raises ValueError for tiles that are too large.
    """
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
    pages = list(itertools.islice(file.pages, _MOST_PAGES))
    if _page_after(data, file.tiff, pages[-1].offset):
        raise ValueError("cut off" if len(pages) < _MOST_PAGES else f"more than {_MOST_PAGES:,} pages")
    whole = [page for page in pages if not (page.is_reduced or page.is_mask)]
    if not whole:
        raise ValueError("a TIFF without an image")
    page = whole[0]
    bands = whole if page.axes == "YX" and page.photometric in _GRAY else whole[:1]
    alike = page.axes in _AXES and len({(page.axes, page.shape, page.dtype) for page in whole}) == 1
    other_axis = len(bands) > 1 and _DEPTH_OR_TIME.search(page.description)
    if not alike or other_axis or (len(bands) > 1 and wanted not in (None, len(bands))):
        raise ValueError(
            f"{len(whole)} pages, the first of {page.imagewidth} x {page.imagelength} pixels: of a volume or film "
            "write one image a file; bands write as (h, w, c) by tifffile.imwrite with planarconfig='contig', or set "
            "model.in_chans to the number of pages of one shape"
        )
    return bands


def _page_after(data: bytes, form: Any, page: int) -> int:
    """Offset of the page after the page at `page`; 0 for none."""
    tags = struct.unpack_from(form.tagnoformat, data, page)[0]
    offset: int = struct.unpack_from(form.offsetformat, data, page + form.tagnosize + tags * form.tagsize)[0]
    return offset


def _check_parts(pages: list[Any], there: int) -> None:
    """Raises ValueError for strips or tiles that can't be decoded safely, are missing, or lie outside the file."""
    for page in pages:
        _check_tile(math.prod(page.chunks), math.prod(page.shape))
        if page.compression not in (1, *_CODECS):
            raise ValueError(f"compression {page.compression} of bands is not read: write LZW, deflate or zstd")
        if page.compression != 1 and find_spec("imagecodecs") is None:
            raise ValueError(f"bands compressed by {_CODECS[page.compression]} need imagecodecs: {EXTRA}")
        parts = list(zip(page.dataoffsets, page.databytecounts, strict=True))
        # tifffile fills missing parts with zeros.
        if len(parts) < math.prod(page.chunked) or any(begin + size > there for begin, size in parts):
            raise ValueError("cut off")


def _check_tile(tile: int, values: int) -> None:
    """Raises ValueError for tiles far larger than the image: decoders allocate whole tiles."""
    if tile > max(4 * values, 1 << 24):
        raise ValueError(f"tiles of {tile} values in an image of {values}")


TIFF = Format("TIFF", PILLOW["TIFF"], lambda data: data.startswith(_MARKS), _open)

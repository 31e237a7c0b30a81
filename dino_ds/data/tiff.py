"""Reader of TIFFs that Pillow can't read in full: more bands than colors, pages that are bands, numbers of any type."""

from __future__ import annotations

import io
import logging
import math
import re
import struct
from contextlib import suppress
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
_SAMPLES, _TILE_WIDTH, _TILE_LENGTH = 277, 322, 323
_NEW_SUBFILE, _OLD_SUBFILE, _WIDTH, _LENGTH, _COMPRESSION, _PLANES = 254, 255, 256, 257, 259, 284
_ORIENTATION, _SUBIFDS, _SUBSAMPLING, _NODATA = 274, 330, 530, 42113
_REDUCED_OR_MASK, _OLD_REDUCED, _FAR_LARGER = 0b101, 2, 4
_YCBCR = 6
_STORED_COLORS = (0, 1, 2, 5)
"""Gray, RGB and inks: colors that are read as stored where Pillow doesn't convert them."""
_MOST_PAGES = 10_000
_GRAY_OR_RGB = (0, 1, 2)
_METADATA = {"shaped", "imagej"}
"""Kinds of description whose page axes are trusted: tifffile's own, ImageJ's."""
_CODECS = {5: "LZW", 8: "deflate", 32773: "PackBits", 32946: "deflate", 34925: "LZMA", 50000: "zstd"}
"""Compressions whose decoders limit their output."""
_NAMED, _UNNAMED = "SC", "QI"
"""Axes of bands: samples and channels, and pages of unknown meaning."""


def _open(data: bytes, wanted: int | None) -> Raster | TiffImageFile:
    """Open the bands of a file, for `wanted` channels (None = all); by Pillow if it reads all of them as RGB or gray.

    Pages of one shape are bands if `wanted` is their number or None, thumbnails and overviews aside. Raises ValueError
    for volumes and films, pages of several shapes and unknown compressions, any Exception for damaged files.
    """
    if image := _open_by_pillow(data, wanted):
        return image
    import tifffile

    logging.getLogger("tifffile").setLevel(logging.CRITICAL + 1)  # our error says it in one line
    # Other kinds of description may name other files, or sizes of lists that take all memory.
    flags = (f"is_{name}" for name in tifffile.TIFF.FILE_FLAGS - _METADATA)
    others: dict[str, Any] = {flag: False for flag in flags if _can_be_set(tifffile.TiffFile, flag)}
    file = tifffile.TiffFile(io.BytesIO(data), **others)
    _check_pages(data, file)
    series = _only_series(file)
    if _page_after(data, file.tiff, file.pages[-1].offset):  # no page could be read there
        raise ValueError("cut off")
    page, shape, axes = series.keyframe, tuple(series.shape), series.axes
    if (len(shape), page.samplesperpixel, page.index) == (2, 1, 0):
        image = _open_by_pillow(data, wanted, first_page=True)
        if image is not None:
            return image
    if page.photometric not in _STORED_COLORS:
        color = getattr(page.photometric, "name", page.photometric)
        raise ValueError(f"colors as {color} of {page.bitspersample} bits are not converted: write RGB or gray")
    kept = [i for i, axis in enumerate(axes) if shape[i] > 1 or axis in "YX"]
    sides, names = tuple(shape[i] for i in kept), "".join(axes[i] for i in kept)
    axis = _axis(names, sides, wanted)
    check_type(series.dtype)
    if page.compression != 1:
        _check_codec(int(page.compression))
    _check_parts(series, len(data), math.prod(sides))

    def read() -> np.ndarray:
        values, bits = series.asarray(maxworkers=1), int(page.bitspersample)
        values = spread(black_first(values, bits) if page.photometric == WHITE_IS_ZERO else values, bits)
        return bands_last(values.reshape(sides), axis)

    height, width = (sides[names.index(side)] for side in "YX")
    orientation, nodata = (page.tags.valueof(tag) for tag in (_ORIENTATION, _NODATA))
    channels = 1 if axis is None else sides[axis]
    return Raster("TIFF", width, height, channels, series.dtype != np.uint8, read, orientation or 1, nodata)


def _can_be_set(file: type, flag: str) -> bool:
    """Whether tifffile accepts a flag: some are read-only properties, is_sis in 2025, is_motic in 2026."""
    attribute = getattr(file, flag, None)
    return not isinstance(attribute, property) or attribute.fset is not None


def _open_by_pillow(data: bytes, wanted: int | None, first_page: bool = False) -> TiffImageFile | None:
    """Open by Pillow if that reads all values of the file, or of its first page, and all `wanted` channels; else None.

    Raises ValueError for tiles that are too large, and for colors that are not converted.
    """
    if data.startswith(_BIG_ENDIAN_BIGTIFF):
        return None  # Pillow reads its header as that of a plain TIFF, and warns of what it finds there
    try:
        image = Image.open(io.BytesIO(data), formats=["TIFF"])
        assert isinstance(image, TiffImageFile)
        several = bool(image.tag_v2.next)
        if _is_reduced_or_mask(image.tag_v2) or (several and not _is_gray(image)):
            image.seek(_whole_page(data))
        if _is_gray(image) and several and not first_page:
            return None
    except (Image.UnidentifiedImageError, SyntaxError):
        return None
    tags, bands = image.tag_v2, len(image.getbands())
    samples, color = tags.get(_SAMPLES, 1), tags.get(PHOTOMETRIC)
    _check_tile(tags.get(_TILE_WIDTH, 0) * tags.get(_TILE_LENGTH, 0) * bands, image.width * image.height * bands)
    if samples > bands or (samples == wanted and samples not in (1, 3)) or not reads_as_stored(image):
        return None
    is_raw, planes = tags.get(_COMPRESSION, 1) == 1, tags.get(_PLANES, 1)
    if image.mode in ("LA", "La") and planes != 1:
        return None  # Pillow returns one plane twice, or none
    if color == _YCBCR and (planes != 1 or (is_raw and tags.get(_SUBSAMPLING, (1, 1)) != (1, 1))):
        raise ValueError("colors as YCbCr, subsampled or plane after plane, are not read: write RGB")
    return image if not is_deep(image, data) or reads_all_bits(image) or color not in _GRAY_OR_RGB else None


def _whole_page(data: bytes) -> int:
    """Number of the image's page: the first that is neither a reduced image nor a mask.

    Raises ValueError if that page is far smaller than another, or the image is only in a SubIFD.
    """
    image: Any = Image.open(io.BytesIO(data), formats=["TIFF"])
    sizes, whole = list[int](), list[int]()
    for number in range(_MOST_PAGES):
        try:
            with suppress(SyntaxError):  # Pillow may not know the mode, but has read the tags
                image.seek(number)
        except Exception:  # the end, or damage behind the last page
            break
        tags = image.tag_v2
        sizes.append(tags.get(_WIDTH, 0) * tags.get(_LENGTH, 0))
        if not _is_reduced_or_mask(tags):
            whole.append(number)
    if not whole and _SUBIFDS in image.tag_v2:
        raise ValueError("only a reduced image on its pages: write the whole one, of a SubIFD, as a page")
    largest = max(whole or range(len(sizes)), key=lambda number: sizes[number])
    if whole and sizes[largest] >= _FAR_LARGER * sizes[whole[0]]:
        raise ValueError("its first page is far smaller than another, but not marked as reduced: write one a file")
    return whole[0] if whole else largest


def _is_gray(image: Image.Image) -> bool:
    return len(image.getbands()) == 1 and image.mode != "P"


def _is_reduced_or_mask(tags: Any) -> bool:
    return bool(tags.get(_NEW_SUBFILE, 0) & _REDUCED_OR_MASK) or tags.get(_OLD_SUBFILE) == _OLD_REDUCED


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


def _check_pages(data: bytes, tif: Any) -> None:
    """Raises ValueError for too many pages, or pages in a circle, which tifffile would follow without end."""
    offset, seen = tif.pages.first.offset, set[int]()
    while offset and offset < len(data):
        if offset in seen or len(seen) == _MOST_PAGES:
            raise ValueError("its pages lie in a circle" if offset in seen else f"more than {_MOST_PAGES:,} pages")
        seen.add(offset)
        try:
            offset = _page_after(data, tif.tiff, offset)
        except struct.error:
            raise ValueError("cut off") from None


def _page_after(data: bytes, form: Any, page: int) -> int:
    """Offset of the page after the page at `page`; 0 for none. Raises struct.error beyond the end."""
    tags = struct.unpack_from(form.tagnoformat, data, page)[0]
    offset: int = struct.unpack_from(form.offsetformat, data, page + form.tagnosize + tags * form.tagsize)[0]
    return offset


def _only_series(tif: Any) -> Any:
    """The pages that form the image. Raises ValueError for several images, or slices of a volume."""
    whole = [s for s in tif.series if not (s.keyframe.is_reduced or s.keyframe.is_mask)] or tif.series[:1]
    if not whole:
        raise ValueError("a TIFF without an image")
    if len(whole) > 1:
        raise ValueError(f"pages of {len(whole)} shapes or types in one file: write one image a file")
    if re.search(r'<Pixels[^>]* Size[ZT]="0*([2-9]|[1-9]\d)', whole[0].keyframe.description):
        raise ValueError("an OME volume or film: write one image a file, its bands in the axis C")
    return whole[0]


def _axis(names: str, sides: tuple[int, ...], wanted: int | None) -> int | None:
    """Axis of the bands, None for one band. Raises ValueError for (possible) volumes and films."""
    rest = names.replace("Y", "").replace("X", "")
    if len(names) - len(rest) != 2 or len(rest) > 1 or rest not in _NAMED + _UNNAMED:
        text = " x ".join(map(str, sides))
        raise ValueError(f"{text}, axes {names}: a volume, a film or several images; write one image a file")
    if not rest:
        return None
    axis = names.index(rest)
    bands, (height, width) = sides[axis], sides[:axis] + sides[axis + 1 :]
    fits = bands < min(height, width)
    if rest in _UNNAMED and not (fits and wanted in (None, bands)):
        raise ValueError(
            f"{bands} pages of {width} x {height} pixels: of a volume or film write one image a file; bands write as "
            f"(h, w, c) by tifffile.imwrite with planarconfig='contig'{f', or set model.in_chans {bands}' * fits}"
        )
    return axis


def _check_codec(compression: int) -> None:
    if compression not in _CODECS:
        raise ValueError(f"bands of compression {compression} are not read: write them with LZW, deflate or zstd")
    if find_spec("imagecodecs") is None:
        raise ValueError(f"bands compressed by {_CODECS[compression]} need imagecodecs: {EXTRA}")


def _check_tile(tile: int, values: int) -> None:
    """Raises ValueError for tiles far larger than the image: decoders allocate whole tiles."""
    if tile > max(4 * values, 1 << 24):
        raise ValueError(f"tiles of {tile} values in an image of {values}")


def _check_parts(series: Any, there: int, values: int) -> None:
    """Raises ValueError for strips or tiles that are too large, missing, or outside the file."""
    _check_tile(math.prod(series.keyframe.chunks), values)
    wanted = math.prod(series.keyframe.chunked)
    for page in series.pages:
        parts = list(zip(page.dataoffsets, page.databytecounts, strict=True))
        # tifffile fills missing parts with zeros.
        if len(parts) < wanted or any(begin + size > there for begin, size in parts):
            raise ValueError("cut off")


TIFF = Format("TIFF", PILLOW["TIFF"], lambda data: data.startswith(_MARKS), _open)

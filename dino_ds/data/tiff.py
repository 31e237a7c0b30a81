"""TIFFs that Pillow can't read whole: more bands than colors, pages that are bands, numbers of any type."""

from __future__ import annotations

import io
import logging
import math
import re
import struct
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image

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
"""The first bytes of a file, the last two of a BigTIFF."""
_SAMPLES, _TILE_WIDTH, _TILE_LENGTH = 277, 322, 323
_MOST_PAGES = 10_000
_GREY_OR_RGB = (0, 1, 2)
_METADATA = {"shaped", "imagej"}
"""Kinds of description that are believed to say what pages are: tifffile's own, ImageJ's."""
_CODECS = {5: "LZW", 8: "deflate", 32773: "PackBits", 32946: "deflate", 34925: "LZMA", 50000: "zstd"}
"""Compressions whose decoders are told how much they may give."""
_NAMED, _UNNAMED = "SC", "QI"
"""Axes of bands: samples and channels, and pages of which the file doesn't say what they are."""


def _open(data: bytes, wanted: int | None) -> Raster | None:
    """The bands of a file as they are stored, of which `wanted` are used (or None for all there are); None if Pillow
    reads all of it, as RGB or gray.

    Pages of one shape are bands where so many are wanted; thumbnails and overviews don't count. Raises ValueError for
    volumes and films, for pages of several shapes, for compressions that are not known, and any Exception for broken
    files.
    """
    if _is_rgb_or_grey(data, wanted):
        return None
    import tifffile

    logging.getLogger("tifffile").setLevel(logging.CRITICAL + 1)  # our error says it in one line
    # Other kinds may name other files, or sizes of lists that take all memory.
    flags = (f"is_{name}" for name in tifffile.TIFF.FILE_FLAGS - _METADATA)
    others: dict[str, Any] = {flag: False for flag in flags if _can_be_set(tifffile.TiffFile, flag)}
    file = tifffile.TiffFile(io.BytesIO(data), **others)
    _check_pages(data, file)
    series = _only_series(file)
    if _page_after(data, file.tiff, file.pages[-1].offset):  # no page could be read there
        raise ValueError("cut off")
    page, shape, axes = series.keyframe, tuple(series.shape), series.axes
    if (len(shape), page.samplesperpixel, page.index) == (2, 1, 0) and _is_rgb_or_grey(data, wanted, first_page=True):
        return None
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
    tag = page.tags.get("Orientation")
    channels = 1 if axis is None else sides[axis]
    return Raster("TIFF", width, height, channels, series.dtype != np.uint8, read, 1 if tag is None else tag.value)


def _can_be_set(file: type, flag: str) -> bool:
    """Whether tifffile takes a flag: some are properties that nobody can set, is_sis in 2025, is_motic in 2026."""
    found = getattr(file, flag, None)
    return not isinstance(found, property) or found.fset is not None


def _is_rgb_or_grey(data: bytes, wanted: int | None, first_page: bool = False) -> bool:
    """Whether Pillow gives all values of a file, or of its first page, and `wanted` doesn't ask for more of them."""
    if data.startswith(_BIG_ENDIAN_BIGTIFF):
        return False  # Pillow reads its header as that of a plain TIFF, and warns of what it finds there
    try:
        with Image.open(io.BytesIO(data), formats=["TIFF"]) as image:
            samples, bands = image.tag_v2.get(_SAMPLES, 1), len(image.getbands())
            tile = image.tag_v2.get(_TILE_WIDTH, 0) * image.tag_v2.get(_TILE_LENGTH, 0) * bands
            _check_tile(tile, image.width * image.height * bands)
            if samples > bands or (samples == wanted and samples not in (1, 3)) or not reads_as_stored(image):
                return False
            if bands == 1 and image.mode != "P" and image.tag_v2.next and not first_page:
                return False
            color = image.tag_v2.get(PHOTOMETRIC)
            return not is_deep(image, data) or reads_all_bits(image) or color not in _GREY_OR_RGB
    except Image.UnidentifiedImageError:
        return False


def _check_pages(data: bytes, tif: Any) -> None:
    """Raises ValueError for pages that follow each other in a circle or are too many: tifffile would go on."""
    place, seen = tif.pages.first.offset, set[int]()
    while place and place < len(data):
        if place in seen or len(seen) == _MOST_PAGES:
            raise ValueError("its pages lie in a circle" if place in seen else f"more than {_MOST_PAGES:,} pages")
        seen.add(place)
        try:
            place = _page_after(data, tif.tiff, place)
        except struct.error:
            raise ValueError("cut off") from None


def _page_after(data: bytes, form: Any, page: int) -> int:
    """Offset of the page after the one at `page`; 0 for none. Raises struct.error beyond the end."""
    tags = struct.unpack_from(form.tagnoformat, data, page)[0]
    place: int = struct.unpack_from(form.offsetformat, data, page + form.tagnosize + tags * form.tagsize)[0]
    return place


def _only_series(tif: Any) -> Any:
    """The pages that are one image. Raises ValueError where there are several, or slices of a volume."""
    series = tif.series
    whole = [one for one in series if not (one.keyframe.is_reduced or one.keyframe.is_mask)] or series[:1]
    if not whole:
        raise ValueError("a TIFF without an image")
    if len(whole) > 1:
        raise ValueError(f"pages of {len(whole)} shapes or types in one file: write one image a file")
    if re.search(r'<Pixels[^>]* Size[ZT]="0*([2-9]|[1-9]\d)', whole[0].keyframe.description):
        raise ValueError("an OME volume or film: write one image a file, its bands in the axis C")
    return whole[0]


def _axis(names: str, sides: tuple[int, ...], wanted: int | None) -> int | None:
    """The axis of the bands, or None if there is one. Raises ValueError where others lie behind each other, or may."""
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
    """Raises ValueError for tiles, whose memory decoders take whole, far larger than the image."""
    if tile > max(4 * values, 1 << 24):
        raise ValueError(f"tiles of {tile} values in an image of {values}")


def _check_parts(series: Any, there: int, values: int) -> None:
    """Raises ValueError where a strip or tile is larger than the image may be, is missing, or lies outside the file."""
    _check_tile(math.prod(series.keyframe.chunks), values)
    wanted = math.prod(series.keyframe.chunked)
    for page in series.pages:
        parts = list(zip(page.dataoffsets, page.databytecounts, strict=True))
        # tifffile makes zeros of those that aren't listed.
        if len(parts) < wanted or any(begin + size > there for begin, size in parts):
            raise ValueError("cut off")


TIFF = Format("TIFF", PILLOW["TIFF"], lambda data: data.startswith(_MARKS), _open)

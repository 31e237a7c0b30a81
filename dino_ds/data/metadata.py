"""Image files without what is not pixels: a text, a color profile or an EXIF block that is damaged or too large for
Pillow's limits must not cost the image."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_PNG, _PNG_PIXELS = b"\x89PNG\r\n\x1a\n", b"IHDR PLTE tRNS IDAT IEND acTL fcTL fdAT".split()
_WEBP_PIXELS = (b"VP8 ", b"VP8L", b"VP8X", b"ALPH", b"ANIM", b"ANMF")
_WEBP_FLAGS = 0b11010
"""Bits of VP8X: transparency, EXIF, animation."""
_JPEG_METADATA = {0xFE, *range(0xE2, 0xEE), 0xEF}
"""Markers of comments and applications; but for EXIF, and for JFIF and Adobe's, which say what the colors are."""
_JPEG_EXIF, _JPEG_SCAN = 0xE1, 0xDA
_TIFF_METADATA = {
    270, 271, 272, 285, 305, 306, 315, 316, 700, 33432, 33550, 33723, 33922, 34264, 34377, 34665, 34675, 34735, 34736,
    34737, 34853, 37724, 42112, 50838, 50839,
}  # fmt: skip
"""Tags of texts, places, color profiles and of what other programs keep."""
_TIFF_SIZES = {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
"""Bytes of a value by the number of its type; 1 for all others."""
_LARGE = 1 << 20


def without_metadata(data: bytes) -> Iterator[bytes]:
    """Versions of a PNG, JPEG, WebP or TIFF file with ever less in it that is not pixels: the first keeps its EXIF."""
    try:
        if data.startswith(_PNG):
            chunks = list(_png_chunks(data))
            for kept in ([*_PNG_PIXELS, b"eXIf"], _PNG_PIXELS):
                yield _PNG + b"".join(chunk for kind, chunk in chunks if kind in kept)
        elif data.startswith(b"\xff\xd8"):
            for dropped in (_JPEG_METADATA, _JPEG_METADATA | {_JPEG_EXIF}):
                yield b"\xff\xd8" + b"".join(part for marker, part in _jpeg_segments(data) if marker not in dropped)
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            for wanted in ((*_WEBP_PIXELS, b"EXIF"), _WEBP_PIXELS):
                parts = bytearray(b"".join(chunk for kind, chunk in _webp_chunks(data) if kind in wanted))
                parts[8] &= _WEBP_FLAGS if parts.startswith(b"VP8X") else 0xFF
                yield b"RIFF" + struct.pack("<I", len(parts) + 4) + b"WEBP" + parts
        elif data[:4] in (b"II*\0", b"MM\0*"):
            yield _tiff_without(data)
    except (struct.error, IndexError):
        return  # cut off, which is said of the whole file


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = len(_PNG)
    while place + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, place)
        yield kind, data[place : place + size + 12]
        place += size + 12


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Markers and segments up to the scan, which is given with all that follows."""
    place = 2
    while data[place + 1] != _JPEG_SCAN:
        if data[place] != 0xFF:
            raise IndexError
        size = struct.unpack_from(">H", data, place + 2)[0] + 2
        yield data[place + 1], data[place : place + size]
        place += size
    yield _JPEG_SCAN, data[place:]


def _webp_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = 12
    while place + 8 <= len(data):
        kind, size = struct.unpack_from("<4sI", data, place)
        yield kind, data[place : place + 8 + size + size % 2]
        place += 8 + size + size % 2


def _tiff_without(data: bytes) -> bytes:
    """Tags of metadata that lie outside the file, or are large, become one byte, in their places."""
    order, changed = "<" if data[:2] == b"II" else ">", bytearray(data)
    page, seen = struct.unpack_from(f"{order}I", data, 4)[0], set[int]()
    while page and page not in seen:
        seen.add(page)
        count = struct.unpack_from(f"{order}H", data, page)[0]
        for entry in range(page + 2, page + 2 + 12 * count, 12):
            tag, kind, length, place = struct.unpack_from(f"{order}HHII", data, entry)
            size = length * _TIFF_SIZES.get(kind, 1)
            if tag in _TIFF_METADATA and size > 4 and (place + size > len(data) or size > _LARGE):
                changed[entry + 2 : entry + 12] = struct.pack(f"{order}HII", 1, 1, 0)
        page = struct.unpack_from(f"{order}I", data, page + 2 + 12 * count)[0]
    return bytes(changed)

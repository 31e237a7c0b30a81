"""What a file holds beside its pixels never costs these, however large or damaged it is."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from dino_ds.data.decode import EncodedImage
from tests.data.files import encoded, photo, png_chunk

PHOTO = photo(48, 32)
_TURNED = b"MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"
BAD_EXIF = b"Exif\0\0\xff\xff" + bytes(range(200))
LARGE = bytes(3 << 20)


def png(*chunks: bytes, late: bool = False) -> bytes:
    data = encoded(PHOTO, "PNG")
    place = len(data) - 12 if late else 33
    return data[:place] + b"".join(chunks) + data[place:]


def jpeg(*segments: tuple[int, bytes]) -> bytes:
    data = encoded(PHOTO, "JPEG")
    return (
        data[:20]
        + b"".join(struct.pack(">BBH", 0xFF, kind, len(body) + 2) + body for kind, body in segments)
        + data[20:]
    )


def webp(**chunks: bytes) -> bytes:
    data = encoded(PHOTO, "WEBP", lossless=True, exif=_TURNED)
    parts, place = b"", 12
    while place < len(data):
        kind, size = struct.unpack_from("<4sI", data, place)
        body = chunks.get(kind.decode().strip(), data[place + 8 : place + 8 + size])
        parts += kind + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)
        place += 8 + size + size % 2
    return b"RIFF" + struct.pack("<I", len(parts) + 4) + b"WEBP" + parts


def tiff(tag: int, count: int, place: int) -> bytes:
    """A page with one more tag, of bytes at `place`."""
    data = bytearray(encoded(PHOTO, "TIFF", compression="jpeg", tiffinfo={tag: b"x" * 9}))
    page = struct.unpack_from("<I", data, 4)[0]
    for entry in range(page + 2, page + 2 + 12 * struct.unpack_from("<H", data, page)[0], 12):
        if struct.unpack_from("<H", data, entry)[0] == tag:
            struct.pack_into("<HII", data, entry + 2, 7, count, place)
            return bytes(data)
    raise AssertionError


def text(kind: bytes, content: bytes) -> bytes:
    head = {b"tEXt": b"k\0", b"zTXt": b"k\0\0", b"iTXt": b"k\0\1\0\0\0", b"iCCP": b"k\0\0"}[kind]
    return png_chunk(kind, head + (content if kind == b"tEXt" else zlib.compress(content)))


CASES = {
    **{f"PNG {kind.decode()}": png(text(kind, LARGE)) for kind in (b"tEXt", b"zTXt", b"iTXt", b"iCCP")},
    **{f"PNG {kind.decode()} after the pixels": png(text(kind, LARGE), late=True) for kind in (b"zTXt", b"iTXt")},
    "PNG many texts": png(*[text(b"zTXt", bytes(1 << 20))] * 70),
    "PNG broken zTXt": png(png_chunk(b"zTXt", b"k\0\0" + b"no zlib")),
    "PNG broken iCCP": png(png_chunk(b"iCCP", b"k\0\0" + b"no zlib")),
    "PNG wrong sum of a text": png(text(b"tEXt", b"hello")[:-4] + b"sum!"),
    "PNG short pHYs": png(png_chunk(b"pHYs", b"\0")),
    "PNG EXIF": png(png_chunk(b"eXIf", BAD_EXIF[6:])),
    "JPEG EXIF": jpeg((0xE1, BAD_EXIF)),
    "JPEG EXIF, cut off": jpeg((0xE1, BAD_EXIF[:9])),
    "JPEG ICC": jpeg((0xE2, b"ICC_PROFILE\0\7\1junk"), (0xE2, b"ICC_PROFILE\0")),
    "JPEG MPF": jpeg((0xE2, b"MPF\0" + bytes(range(60)))),
    "JPEG Photoshop": jpeg((0xED, b"Photoshop 3.0\0" + b"8BIM\4\4\xff\xff\xff\xff\xff")),
    "JPEG XMP": jpeg((0xE1, b"http://ns.adobe.com/xap/1.0/\0" + b"\xff<x" * 9000)),
    "JPEG comments": jpeg(*[(0xFE, b"x" * 65000)] * 40),
    "WebP EXIF": webp(EXIF=BAD_EXIF),
    "WebP EXIF of nothing": webp(EXIF=b""),
    **{f"TIFF tag {tag}": tiff(tag, 100, 1 << 30) for tag in (270, 305, 700, 34377, 34675)},
    "TIFF tag of 1 GiB": tiff(270, 1 << 30, 8),
}


@pytest.mark.parametrize("case", CASES)
def test_pixels_are_those_of_the_plain_file(case):
    form = case.split()[0]
    plain = encoded(PHOTO, form, **{"TIFF": {"compression": "jpeg"}, "WebP": {"lossless": True}}.get(form, {}))
    found = EncodedImage(CASES[case], "file", 10**6)
    assert (found.width, found.height) == PHOTO.size
    np.testing.assert_array_equal(found.decode(), EncodedImage(plain, "file", 10**6).decode())


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_the_orientation_outlives_other_metadata(form):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(PHOTO, form, exif=exif)
    expected = EncodedImage(data, "file", 10**6).decode()
    assert expected.shape[:2] == PHOTO.size
    if form == "PNG":
        data = data[:33] + text(b"iCCP", LARGE) + data[33:]
    elif form == "JPEG":
        data = data[:2] + b"\xff\xed\0\x20Photoshop 3.0\x008BIM\4\4\xff" + bytes(15) + data[2:]
    np.testing.assert_array_equal(EncodedImage(data, "file", 10**6).decode(), expected)


def test_damaged_pixels_stay_unreadable():
    """What is cut off, or has no pixels, is not made whole."""
    from dino_ds.data.base import UnreadableImage

    for data in (
        png(text(b"zTXt", LARGE))[:-60],
        jpeg((0xE1, BAD_EXIF))[:300],
        b"\x89PNG\r\n\x1a\n" + text(b"zTXt", b""),
    ):
        with pytest.raises(UnreadableImage):
            EncodedImage(data, "file", 10**6).decode()

"""Damaged EXIF tags and long texts never cost an image's pixels."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from dino_ds.data.decode import EncodedImage
from tests.data.files import encoded, photo, png_chunk

PHOTO = photo(48, 32)
BAD_EXIF = b"Exif\0\0\xff\xff" + bytes(range(200))
LARGE = bytes(3 << 20)


def png(*chunks: bytes, late: bool = False) -> bytes:
    data = encoded(PHOTO, "PNG")
    begin = len(data) - 12 if late else 33
    return data[:begin] + b"".join(chunks) + data[begin:]


def jpeg(body: bytes) -> bytes:
    data = encoded(PHOTO, "JPEG")
    return data[:20] + struct.pack(">BBH", 0xFF, 0xE1, len(body) + 2) + body + data[20:]


def text(kind: bytes, content: bytes) -> bytes:
    head = {b"zTXt": b"k\0\0", b"iTXt": b"k\0\1\0\0\0", b"iCCP": b"k\0\0"}[kind]
    return png_chunk(kind, head + zlib.compress(content))


CASES = {
    **{f"PNG {kind.decode()}": png(text(kind, LARGE)) for kind in (b"zTXt", b"iTXt", b"iCCP")},
    "PNG zTXt after the pixels": png(text(b"zTXt", LARGE), late=True),
    "PNG EXIF": png(png_chunk(b"eXIf", BAD_EXIF[6:])),
    "JPEG EXIF": jpeg(BAD_EXIF),
    "JPEG EXIF, cut off": jpeg(BAD_EXIF[:9]),
    "WebP EXIF": encoded(PHOTO, "WEBP", lossless=True, exif=BAD_EXIF),
}


@pytest.mark.parametrize("case", CASES)
def test_pixels_are_those_of_the_plain_file(case):
    form = case.split()[0]
    plain = encoded(PHOTO, form, **({"lossless": True} if form == "WebP" else {}))
    image = EncodedImage(CASES[case], "file", 10**6)
    assert (image.width, image.height) == PHOTO.size
    np.testing.assert_array_equal(image.decode(), EncodedImage(plain, "file", 10**6).decode())


def test_the_orientation_outlives_other_metadata():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(PHOTO, "PNG", exif=exif)
    expected = EncodedImage(data, "file", 10**6).decode()
    assert expected.shape[:2] == PHOTO.size
    data = data[:33] + text(b"iCCP", LARGE) + data[33:]
    np.testing.assert_array_equal(EncodedImage(data, "file", 10**6).decode(), expected)

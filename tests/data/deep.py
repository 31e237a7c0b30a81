"""Files of more than 8 bits a channel: 16-bit RGB, which Pillow can't write, and TIFFs of any type."""

from __future__ import annotations

import struct
import zlib

import numpy as np


def png16(values: np.ndarray) -> bytes:
    """uint16 (h, w) or (h, w, c): grey, grey and alpha, RGB, RGBA."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width = values.shape[:2]
    colour = {1: 0, 2: 4, 3: 2, 4: 6}[values.size // (height * width)]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def tiff(values: np.ndarray, order: str = "<", deflate: bool = False, photometric: int | None = None) -> bytes:
    """Of the array's own type, (h, w) or (h, w, c); order < or >, the bytes'. One strip."""
    height, width, channels = values.reshape(*values.shape[:2], -1).shape
    data = values.astype(values.dtype.newbyteorder(order)).tobytes()
    data = zlib.compress(data) if deflate else data
    colour = photometric or (2 if channels > 2 else 1)
    sample_format = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    tags = [(256, "H", [width]), (257, "H", [height]), (258, "H", [8 * values.dtype.itemsize] * channels)]
    tags += [(259, "H", [8 if deflate else 1]), (262, "H", [colour]), (273, "I", [0]), (277, "H", [channels])]
    tags += [(278, "H", [height]), (279, "I", [len(data)]), (284, "H", [1])]
    tags += [(338, "H", [2])] if channels == 4 and colour == 2 else []
    tags += [(339, "H", [sample_format] * channels)]
    packed = [struct.pack(f"{order}{len(numbers)}{kind}", *numbers) for _, kind, numbers in tags]
    place = 8 + 2 + 12 * len(tags) + 4
    first = place + sum(len(each) for each in packed if len(each) > 4)
    entries, blobs = b"", b""
    for (tag, kind, numbers), each in zip(tags, packed, strict=True):
        inline = struct.pack(f"{order}I", first) if tag == 273 else each
        if len(each) > 4:
            inline, blobs = struct.pack(f"{order}I", place + len(blobs)), blobs + each
        entries += struct.pack(f"{order}HHI", tag, {"H": 3, "I": 4}[kind], len(numbers)) + inline.ljust(4, b"\0")
    begin = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HIH", 42, 8, len(tags))
    return begin + entries + struct.pack(f"{order}I", 0) + blobs + data


def ppm(values: np.ndarray, most: int) -> bytes:
    """uint16 (h, w) or (h, w, 3); `most`: what is white."""
    kind = "P5" if values.ndim == 2 else "P6"
    return f"{kind} {values.shape[1]} {values.shape[0]} {most} ".encode() + values.astype(">u2").tobytes()

"""Files and sources that tests of several files make: images of any type, also those that Pillow can't write."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL
import tifffile
from PIL import Image

from dino_ds.data.decode import EncodedImage, check_channels
from dino_ds.data.sources import build_source

ORANGE = (240, 120, 40)
PILLOW_READS_MORE = tuple(map(int, PIL.__version__.split(".")[:2])) >= (12, 4)
"""Whether Pillow reads TIFFs of premultiplied gray and of plain YCbCr, which earlier ones refuse."""


def photo(width: int = 60, height: int = 45) -> Image.Image:
    """Smooth colors plus noise, so that every operation changes something."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:height, 0:width]
    smooth = np.stack([x * 255 / width, y * 255 / height, (x + y) * 255 / (width + height)], axis=-1)
    return Image.fromarray((smooth * 0.8 + rng.uniform(0, 50, smooth.shape)).astype(np.uint8))


def written(write: Callable, *values: object, **how: object) -> bytes:
    stream = io.BytesIO()
    write(stream, *values, **how)
    return stream.getvalue()


def encoded(image: Image.Image, form: str, **how: object) -> bytes:
    return written(image.save, form, **how)


def tif(values: np.ndarray, **how: object) -> bytes:
    return written(tifffile.imwrite, values, **how)


def npy(values: np.ndarray) -> bytes:
    return written(np.save, values)


def decode_rgb(data: bytes, name: str, max_pixels: int | None) -> np.ndarray:
    """uint8 (h, w, 3), upright; an animation's first frame. Raises UnreadableImage, also for more than 8 bits."""
    image = EncodedImage(data, name, max_pixels)
    check_channels(image, 3, name)
    return image.decode()


def png(value: int) -> bytes:
    """4 x 4 pixels of one red; `reds` gives the values back."""
    return encoded(Image.new("RGB", (4, 4), (value, 0, 0)), "PNG")


def reds(source) -> list[int]:
    return [source.load(i).getpixel((0, 0))[0] for i in range(len(source))]


def members(source) -> list[str]:
    return [source.member(i) for i in range(len(source))]


def read(root):
    return build_source("folder", str(root), "train", False)


def put(folder: Path, files: dict[str, bytes | int]) -> Path:
    """Files by their names; a number stands for its `png`."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png(content) if isinstance(content, int) else content)
    return folder


def tar(path: Path, *files: tuple | dict, form: int = tarfile.PAX_FORMAT, mode: str = "w") -> Path:
    """A tar of (name, content), where a number stands for its `png`, or of (name, type, target of the link)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = (entry for some in files for entry in (some.items() if isinstance(some, dict) else [some]))
    with tarfile.open(path, mode, format=form) as archive:
        for name, content, *target in entries:
            info, data = tarfile.TarInfo(name), png(content) if isinstance(content, int) else content
            if target:
                info.type, info.linkname, data = content, target[0], b""
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of(width: int, height: int, bits: int, color: int, rows: bytes) -> bytes:
    """A file of compressed rows, whatever the header says."""
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")


def png16(values: np.ndarray) -> bytes:
    """uint16 (h, w) or (h, w, c): gray, gray and alpha, RGB, RGBA."""
    height, width = values.shape[:2]
    color = {1: 0, 2: 4, 3: 2, 4: 6}[values.size // (height * width)]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return png_of(width, height, 16, color, zlib.compress(rows))


def tiff(values: np.ndarray, order: str = "<", compression: str | None = None) -> bytes:
    """A TIFF of the array's own type, (h, w) or (h, w, c); order < or >, the bytes'."""
    channels = values.shape[2] if values.ndim == 3 else 1
    color = {"photometric": "rgb" if channels > 2 else "minisblack"}
    alpha = {"extrasamples": ["unassalpha"]} if channels == 4 else {}
    return tif(values, byteorder=order, compression=compression, metadata=None, **color, **alpha)


def ppm(values: np.ndarray, most: int) -> bytes:
    """uint16 (h, w) or (h, w, 3); `most`: what is white."""
    kind = "P5" if values.ndim == 2 else "P6"
    return f"{kind} {values.shape[1]} {values.shape[0]} {most} ".encode() + values.astype(">u2").tobytes()


class Arrays:
    """Arrays or Pillow's images in memory: a source without files."""

    labels = classes = None

    def __init__(self, *contents: np.ndarray | Image.Image | bytes) -> None:
        self.contents = contents

    def __len__(self) -> int:
        return len(self.contents)

    def load(self, index: int) -> np.ndarray | Image.Image:
        return self.contents[index]

    def name(self, index: int) -> str:
        return f"arrays/{index}"


class Files(Arrays):
    load = None

    def read(self, index: int) -> bytes:
        return self.contents[index]

    def name(self, index: int) -> str:
        return f"files/{index}.png"

"""Formats of image files: the endings by which they are found, and their readers.

A format that Pillow reads is a line of `images.PILLOW`; any other has a module with a `Format`, named in `_READERS`.
"""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Iterable

from PIL import Image, ImageFile

from dino_ds.config.fields import ARCHIVES, HDF5
from dino_ds.data.dicom import DICOM
from dino_ds.data.images import PILLOW
from dino_ds.data.listing import printable
from dino_ds.data.raster import NPY, Raster
from dino_ds.data.tiff import TIFF

_READERS = (NPY, DICOM, TIFF)
ENDINGS = PILLOW | {reader.name: reader.endings for reader in _READERS}
"""Endings of the files of each format, the usual one first."""
EXTENSIONS = tuple(itertools.chain.from_iterable(ENDINGS.values()))
"""Endings of all image files."""
_SIDE_FILES = tuple(
    b".txt .json .jsonl .csv .tsv .xml .yaml .yml .toml .ini .cfg .md .rst .html .htm .css .js .pdf .log .lst .cls "
    b".pyd .py .ipynb .sh .pkl .pth .pt .safetensors .mat .db .sha256 .md5 .lock .xmp .aae .thm .url readme license "
    b"makefile".split()
)
"""Endings of files about images, which are ignored without a note."""
_KNOWN = (*(os.fsencode(ending) for ending in EXTENSIONS), *_SIDE_FILES)
_NAMED = re.compile(rf"(?s)(.+(?:{'|'.join(map(re.escape, HDF5))})):(/.*)|(.+\.tar):([^/:]+)", re.IGNORECASE)


def split_part(root: str) -> tuple[str, str | None]:
    """`file.h5:/images` or `file.tar:input.png` -> the file or pattern, and the part that is read, or None."""
    match = _NAMED.fullmatch(root)
    return (match[1] or match[3], match[2] or match[4]) if match else (root, None)


def is_left_out(name: bytes) -> bool:
    """Whether a file may be an image in a format that is not read: it is left out with a note."""
    return not name.lower().endswith(_KNOWN)


def note_left_out(files: Iterable[bytes]) -> list[str]:
    """A note on left-out files, if there are any."""
    if not (names := sorted(files)):
        return []
    return [
        f"{len(names)} files that can't be read are left out, such as {printable(os.fsdecode(names[0]))}: convert "
        f"images to JPEG, PNG or TIFF, unpack archives ({' '.join(ARCHIVES)} are read if data.root names them); a .txt "
        "list may name images without an ending"
    ]


def open_file(data: bytes, channels: int | None) -> Raster | ImageFile.ImageFile:
    """Open an image by its header: as Pillow's image, or as a Raster where Pillow can't read all of the file. Raises
    any Exception for damaged files."""
    reader = next((reader for reader in _READERS if reader.is_kind_of(data)), None)
    return reader.open(data, channels) if reader else Image.open(io.BytesIO(data), formats=[*PILLOW])

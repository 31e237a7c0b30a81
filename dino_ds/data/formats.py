"""Every kind of image file: the endings by which it is found, and who reads it.

A kind that Pillow reads is one line of `images.PILLOW`; another is a file with a `Format`, and its name in `_OWN`.
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

_OWN = (NPY, DICOM, TIFF)
ENDINGS = PILLOW | {one.name: one.endings for one in _OWN}
"""Endings of each kind of file, the usual one first."""
EXTENSIONS = tuple(itertools.chain.from_iterable(ENDINGS.values()))
"""Endings of all files that are taken for images."""
_SIDE_FILES = tuple(
    b".txt .json .jsonl .csv .tsv .xml .yaml .yml .toml .ini .cfg .md .rst .html .htm .css .js .pdf .log .lst .cls "
    b".pyd .py .ipynb .sh .pkl .pth .pt .safetensors .mat .db .sha256 .md5 .lock .xmp .aae .thm .url readme license "
    b"makefile".split()
)
"""Endings of files that are about images: left out without a word, as all others are with one."""
_KNOWN = (*(os.fsencode(ending) for ending in EXTENSIONS), *_SIDE_FILES)
_READ_ALONE = tuple(map(os.fsencode, ARCHIVES))
_PACKED = tuple(b".zip .7z .rar .tgz .tbz2 .txz .gz .bz2 .xz .zst".split())
_NAMED = re.compile(rf"(?s)(.+(?:{'|'.join(map(re.escape, HDF5))})):(/.*)|(.+\.tar):([^/:]+)", re.IGNORECASE)


def split_part(root: str) -> tuple[str, str | None]:
    """`file.h5:/images`, `file.tar:input.png` -> the file, or a pattern of files, and what is taken of it, or None."""
    match = _NAMED.fullmatch(root)
    return (match[1] or match[3], match[2] or match[4]) if match else (root, None)


def is_left_out(name: bytes) -> bool:
    """Whether a file may be an image, and is of a kind that nothing here reads: left out, but not in silence."""
    return not name.lower().endswith(_KNOWN)


def note_left_out(files: Iterable[bytes]) -> list[str]:
    """A note for each remedy that files need which `is_left_out` names."""
    groups = dict[str, list[bytes]]()
    for file in files:
        groups.setdefault(_remedy(file.lower()), []).append(file)
    return [
        f"{len(some)} files that can't be read are left out, such as {printable(os.fsdecode(min(some)))}: {remedy}"
        for remedy, some in sorted(groups.items())
    ]


def _remedy(name: bytes) -> str:
    if name.endswith(_READ_ALONE):
        return "name such files themselves as data.root"
    if name.endswith(_PACKED) and not name.endswith(b".nii.gz"):
        return "unpack them"
    if b"." not in os.path.basename(name):
        return "they have no ending; a .txt list may name images without one"
    return "convert them to JPEG, PNG or TIFF"


def open_file(data: bytes, channels: int | None) -> Raster | ImageFile.ImageFile:
    """An image of which the header was read: Pillow's, or a Raster of what Pillow can't read, or not whole. Raises any
    Exception for broken files."""
    found = next((one for one in _OWN if one.is_kind_of(data)), None)
    return found.open(data, channels) if found else Image.open(io.BytesIO(data), formats=[*PILLOW])

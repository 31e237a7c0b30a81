"""Formats of image files: the endings by which they are found, and their readers.

A format that Pillow reads is a line of `images.PILLOW`; any other has a module with a `Format`, named in `_READERS`.
"""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Callable, Iterable

from PIL import Image, ImageFile

from dino_ds.basics.text_file import opened
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
    b"makefile dicomdir".split()
)
"""Endings of files about images, which are ignored without a note."""
_ENDING = re.compile(rb"\.[^./]*[^\d./][^./]*$")
"""An ending; the names of DICOM files may end in numbers."""
_PILLOW_HEADS = re.compile(
    rb"(?s)\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF.{4}WEBP|BM.{4}\0{4}|GIF8[79]a|P[2356]\s+[\d#]|\0{3}\x0cjP  |"
    rb".{4}ftypavi[fs]"
)
"""First bytes of the formats that Pillow reads, but TIFF."""
HEAD = 132
"""Bytes that tell the format of a file: DICOM's mark ends there."""
_IMAGES = tuple(map(os.fsencode, EXTENSIONS))
_KNOWN = (*_IMAGES, *_SIDE_FILES)
_NAMED = re.compile(rf"(?s)(.+(?:{'|'.join(map(re.escape, HDF5))})):(/.*)|(.+\.tar):([^/:]+)", re.IGNORECASE)


def split_part(root: str) -> tuple[str, str | None]:
    """`file.h5:/images` or `file.tar:input.png` -> the file or pattern, and the part that is read, or None."""
    match = _NAMED.fullmatch(root)
    return (match[1] or match[3], match[2] or match[4]) if match else (root, None)


def is_image(name: bytes, read_head: Callable[[], bytes]) -> bool:
    """Whether a file is an image: by its ending, or if it has none, by its first HEAD bytes. Raises what `read_head`
    does."""
    if name.lower().endswith(_IMAGES):
        return True
    if name.lower().endswith(_SIDE_FILES) or _ENDING.search(name):
        return False
    head = read_head()
    return bool(_PILLOW_HEADS.match(head)) or any(reader.is_kind_of(head) for reader in _READERS)


def is_image_file(folder: str | bytes, name: str | bytes) -> bool:
    """Whether `is_image` holds for a file on a disk; False for one without an ending that can't be read."""

    def read_head() -> bytes:
        with opened(os.path.join(os.fsencode(folder), os.fsencode(name)), 1 << 62) as file:
            return file.read(HEAD)

    try:
        return is_image(os.fsencode(name), read_head)
    except (OSError, ValueError):  # ValueError: no regular file
        return False


def is_left_out(name: bytes) -> bool:
    """Whether a file that is no image may be one in a format that is not read: it is left out with a note."""
    return not name.lower().endswith(_KNOWN)


def note_left_out(files: Iterable[bytes]) -> list[str]:
    """A note on left-out files, if there are any."""
    if not (names := sorted(files)):
        return []
    return [
        f"{len(names)} files that can't be read are left out, such as {printable(os.fsdecode(names[0]))}: convert "
        f"images to JPEG, PNG or TIFF, unpack archives ({' '.join(ARCHIVES)} are read if data.root names them); a .txt "
        "list may name images of any ending"
    ]


def archives_in(folder: str) -> tuple[list[str], list[bytes]]:
    """ARCHIVES in `folder` and its folders KEY=VALUE, and other files, which are left out; neither if it has images or
    other folders."""
    archives, others = list[str](), list[bytes]()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if "=" in entry.name and entry.is_dir(follow_symlinks=False):  # a partition, such as label=cat
                    inside, more = archives_in(entry.path)
                    if not inside:
                        return [], []
                    archives, others = archives + inside, others + more
                elif entry.name.lower().endswith(EXTENSIONS) or entry.is_dir():
                    return [], []
                elif entry.name.lower().endswith(ARCHIVES):
                    archives.append(entry.path)
                elif is_left_out(os.fsencode(entry.name)):
                    others.append(os.fsencode(entry.name))
    except OSError:
        return [], []  # the folder source reports why
    return sorted(archives), others


def open_file(data: bytes, channels: int | None) -> Raster | ImageFile.ImageFile:
    """Open an image by its header: as Pillow's image, or as a Raster where Pillow can't read all of the file. Raises
    any Exception for damaged files."""
    reader = next((reader for reader in _READERS if reader.is_kind_of(data)), None)
    return reader.open(data, channels) if reader else Image.open(io.BytesIO(data), formats=[*PILLOW])

"""Images of any source as files of an archive, perhaps shrunk, and one tar shard of them.

A shard is written by a process of its own: it is there whole and with its checksum, or not at all.
"""

from __future__ import annotations

import hashlib
import io
import os
import signal
import tarfile
import threading
from dataclasses import dataclass, field
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dino_ds.basics.durable import replacing
from dino_ds.data.base import Source, UnreadableImage
from dino_ds.data.decode import EncodedImage
from dino_ds.data.formats import ENDINGS, EXTENSIONS
from dino_ds.data.images import pillow_values
from dino_ds.errors import DataError

_END = bytes(2 * 512)
_MAX_PIXELS = 178956970
"""Pillow's own limit: shrinking is how images come below the recipe's."""
_MOST_PARTS = 64
"""Folders deeper than this can't be made everywhere."""
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16")
_ENDINGS = {"MPO": ".jpg"} | {name: endings[0] for name, endings in ENDINGS.items()}


@dataclass(frozen=True)
class Shrink:
    """Images whose shorter side has more than `side` pixels become JPEGs of that size; None = all stay as they are."""

    side: int | None
    quality: int


def member_of(source: Source, index: int) -> str:
    """The image's name within the data set as a safe relative path: never absolute, no .. and nothing hidden."""
    text: str = getattr(source, "member", source.name)(index)
    parts = [part for part in text.replace("\0", "?").split("/") if part not in ("", ".", "..")]
    if not parts:
        return str(index)
    return "/".join([*parts[-_MOST_PARTS:-1], f"_{parts[-1]}" if parts[-1].startswith(".") else parts[-1]])


def names_digest(source: Source) -> str:
    """Tells one set of images from another."""
    digest = hashlib.sha256(str(len(source)).encode())
    for index in range(len(source)):
        digest.update(os.fsencode(member_of(source, index)) + b"\n")
    return digest.hexdigest()


def repack(source: Source, index: int, shrink: Shrink) -> tuple[str, bytes]:
    """Name and bytes: the source's own file unless it has to be shrunk, PNG where it has none.

    Raises UnreadableImage, DataError for an array that is not an RGB image.
    """
    name = member_of(source, index)
    read = getattr(source, "read", None)
    data = _as_png(source.load(index), source.name(index)) if read is None else read(index)
    if shrink.side is not None:
        smaller = _shrunk(data, shrink.side, shrink.quality, source.name(index))
        if smaller is not None:
            data = smaller
            stem, ending = os.path.splitext(name)
            name = f"{stem if ending.lower() in EXTENSIONS else name}.jpg"
    if not name.lower().endswith(EXTENSIONS):
        name += _ending(data, source.name(index))
    return name, data


def _as_png(image: Image.Image | Any, name: str) -> bytes:
    if isinstance(image, Image.Image) and image.mode not in _PNG_MODES:
        image = pillow_values(image, 3, name)
    if isinstance(image, np.ndarray):
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            what = f"{image.dtype} of shape {image.shape}"
            raise DataError(f"{name} is an array of {what}; only RGB images of 8 bits can be put into shards")
        image = Image.fromarray(image)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def _shrunk(data: bytes, side: int, quality: int, name: str) -> bytes | None:
    """A JPEG whose shorter side is `side`, upright, or None if the file stays as it is. Raises UnreadableImage."""
    image = EncodedImage(data, name, None, channels=None)
    shorter = min(image.width, image.height)
    if shorter <= side or image.deep or image.is_raster:  # a JPEG has 8 bits
        return None
    if image.width * image.height > _MAX_PIXELS:
        raise UnreadableImage(name, f"{image.width} x {image.height} pixels are more than {_MAX_PIXELS}")
    # At least twice the pixels wanted, so that the resampling decides what is seen.
    upright = Image.fromarray(image.decode(max((n for n in (2, 4, 8) if shorter >= 2 * side * n), default=1)))
    factor = side / min(upright.size)
    size = (max(side, round(upright.width * factor)), max(side, round(upright.height * factor)))
    stream = io.BytesIO()
    upright.resize(size, Image.Resampling.LANCZOS).save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def _ending(data: bytes, name: str) -> str:
    try:
        return _ENDINGS[EncodedImage(data, name, None, channels=None).format]
    except Exception:
        raise UnreadableImage(name, "not an image of a known format") from None


@dataclass
class ShardRecord:
    """Content of a finished shard; `bad` are the texts of its unreadable images."""

    name: str
    images: int = 0
    size: int = 0
    sha256: str = ""
    bad: list[str] = field(default_factory=list)


_source: Source | None = None
_shrink = Shrink(None, 0)


def start_worker(source: Source, shrink: Shrink) -> None:
    global _source, _shrink
    _source, _shrink = source, shrink
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once: the part it wrote will be written again
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def write_shard(path: Path, first: int, last: int) -> ShardRecord:
    """Images [first, last) of the worker's source. Raises OSError, DataError."""
    assert _source is not None
    record = ShardRecord(path.name)
    digest = hashlib.sha256()
    names, keys = set[str](), set[str]()
    with replacing(path) as part, open(part, "wb") as file:

        def add(name: str, data: bytes) -> None:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            head = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
            for block in (head, data, bytes(-len(data) % 512)):
                digest.update(block)
                file.write(block)

        for index in range(first, last):
            try:
                name, data = repack(_source, index, _shrink)
            except UnreadableImage as error:
                record.bad.append(str(error))
                continue
            name = _unused(name, names)
            add(name, data)
            record.images += 1
            key = _key(name)
            if _source.labels is not None and _source.labels[index] >= 0 and key not in keys:
                keys.add(key)
                add(f"{key}.cls", str(_source.labels[index]).encode())
        digest.update(_END)
        file.write(_END)
        record.size, record.sha256 = file.tell(), digest.hexdigest()
    return record


def _unused(name: str, names: set[str]) -> str:
    """`name`, with a number where it is taken: a list may name an image twice."""
    stem, ending = os.path.splitext(name)
    number = 1
    while name in names:
        number += 1
        name = f"{stem}~{number}{ending}"
    names.add(name)
    return name


def _key(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

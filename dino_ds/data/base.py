"""The contract of a source of images, and its error for an unreadable image. Imports nothing else of `dino_ds.data`."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from PIL import Image

_HEAD = 500


class UnreadableImage(Exception):
    """An image can't be decoded: `name` as its source calls it, `reason` in a few words."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def find_placeholder(path: str) -> str | None:
    """Name the placeholder at `path`, such as a Git LFS pointer or a web page; None for any other file."""
    with suppress(OSError), open(path, "rb") as file:
        return name_placeholder(file.read(_HEAD))
    return None


def name_placeholder(head: bytes) -> str | None:
    """Name the placeholder, such as a Git LFS pointer, that begins with `head`; None for any other file."""
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS in place of the file: git lfs pull fetches it"
    if re.match(rb"\s*(<\?xml[^>]*>\s*)?<(!doctype\s+html|html)", head[:_HEAD], re.IGNORECASE):
        return "a web page in place of the file: download it again"
    return None


class Source(Protocol):
    """Images by index, always in the same order; picklable, since loader processes get a copy.

    A source of encoded files also has `read(index) -> bytes`, which lets the pipeline choose the decoder. A source
    whose images are not drawn equally often has `draws` (`dino_ds.data.draws`).
    """

    @property
    def labels(self) -> Sequence[int] | None:
        """Class number of each image, an index into `classes`; -1 = no class. None = no labels at all."""
        ...

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, each a printable line."""
        ...

    def __len__(self) -> int: ...

    def load(self, index: int) -> Image.Image | Any:
        """RGB image, or an array (h, w, c) of uint8 or of deeper values as stored. Raises UnreadableImage."""
        ...

    def name(self, index: int) -> str:
        """Name in messages, a printable line: the file's path, or a name like cifar10/train/17."""
        ...


def is_elsewhere(source: Source) -> bool:
    """Whether images of a source are in a bucket or on a web server, and are to be announced by `prepare_images`."""
    return bool(getattr(source, "elsewhere", False))


def prepare_images(source: Source, indices: Sequence[int], seconds: float | None = None) -> None:
    """Tell a source which images are read next, so that it fetches remote ones together.

    Args:
        source: any source; a local one ignores the call.
        indices: images that are read next.
        seconds: time after which an image that has not arrived counts as lost.
    """
    if is_elsewhere(source):
        source.prepare(indices, seconds)  # type: ignore[attr-defined]


class Joined(ABC):
    """A source made of several others."""

    @property
    @abstractmethod
    def joined(self) -> Sequence[tuple[str, Source]]:
        """The joined sources in order, each with the path or address that the user wrote."""

    @abstractmethod
    def another(self, index: int, number: int) -> int:
        """Index of another image from the same part as image `index`; `number`, any integer, chooses it."""

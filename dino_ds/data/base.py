"""The contract of a source of images, and how it says that one can't be read. Imports nothing else of this room."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from PIL import Image

_HEAD = 500


class UnreadableImage(Exception):
    """An image that can't be decoded: `name` as the source calls it, `reason` in a few words."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def find_placeholder(path: str) -> str | None:
    """Name the placeholder at `path`, such as a Git LFS pointer or a web page; None for any other file."""
    with suppress(OSError), open(path, "rb") as file:
        return what_else_it_is(file.read(_HEAD))
    return None


def what_else_it_is(head: bytes) -> str | None:
    """Name the placeholder, such as a Git LFS pointer, that begins with `head`; None for any other file."""
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS in place of the file: git lfs pull fetches it"
    if re.match(rb"\s*(<\?xml[^>]*>\s*)?<(!doctype\s+html|html)", head[:_HEAD], re.IGNORECASE):
        return "a web page in place of the file: download it again"
    return None


class Source(Protocol):
    """Images by index, always in the same order; picklable, since loader processes get a copy.

    A source of encoded files also has `read(index) -> bytes`, which lets the pipeline choose the decoder; one whose
    images are not all drawn equally often has `draws` (`dino_ds.data.draws`).
    """

    @property
    def labels(self) -> Sequence[int] | None:
        """One a sample, into `classes`; -1 = this image has none. None = no labels at all."""
        ...

    @property
    def classes(self) -> list[str] | None:
        """Names of classes, each one printable line."""
        ...

    def __len__(self) -> int: ...

    def load(self, index: int) -> Image.Image | Any:
        """RGB, or an array (h, w, c) of uint8, or of deeper values as they are stored. Raises UnreadableImage."""
        ...

    def name(self, index: int) -> str:
        """One printable line: the file's path, or such as cifar10/train/17."""
        ...


def is_elsewhere(source: Source) -> bool:
    """Whether images of a source are in a bucket or on a web server, so that it wants to know which are read next."""
    return bool(getattr(source, "elsewhere", False))


def prepare_images(source: Source, indices: Sequence[int], seconds: float | None = None) -> None:
    """Tell a source which images are read next: those that are elsewhere come together then.

    seconds: time after which an image that has not come counts as lost.
    """
    if is_elsewhere(source):
        source.prepare(indices, seconds)  # type: ignore[attr-defined]


class JoinedPart(NamedTuple):
    """One of the sources that a `Joined` has, at the place that was given; `value_range`: black and white of its images
    deeper than 8 bits, or None where they are the run's."""

    place: str
    source: Source
    value_range: tuple[float, float] | None


class Joined(ABC):
    """A source that joins others: the questions that other sources have no answer to."""

    @property
    @abstractmethod
    def joined(self) -> Sequence[JoinedPart]: ...

    @abstractmethod
    def another(self, index: int, number: int) -> int:
        """An image of the same source as `index`, by any number."""

    @abstractmethod
    def range_of(self, index: int) -> tuple[float, float] | None:
        """The `value_range` of the source of an image."""

"""The contract of a source of images, and how it says that one can't be read. Imports nothing else of this room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from PIL import Image


class UnreadableImage(Exception):
    """An image that can't be decoded: `name` as the source calls it, `reason` in a few words."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


class Source(Protocol):
    """Images by index, always in the same order; picklable, since loader processes get a copy.

    A source of encoded files also has `read(index) -> bytes`, which lets the pipeline choose the decoder.
    """

    @property
    def labels(self) -> Sequence[int] | None:
        """One a sample, into `classes`; -1 = this image has none. None = no labels at all."""
        ...

    @property
    def classes(self) -> list[str] | None: ...

    def __len__(self) -> int: ...

    def load(self, index: int) -> Image.Image | Any:
        """RGB, or an array (h, w, c) of uint8, or of deeper values as they are stored. Raises UnreadableImage."""
        ...

    def name(self, index: int) -> str:
        """One printable line: the file's path, or such as cifar10/train/17."""
        ...

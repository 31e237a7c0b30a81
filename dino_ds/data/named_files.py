"""Image files by their paths, in the order in which they are named."""

from __future__ import annotations

from collections.abc import Sequence

from dino_ds.data.encoded import EncodedImages, read_file
from dino_ds.data.listing import printable


class NamedFiles(EncodedImages):
    """A source without labels; what it names is first looked at when it is read."""

    labels: Sequence[int] | None = None
    classes: list[str] | None = None

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = list(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, index: int) -> bytes:
        return read_file(self._paths[index], self.name(index))

    def name(self, index: int) -> str:
        return printable(self._paths[index])

    def member(self, index: int) -> str:
        return self._paths[index]

"""Where images come from: one small map-style contract, and the sources by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from PIL import Image

from dino_ds.data.images import UnreadableImage
from dino_ds.data.own_files import open_files
from dino_ds.data.own_source import build_own_source
from dino_ds.data.photos import PhotoPatches
from dino_ds.data.torchvision_sets import TORCHVISION_SETS, TorchvisionImages
from dino_ds.errors import ConfigError, DataError
from dino_ds.names import did_you_mean

__all__ = ["SOURCES", "Source", "UnreadableImage", "build_source"]

SOURCES = ("folder", "photos", *TORCHVISION_SETS)


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


def build_source(source: str, root: str | None, split: Literal["train", "test"], download: bool) -> Source:
    """The images of one split.

    A user's own files or class are taken whole, whatever the split: name another root for tests. Raises DataError where
    nothing can be read, ConfigError for an unknown source or a class that is none.
    """
    if ":" in source:
        return build_own_source(source, root)
    if source == "photos":
        return PhotoPatches(split)
    if source not in SOURCES:
        near = did_you_mean(source, SOURCES)
        raise ConfigError(
            f"data.source '{source}' is unknown; allowed are {', '.join(SOURCES)}, or a class as module:Class.{near}"
        )
    if root is None:
        what = "holds the images" if source == "folder" else f"keeps {source}"
        raise DataError(f"data.source {source} needs a folder: give --data.root DIR, the folder that {what}")
    if source == "folder":
        return open_files(root)
    return TorchvisionImages(source, root, split, download)

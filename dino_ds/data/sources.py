"""Where images come from: one small map-style contract, and the sources by name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Literal, Protocol

from PIL import Image

from dino_ds.data.folder import ImageFolder
from dino_ds.data.images import UnreadableImage
from dino_ds.data.photos import PhotoPatches
from dino_ds.data.torchvision_sets import TORCHVISION_SETS, TorchvisionImages
from dino_ds.errors import ConfigError, DataError

__all__ = ["SOURCES", "Source", "UnreadableImage", "build_source"]

SOURCES = ("folder", "photos", *TORCHVISION_SETS)


class Source(Protocol):
    """Images by index, always in the same order; picklable, since loader processes get a copy."""

    @property
    def labels(self) -> Sequence[int] | None:
        """One a sample, into `classes`; -1 = this image has none. None = no labels at all."""
        ...

    @property
    def classes(self) -> list[str] | None: ...

    def __len__(self) -> int: ...

    def load(self, index: int) -> Image.Image:
        """RGB. Raises UnreadableImage."""
        ...

    def name(self, index: int) -> str:
        """The file's path, or such as cifar10/train/17."""
        ...


def build_source(source: str, root: str | None, split: Literal["train", "test"], download: bool) -> Source:
    """The images of one split.

    A folder is taken whole, whatever the split: name another folder for tests. Raises DataError where nothing can be
    read, ConfigError for an unknown source.
    """
    if source == "photos":
        return PhotoPatches(split)
    if source not in SOURCES:
        near = difflib.get_close_matches(source, SOURCES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"data.source '{source}' is unknown; allowed are {', '.join(SOURCES)}.{hint}")
    if root is None:
        what = "holds the images" if source == "folder" else f"keeps {source}"
        raise DataError(f"data.source {source} needs a folder: give --data.root DIR, the folder that {what}")
    if source == "folder":
        return ImageFolder(root)
    return TorchvisionImages(source, root, split, download)

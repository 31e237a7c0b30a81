"""Work that all benchmarks share: finding their files, reading images and label maps, sharing the work over ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from dino_ds.basics.text_file import read_text
from dino_ds.data.base import UnreadableImage
from dino_ds.data.decode import MAX_PIXELS, decode_rgb
from dino_ds.data.encoded import NamedFiles, read_file
from dino_ds.data.listing import printable
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, DataError, one_line
from dino_ds.evals.context import EvalContext
from dino_ds.evals.features import GaveUp


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's images on disk: `folders` are names of its folder below the root, "." for the root itself, `marks`
    are files in it; `layout` and `origin` are words for messages."""

    name: str
    folders: tuple[str, ...]
    marks: tuple[str, ...]
    layout: str
    origin: str

    def find(self, root: Path | None) -> Path:
        """The folder that has all marks. Raises ConfigError without a root, DataError where there is none."""
        if root is None:
            raise ConfigError(f"{self.name} needs its images: --benchmark_root DIR, {self._wanted()}")
        for folder in self.folders:
            if all((root / folder / mark).exists() for mark in self.marks):
                return root / folder
        best = max(self.folders, key=lambda folder: sum((root / folder / mark).exists() for mark in self.marks))
        missing = next(mark for mark in self.marks if not (root / best / mark).exists())
        places = ", ".join(str(root / folder) for folder in self.folders)
        raise DataError(f"no {self.name} in {places}: {root / best / missing} is not there; {self._wanted()}")

    def check(self, paths: Iterable[Path]) -> None:
        """Raises DataError where one of these files is not there."""
        folders: dict[Path, set[str]] = {}
        missing = []
        for path in paths:
            if path.parent not in folders:
                folders[path.parent] = set(os.listdir(path.parent)) if path.parent.is_dir() else set()
            if path.name not in folders[path.parent]:
                missing.append(path)
        if missing:
            raise DataError(
                f"{self.name} is not complete: {len(missing)} files are not there, such as "
                f"{printable(str(missing[0]))}; {self._wanted()}"
            )

    def names(self, path: Path) -> list[str]:
        """The lines of a list of names, which never lead out of a folder. Raises DataError for another or none."""
        try:
            names = [line.strip() for line in read_text(str(path), "a list of names").splitlines() if line.strip()]
        except ConfigError as error:
            raise DataError(str(error)) from None
        if not names:
            raise DataError(f"{path} names nothing; {self._wanted()}")
        return [plain_name(name, path) for name in names]

    def _wanted(self) -> str:
        return f"wanted is {self.layout} ({self.origin})"


def plain_name(name: object, where: Path) -> str:
    """`name`, if it is one of a file or folder. Raises DataError for what would be a path."""
    if not isinstance(name, str) or not name or name.startswith(".") or {"/", "\\", "\0"} & set(name):
        raise DataError(f"{where} names {ascii(name)[:60]}, which is not the name of an image")
    return name


T = TypeVar("T")
R = TypeVar("R")


class Files:
    """Images of files, each cropped to its box (left, top, right, bottom) where boxes are given.

    A source without `read`: a box is of the image, and not of its file.
    """

    labels: Sequence[int] | None = None
    classes: list[str] | None = None

    def __init__(self, paths: Sequence[Path], boxes: Sequence[tuple[float, float, float, float]] | None = None) -> None:
        self._files, self._boxes = NamedFiles([str(path) for path in paths]), boxes

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        return self._files.name(index)

    def load(self, index: int) -> Image.Image:
        image = self._files.load(index)
        if not isinstance(image, Image.Image):
            raise UnreadableImage(self.name(index), "deeper than 8 bits")
        return image if self._boxes is None else image.crop(self._boxes[index])


def describe_files(
    context: EvalContext,
    files: Files,
    transform: Callable[[Image.Image], Tensor],
    describe: Callable[[Tensor], Tensor],
    batch: int,
    what: str,
) -> Tensor:
    """transform: image -> (3, h, w), of one size unless `batch` is 1; describe: (b, 3, h, w) -> (b, d).

    Every rank its share; returns all features (n, d) in the order of the files, on all ranks, on the device. Raises
    DataError for an image that cannot be read: a benchmark without it is another one.
    """
    features, _, unreadable = context.gather(describe, files, range(len(files)), transform, what, batch)
    if unreadable:
        raise DataError(f"{len(unreadable)} images can't be read, such as {unreadable[0]}: download it again")
    return features


def share(context: EvalContext, items: Sequence[T], work: Callable[[T], R], what: str) -> list[R]:
    """work(item) of all items, in their order, on all ranks; each rank does its share. Small host objects.

    `work` calls no collective. Its UserErrors are raised on all ranks; GaveUp where `context.give_up` says yes on one.
    """
    context.begin()
    rank, world = distributed.rank(), distributed.world_size()
    results, gave_up = list[R](), False
    with distributed.raise_on_all_ranks():
        for item in tqdm(items[rank::world], what, leave=False, disable=distributed.hidden_bar(context.progress)):
            results.append(work(item))
            gave_up = context.give_up()
            if gave_up:
                break
    found = distributed.gather_objects((results, gave_up))
    if any(gave_up for _, gave_up in found):
        raise GaveUp
    return [found[i % world][0][i // world] for i in range(len(items))]


def read_image(path: Path) -> Image.Image:
    """RGB. Raises DataError where it cannot be read."""
    name = printable(str(path))
    try:
        return Image.fromarray(decode_rgb(read_file(str(path), name), name, MAX_PIXELS))
    except UnreadableImage as error:
        raise DataError(f"{error}: download it again") from None


def read_label_map(path: Path, size: tuple[int, int]) -> np.ndarray:
    """uint8 (h, w): the palette's indices, or the values of a grey image; `size` is the photo's (width, height).

    Raises DataError for any other file.
    """
    try:
        with Image.open(path, formats=["PNG"]) as image:
            if image.mode not in ("P", "L") or image.size != size:
                raise DataError(
                    f"{path} is a map of labels in mode {image.mode} and size {image.size}: wanted is a PNG with a "
                    f"palette, {size} as its photo"
                )
            return np.array(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is not a readable PNG: {one_line(error)}") from None

"""How the ranks share the work of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from dino_ds import distributed
from dino_ds.data.base import UnreadableImage
from dino_ds.data.decode import MAX_PIXELS, decode_rgb
from dino_ds.data.encoded import NamedFiles, read_file
from dino_ds.data.listing import printable
from dino_ds.errors import DataError
from dino_ds.evals.subject import EvalContext, GaveUp

T = TypeVar("T")
R = TypeVar("R")


class Files(NamedFiles):
    """Of each image the part in its box (left, top, right, bottom), or all of it."""

    def __init__(self, paths: Sequence[Path], boxes: Sequence[tuple[float, float, float, float]] | None = None) -> None:
        super().__init__([str(path) for path in paths])
        self._boxes = boxes

    def load(self, index: int) -> Image.Image:
        image = super().load(index)
        if not isinstance(image, Image.Image):
            raise UnreadableImage(self.name(index), "deeper than 8 bits")
        return image if self._boxes is None else image.crop(self._boxes[index])


def describe_files(
    subject: EvalContext,
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
    features, _, unreadable = subject.gather(describe, files, range(len(files)), transform, what, batch)
    if unreadable:
        raise DataError(f"{len(unreadable)} images can't be read, such as {unreadable[0]}: fetch it anew")
    return features


def share(subject: EvalContext, items: Sequence[T], work: Callable[[T], R], what: str) -> list[R]:
    """work(item) of all items, in their order, on all ranks; each rank does its share. Small host objects.

    `work` calls no collective. Its UserErrors are raised on all ranks; GaveUp where `subject.give_up` says yes on one.
    """
    subject.begin()
    rank, world = distributed.rank(), distributed.world_size()
    results, gave_up = list[R](), False
    with distributed.raise_on_all_ranks():
        for item in tqdm(items[rank::world], what, leave=False, disable=distributed.hidden_bar(subject.progress)):
            results.append(work(item))
            gave_up = subject.give_up()
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
        raise DataError(f"{error}: fetch it anew") from None


def read_label_map(path: Path, size: tuple[int, int]) -> np.ndarray:
    """uint8 (h, w): the palette's indices, or the values of a grey image; `size` is the photo's (width, height).

    Raises DataError for what is no such image.
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
        raise DataError(f"{path} is no readable PNG: {' '.join(str(error).split())[:100]}") from None

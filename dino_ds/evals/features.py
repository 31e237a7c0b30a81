"""Features of labelled images, each rank computing its share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from dino_ds import distributed
from dino_ds.data.base import Source, UnreadableImage
from dino_ds.data.decode import load_image
from dino_ds.data.images import ValueRange
from dino_ds.data.workers import main_module_left_out, stop_workers, worker_options
from dino_ds.errors import DataError

_RAW_PIXELS = 32
BATCH = 64


@torch.no_grad()
def extract_features(
    describe: Callable[[Tensor], Tensor],
    source: Source,
    indices: Sequence[int],
    transform: Callable[[Image.Image], Tensor],
    device: torch.device,
    workers: int | None,
    give_up: Callable[[], bool] = lambda: False,
    progress: str | None = None,
    batch: int = BATCH,
    value_range: ValueRange | None = None,
) -> tuple[Tensor, Tensor, list[str]] | None:
    """describe: images (b, 3, h, w) on `device` -> (b, d). Returns features (n, d) and labels (n,), on `device`.

    Every rank must call it; every rank gets all rows, in the order of `indices`. Labels are -1 where there are none.
    Unreadable images are left out; the texts that name them are returned too. `give_up` is asked after each batch:
    None, on all ranks, where it has said yes on one. `progress` names a bar on rank 0. With `batch` 1 images may be of
    any sizes. Raises DataError where a rank has no image at all.
    """
    mine = list(indices)[distributed.rank() :: distributed.world_size()]
    loader = DataLoader(
        _Images(source, mine, transform, value_range), batch, collate_fn=collate, **worker_options(workers)
    )
    with main_module_left_out(unless_defines=source):
        batches = iter(loader)
    features, labels, bad, gave_up = [], [], list[str](), False
    hidden = distributed.hidden_bar(progress is not None)
    try:
        for images, targets, unreadable in tqdm(batches, progress, len(loader), leave=False, disable=hidden):
            bad += unreadable
            if len(images):
                features.append(describe(images.to(device)))
                labels.append(targets.to(device))
            gave_up = give_up()
            if gave_up:
                break
    finally:
        stop_workers(batches)
    # Agreed before the first collective of features: a rank that left would be waited for.
    found = distributed.gather_objects((sum(map(len, features)), bad, gave_up))
    if any(gave_up for _, _, gave_up in found):
        return None
    rows = [images for images, _, _ in found]
    if not all(rows):
        raise DataError(
            f"of {len(indices)} images to evaluate, the ranks could read {rows}; each needs one: fix the images, "
            f"or take more (--images) or fewer processes{_first([text for _, texts, _ in found for text in texts])}"
        )
    described, placed = torch.cat(features), torch.cat(labels)
    features.clear()  # or there are three copies below
    placed[:, 0] = placed[:, 0] * distributed.world_size() + distributed.rank()  # my i-th image's place in `indices`
    everybodys = [distributed.concatenate_across_ranks(rows) for rows in (described, placed)]
    order = everybodys[1][:, 0].argsort()
    return everybodys[0][order], everybodys[1][order, 1], [text for _, texts, _ in found for text in texts]


def _first(unreadable: list[str]) -> str:
    return f"; the first that can't be read is {unreadable[0]}" if unreadable else ""


def raw_pixels(images: Tensor) -> Tensor:
    """Images (b, 3, h, w) -> (b, 3 * 32 * 32) shrunken pixels: the baseline that any learning must beat."""
    size = min(_RAW_PIXELS, images.shape[-1])
    return F.adaptive_avg_pool2d(images.float(), size).flatten(1)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """What is drawn inside, such as by a loader for its workers, is not missing afterwards, also after an error."""
    others = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(others[0])
        np.random.set_state(others[1])


class _Images(Dataset[tuple[Tensor, int, int] | str]):
    def __init__(
        self,
        source: Source,
        indices: list[int],
        transform: Callable[[Any], Tensor],
        value_range: ValueRange | None,
    ) -> None:
        self._source, self._indices, self._transform, self._range = source, indices, transform, value_range
        labels = source.labels
        self._labels = [-1 if labels is None else labels[index] for index in indices]  # not millions to each worker

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, i: int) -> tuple[Tensor, int, int] | str:
        """Image, its place and label, or the text that names an unreadable one."""
        index = self._indices[i]
        try:
            return self._transform(load_image(self._source, index, self._range)), i, self._labels[i]
        except UnreadableImage as error:
            return str(error)


def collate(rows: list[tuple[Tensor, int, int] | str]) -> tuple[Tensor, Tensor, list[str]]:
    """Images (b, 3, h, w), places and labels (b, 2) of those that could be read, and the texts of the others."""
    good, bad = [row for row in rows if not isinstance(row, str)], [row for row in rows if isinstance(row, str)]
    if not good:
        return torch.empty(0), torch.empty(0, 2, dtype=torch.long), bad
    return torch.stack([row[0] for row in good]), torch.tensor([row[1:] for row in good]), bad

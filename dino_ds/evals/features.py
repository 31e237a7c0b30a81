"""Features of labelled images, each rank computing its share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dino_ds import distributed
from dino_ds.errors import DataError

_RAW_PIXELS = 32
_BATCH = 64


class LabelledImages(Protocol):
    """What is needed of a data source."""

    labels: list[int] | None

    def __len__(self) -> int: ...

    def load(self, index: int) -> Image.Image: ...

    def name(self, index: int) -> str: ...


def spread_indices(images: int, wanted: int) -> list[int]:
    """At most `wanted` of `images` indices, evenly spread, so that sorted class folders are all met."""
    count = min(images, wanted)
    return [i * images // count for i in range(count)]


@torch.no_grad()
def extract_features(
    describe: Callable[[Tensor], Tensor],
    source: LabelledImages,
    indices: Sequence[int],
    transform: Callable[[Image.Image], Tensor],
    device: torch.device,
    workers: int,
) -> tuple[Tensor, Tensor]:
    """describe: images (b, 3, h, w) on `device` -> (b, d). Returns features (len(indices), d) and labels, on `device`.

    Every rank must call it; every rank gets all rows, in an order that depends on the number of ranks.
    """
    mine = list(indices)[distributed.rank() :: distributed.world_size()]
    loader = DataLoader(_Images(source, mine, transform), batch_size=_BATCH, num_workers=workers)
    features, labels = [], []
    for images, targets in loader:
        features.append(describe(images.to(device)))
        labels.append(targets.to(device))
    if not features:
        raise DataError(
            f"{len(indices)} images to evaluate on {distributed.world_size()} ranks: give at least one each"
        )
    return distributed.concatenate_across_ranks(torch.cat(features)), distributed.concatenate_across_ranks(
        torch.cat(labels)
    )


def raw_pixels(images: Tensor) -> Tensor:
    """Images (b, 3, h, w) -> (b, 3 * 32 * 32) shrunken pixels: the baseline that any learning must beat."""
    size = min(_RAW_PIXELS, images.shape[-1])
    return F.adaptive_avg_pool2d(images.float(), size).flatten(1)


class _Images(Dataset[tuple[Tensor, int]]):
    def __init__(self, source: LabelledImages, indices: list[int], transform: Callable[[Image.Image], Tensor]) -> None:
        assert source.labels is not None
        self._source, self._indices, self._transform = source, indices, transform
        self._labels = source.labels

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        index = self._indices[i]
        return self._transform(self._source.load(index)), self._labels[index]

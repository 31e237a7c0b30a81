"""Tries data.transform on one image before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dino_ds.data.base import Source
from dino_ds.data.batches import LoaderBatch, LoaderOptions, MultiCropDataset
from dino_ds.data.multicrop import MultiCrop
from dino_ds.errors import ConfigError, DataError

if TYPE_CHECKING:
    from dino_ds.config.recipe import Recipe


def check_transform(recipe: Recipe, source: Source) -> None:
    """Raises ConfigError where a recipe's data.transform is not there, or draws random numbers of its own, and
    DataError where it fails on the first readable image."""
    if recipe.data.transform is None:
        return
    dataset = MultiCropDataset(source, MultiCrop.of(recipe), LoaderOptions.of(recipe))
    first, again = _crops(dataset), _crops(dataset)
    if not all(torch.equal(crops, again.crops[name]) for name, crops in first.crops.items()):
        raise ConfigError(
            f"data.transform {recipe.data.transform} made something else of the same crop when called again: draw all "
            "random numbers from rng, its second argument, so that runs can be repeated and resumed"
        )


def _crops(dataset: MultiCropDataset) -> LoaderBatch:
    batch = dataset.__getitems__([(0, 0)])
    if isinstance(batch, DataError):
        raise batch
    return batch

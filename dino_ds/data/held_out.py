"""Images that are held out of training: a share of them by a hash of their names, or a part of a source by index."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dino_ds.config.recipe import Recipe
from dino_ds.config.sections import DataSection
from dino_ds.data.base import Source
from dino_ds.data.image_set import name_of
from dino_ds.data.sources import build_source, training_source
from dino_ds.errors import ConfigError, DataError

_FORWARDED = ("read", "member", "listed_place", "file_bytes", "file_time")
"""Methods of one image's index, of which a source may lack some."""


class Part:
    """Some images of a source, a source itself, which can do what the whole one can. others: the rest of the images."""

    others: Part

    def __init__(self, whole: Source, indices: np.ndarray) -> None:
        self.whole, self._indices = whole, indices
        self.classes = whole.classes
        labels = whole.labels
        self.labels: Sequence[int] | None = None if labels is None else np.asarray(labels)[indices].tolist()

    def __len__(self) -> int:
        return len(self._indices)

    def load(self, index: int) -> Any:
        return self.whole.load(int(self._indices[index]))

    def name(self, index: int) -> str:
        return self.whole.name(int(self._indices[index]))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("whole", "others"):  # of an object that is being unpickled
            raise AttributeError(name)
        found = getattr(self.whole, name)
        return self._forwarded(found) if name in _FORWARDED else found

    def _forwarded(self, method: Callable[[int], Any]) -> Callable[[int], Any]:
        return lambda index: method(int(self._indices[index]))


def training_images(data: DataSection, share: float, as_listed: bool = False) -> Source:
    """The images of a recipe to train on, without those held out by eval.val_share. Raises ConfigError, DataError.

    as_listed: of a run that an earlier version began: as `split_off` has it, and parts of a mixture may overlap.
    """
    if not share:
        return training_source(data, may_overlap=as_listed)
    if data.mixture or data.balance != "none":
        raise ConfigError(
            "eval.val_share is for one source whose images are drawn equally often, not for data."
            f"{'mixture' if data.mixture else 'balance'}: give eval.val_root, a folder of other images"
        )
    return split_off(build_source(data.source, data.root, "train", data.download), data.root, share, as_listed)[0]


def held_out_images(recipe: Recipe, train: Source) -> Source | None:
    """The images of the held-out loss of a recipe whose `training_images` are `train`, or None without one. Raises
    DataError."""
    root, data = recipe.eval.val_root, recipe.data
    if isinstance(train, Part) and recipe.eval.val_share:
        return train.others
    return None if root is None else build_source(data.source, root, "train", data.download)


def split_off(source: Source, root: str | None, share: float, as_listed: bool = False) -> tuple[Part, Part]:
    """The images to train on and those held out: about `share`, the same ones whatever else is added or removed.

    What decides is a hash of an image's name below `root`; of a list its place, or `as_listed` its line. Raises
    DataError where nothing is left on one side.
    """
    hashes = (
        hashlib.blake2b(name_of(source, i, root, as_listed), digest_size=8, person=b"held out").digest()
        for i in range(len(source))
    )
    values = np.fromiter((int.from_bytes(digest, "little") for digest in hashes), np.uint64, len(source))
    held_out = values < np.uint64(int(share * 2**64))
    parts = Part(source, np.flatnonzero(~held_out)), Part(source, np.flatnonzero(held_out))
    if not all(map(len, parts)):
        raise DataError(
            f"eval.val_share {share:g} of {len(source)} images holds {len(parts[1])} out and leaves {len(parts[0])}: "
            "give another share, or images of their own with eval.val_root"
        )
    parts[0].others = parts[1]
    return parts

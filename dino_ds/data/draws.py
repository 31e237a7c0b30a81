"""Draws images at unequal rates: by the shares of sources, and balanced over groups within a source.

Stateless: the images of an epoch follow from (seed, epoch) and its length alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dino_ds.basics.hashing import crop_seed, mix

_PASSES, _SHUFFLE = -3, -1
"""Reserved negative image indices that seed the order of a pass and of an epoch."""


class Draws:
    """Order of images from several parts, each with a share of every epoch; groups of a part are drawn equally often.

    A part draws from its groups in turn, and a group draws all of its images, in a random order, before it repeats one.
    So the counts of a part and of its groups are exact to one image an epoch, and after any epoch the images of a group
    have been drawn equally often, to one.

    Args:
        shares: share of each part.
        parts: (n,) int64, part of each image.
        groups: (n,) int64, group of each image, numbered through part after part; -1 = never drawn.
    """

    def __init__(self, shares: Sequence[Fraction], parts: np.ndarray, groups: np.ndarray) -> None:
        self._shares, self._groups = tuple(shares), groups
        drawn = np.flatnonzero(groups >= 0)
        self._sizes = np.bincount(groups[drawn])
        part_of_group = np.zeros(len(self._sizes), np.int64)
        part_of_group[groups[drawn]] = parts[drawn]
        self._counts = np.bincount(part_of_group, minlength=len(shares))
        self._part_of_group = part_of_group
        self._place = np.arange(len(self._sizes)) - np.searchsorted(part_of_group, part_of_group)
        self._drawn = drawn

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # loader processes receive the indices of their images

    @property
    def digest(self) -> str:
        """A hash of the group of each image."""
        return hashlib.blake2b(np.ascontiguousarray(self._groups).tobytes(), digest_size=16).hexdigest()

    def counts(self, length: int) -> np.ndarray:
        """Images of each part, (parts,) int64, in an epoch of `length`, by largest remainders."""
        exact = [share * length for share in self._shares]
        whole = [int(count) for count in exact]
        rest = sorted(range(len(exact)), key=lambda part: (whole[part] - exact[part], part))
        for part in rest[: length - sum(whole)]:
            whole[part] += 1
        return np.array(whole, np.int64)

    def epoch(self, seed: int, epoch: int, length: int) -> Tensor:
        """Images of an epoch in order, (length,) int64; the r-th repeat of image i is i + r * images."""
        counts = self.counts(length)
        times = self._drawn_until(seed, (epoch + 1) * counts) - self._drawn_until(seed, epoch * counts)
        first = np.repeat(np.cumsum(times) - times, times)
        repeats = np.arange(len(first)) - first
        images = torch.from_numpy(np.repeat(self._drawn, times) + repeats * len(self._groups))
        generator = torch.Generator().manual_seed(crop_seed(seed, epoch, _SHUFFLE) >> 1)
        return images[torch.randperm(len(images), generator=generator)]

    def _drawn_until(self, seed: int, counts: np.ndarray) -> np.ndarray:
        """Times that each drawn image has been drawn once the parts have drawn `counts` images, (parts,)."""
        begun = self._counts[self._part_of_group]
        of_group = (counts[self._part_of_group] + begun - 1 - self._place) // begun  # group after group
        passes, rest = np.divmod(of_group, self._sizes)
        group = self._groups[self._drawn]
        return passes[group] + (self._places_in_pass(seed, passes) < rest[group])

    def _places_in_pass(self, seed: int, passes: np.ndarray) -> np.ndarray:
        """Position of each drawn image in its group's order of pass number `passes`, (groups,)."""
        group = self._groups[self._drawn]
        start = crop_seed(seed, 0, _PASSES) - (1 << 63)
        keys = mix(mix(torch.from_numpy(passes[group]) ^ start) ^ torch.from_numpy(self._drawn)).numpy()
        order = np.lexsort((keys, group))
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order)) - (np.cumsum(self._sizes) - self._sizes)[group[order]]
        return places


def draws_in(source: object) -> Draws | None:
    """The `Draws` of a source, or None where all images are drawn equally often."""
    draws = getattr(source, "draws", None)
    return draws if isinstance(draws, Draws) else None


def _nothing() -> None:
    return None

"""How often each image is drawn where not all are drawn equally often: shares of sources, and balance within them.

Stateless: what an epoch draws follows from (seed, epoch) and its length alone.
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
"""In the place of an image's index, which no image has: seeds of the order of a pass, and of an epoch."""


class Draws:
    """Images of several parts, each with a share of every epoch; within a part all groups are drawn equally often.

    `parts` (n,) int64 and `groups` (n,) int64 say where each image belongs; groups are numbered through, part after
    part, and an image of group -1 is never drawn. Group after group gives an image, and each group goes through all of
    its images, in an order of its own, before it begins again: so the images of a part are exact to one an epoch, its
    groups too, and at the end of any epoch the images of a group were drawn equally often, to one.
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
        return _nothing, ()  # loader processes get the indices of their images: they draw none

    @property
    def digest(self) -> str:
        """A hash of the group of each image."""
        return hashlib.blake2b(np.ascontiguousarray(self._groups).tobytes(), digest_size=16).hexdigest()

    def most_repeats(self, part: int, length: int) -> float:
        """How often the images of the smallest group of a part are drawn in an epoch of `length` images."""
        groups = self._part_of_group == part
        return float(self.counts(length)[part] / self._counts[part] / self._sizes[groups].min())

    def counts(self, length: int) -> np.ndarray:
        """(parts,) int64: images of each part in an epoch of `length`, by largest remainders."""
        exact = [share * length for share in self._shares]
        whole = [int(one) for one in exact]
        rest = sorted(range(len(exact)), key=lambda part: (whole[part] - exact[part], part))
        for part in rest[: length - sum(whole)]:
            whole[part] += 1
        return np.array(whole, np.int64)

    def epoch(self, seed: int, epoch: int, length: int) -> Tensor:
        """(length,) int64, the images of an epoch in their order; the r-th repeat of image i is i + r * images."""
        counts = self.counts(length)
        times = self._drawn_until(seed, (epoch + 1) * counts) - self._drawn_until(seed, epoch * counts)
        first = np.repeat(np.cumsum(times) - times, times)
        repeats = np.arange(len(first)) - first
        images = torch.from_numpy(np.repeat(self._drawn, times) + repeats * len(self._groups))
        generator = torch.Generator().manual_seed(crop_seed(seed, epoch, _SHUFFLE) >> 1)
        return images[torch.randperm(len(images), generator=generator)]

    def _drawn_until(self, seed: int, counts: np.ndarray) -> np.ndarray:
        """(drawn images,) how often each was drawn once every part has given `counts` images."""
        begun = self._counts[self._part_of_group]
        of_group = (counts[self._part_of_group] + begun - 1 - self._place) // begun  # group after group
        passes, rest = np.divmod(of_group, self._sizes)
        group = self._groups[self._drawn]
        return passes[group] + (self._places_in_pass(seed, passes) < rest[group])

    def _places_in_pass(self, seed: int, passes: np.ndarray) -> np.ndarray:
        """(drawn images,) place of each in the order of its group, which is in its pass number `passes`."""
        group = self._groups[self._drawn]
        start = crop_seed(seed, 0, _PASSES) - (1 << 63)
        keys = mix(mix(torch.from_numpy(passes[group]) ^ start) ^ torch.from_numpy(self._drawn)).numpy()
        order = np.lexsort((keys, group))
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order)) - (np.cumsum(self._sizes) - self._sizes)[group[order]]
        return places


def draws_in(source: object) -> Draws | None:
    """How often each image of a source is drawn, or None where all are equally often."""
    found = getattr(source, "draws", None)
    return found if isinstance(found, Draws) else None


def _nothing() -> None:
    return None

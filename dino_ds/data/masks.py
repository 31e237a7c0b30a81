"""Draws the patches of a crop that are hidden from the student, from one seed a crop; and which images an epoch has if
they are drawn at unequal rates, from (seed, epoch).

Source: facebookresearch/dinov2 `data/masking.py` (MaskingGenerator) and `data/collate.py`. There exactly half of a
batch's crops are masked, with one ratio from each equal bin. Here each crop is masked with a probability and draws its
ratio from the whole range, so that its mask follows from (seed, epoch, index of the image, number of the crop) alone.
The law of one crop is that of the reference in a large batch (DINOv3's takes the upper edges of the bins).
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dino_ds.basics.seeds import crop_seed, mix
from dino_ds.config.crops import CropGroup, Masks
from dino_ds.config.recipe import Recipe

_PASSES, _SHUFFLE = -3, -1
"""Reserved negative image indices that seed the order of a pass and of an epoch."""
_LOG_ASPECT = math.log(1 / 0.3)
_MIN_AREA = 4
"""Smallest number of patches of a block, if as many are still to be hidden."""
_TRIES = 10
"""Attempts at a block, after which the mask is left as it is."""


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


@dataclass(frozen=True)
class MaskOptions:
    """The masks of a crop group.

    A crop is masked with probability `share`; int(patches * ratio) of its patches are to be hidden, the ratio drawn
    uniformly from the range `ratio`. Law "dinov2" hides blocks, which may hide fewer; "dinov3" adds single patches at
    random. grid: (rows, columns) of a crop's patches.
    """

    law: Literal["dinov2", "dinov3"]
    share: float
    ratio: tuple[float, float]
    grid: tuple[int, int]

    @staticmethod
    def of(recipe: Recipe, groups: Sequence[CropGroup] | None = None) -> dict[str, MaskOptions]:
        """Options by name of a recipe's masked groups; `groups`: of one of its resolutions, by default the largest.

        Raises ConfigError for an unknown backbone.
        """
        crops = recipe.crops
        if crops.mask == "none":
            return {}
        stride = recipe.model.spec().stride
        sides = {group.name: group.size // stride for group in groups or recipe.groups if group.masked}
        return {
            name: MaskOptions(crops.mask, crops.mask_share, crops.mask_ratio, (side, side))
            for name, side in sides.items()
        }


def draw_mask(options: MaskOptions, seed: int) -> np.ndarray:
    """Draw the hidden patches of a crop: (rows * columns,) bool, row by row. The seed alone decides."""
    rng = random.Random(seed)
    mask = np.zeros(options.grid, dtype=bool)
    flat = mask.reshape(-1)
    if rng.random() >= options.share:
        return flat
    missing = int(mask.size * rng.uniform(*options.ratio))
    # The reference's largest block is half of the crop by `0.5 * side // patch * side // patch`, which halves the
    # number of rows and rounds down: 18 x 37 patches of 37 x 37. Kept, so that masks follow its law on odd grids too.
    largest = options.grid[0] // 2 * options.grid[1]
    while missing and (added := add_block(mask, min(missing, largest), rng)):
        missing -= added
    if missing and options.law == "dinov3":
        flat[rng.sample(np.flatnonzero(~flat).tolist(), missing)] = True
    return flat


def add_block(mask: np.ndarray, most: float, rng: random.Random) -> int:
    """Hide one more block of `mask` (rows, columns), at most `most` new patches, and return their number; 0: no block.

    The block's area is drawn uniformly between 4 and `most`, its height / width log-uniformly between .3 and 1 / .3.
    The block is smaller than the crop in both directions, and may overlap others if it hides at least one new patch.
    """
    rows, columns = mask.shape
    for _ in range(_TRIES):
        area = rng.uniform(_MIN_AREA, most)
        aspect = math.exp(rng.uniform(-_LOG_ASPECT, _LOG_ASPECT))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if height < rows and width < columns:
            top, left = rng.randint(0, rows - height), rng.randint(0, columns - width)
            block = mask[top : top + height, left : left + width]
            added = height * width - int(np.count_nonzero(block))
            if 0 < added <= most:
                block[:] = True
                return added
    return 0


def with_rows(mask: Tensor) -> dict[str, Tensor]:
    """Masks (v * b, n) bool of v * b crops, on the host, as an entry of `Masks`."""
    rows = mask.flatten().nonzero().squeeze(1)
    return {"mask": mask, "rows": rows, "weights": 1 / mask.sum(1)[rows // mask.shape[1]].float()}


def draw_masks(groups: Sequence[CropGroup], masks: Mapping[str, MaskOptions], seeds: Sequence[int]) -> Masks:
    """Masks of a micro-batch, on the host. masks: options of masked groups by name; seeds: one for each image."""
    drawn, first = {}, 0
    for group in groups:
        if options := masks.get(group.name):
            numbers = range(first, first + group.count)  # among all crops of an image, whose own stream is `seed`
            flat = [draw_mask(options, crop_seed(seed, -1, number)) for number in numbers for seed in seeds]
            drawn[group.name] = with_rows(torch.from_numpy(np.stack(flat)))
        first += group.count
    return drawn


def synthetic_masks(recipe: Recipe, images: int, device: torch.device) -> Masks:
    """A recipe's masks for synthetic crops; always the same."""
    options = MaskOptions.of(recipe)
    drawn = draw_masks(recipe.groups, options, range(images))
    return {name: {key: tensor.to(device) for key, tensor in mask.items()} for name, mask in drawn.items()}

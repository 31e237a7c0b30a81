"""Draws the patches of a crop that are hidden from the student, from one seed a crop.

Source: facebookresearch/dinov2 `data/masking.py` (MaskingGenerator) and `data/collate.py`. There exactly half of a
batch's crops are masked, with one ratio from each equal bin (in DINOv3 its upper edge). Here each crop is masked with a
probability and draws its ratio from the whole range, so that its mask follows from (seed, epoch, index of the image,
number of the crop) alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dino_ds.basics.seeds import crop_seed
from dino_ds.config.crops import CropGroup, Masks
from dino_ds.config.recipe import Recipe

_LOG_ASPECT = math.log(1 / 0.3)


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
        how = crops.mask, crops.mask_share, crops.mask_ratio
        sides = {group.name: group.size // stride for group in groups or recipe.groups if group.masked}
        return {name: MaskOptions(*how, (side, side)) for name, side in sides.items()}


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
    for _ in range(10):
        area = rng.uniform(4, most)
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


def synthetic_masks(recipe: Recipe, images: int, device: torch.device) -> Masks:
    """A recipe's masks for synthetic crops; always the same."""
    options = MaskOptions.of(recipe)
    drawn = draw_masks(recipe.groups, options, range(images))
    return {name: {key: tensor.to(device) for key, tensor in mask.items()} for name, mask in drawn.items()}

"""Masks: the reference's laws, one mask an image whoever loads it, and their way to the device."""

from __future__ import annotations

import itertools
import math
import random
from contextlib import closing
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from dino_ds.config.crops import dino_groups
from dino_ds.config.loading import load_recipe
from dino_ds.data import multicrop as masks_module
from dino_ds.data.batches import LoaderOptions
from dino_ds.data.loader import DevicePrefetcher, Loader
from dino_ds.data.multicrop import MaskOptions, MultiCrop, add_block, draw_mask, with_rows
from tests.data.test_loader import CROPS, START, Noise
from tests.reference import golden_v2, golden_v2_meta

RECORDED = golden_v2_meta()["masks"]
DRAWS = 3000
SIGMAS = 4
"""Allowed deviation in units of the sampling error of our DRAWS crops and of those recorded."""
LEVELS = np.array([0.05, 0.25, 0.5, 0.75, 0.95])
"""The recorded quantiles between the smallest and the largest."""


def options_of(name: str, share: float = 1.0) -> MaskOptions:
    side = math.isqrt(RECORDED[name]["patches"])
    return MaskOptions(name.partition(".")[0], share, (0.1, 0.5), (side, side))


@cache
def hidden_parts(options: MaskOptions) -> np.ndarray:
    """(DRAWS,), of each crop's patches."""
    return np.array([draw_mask(options, seed).mean() for seed in range(DRAWS)])


def of_both(recorded: int) -> float:
    """1 / sqrt(n) of the difference between a mean of our crops and one of so many recorded ones."""
    return math.sqrt(1 / DRAWS + 1 / recorded)


def assert_quantiles(values: np.ndarray, recorded: list[float], error: float, more: float = 0.0) -> None:
    """Recorded quantiles stand at their levels in our distribution. It has steps, whole patches, so a level may be any
    of its step's. error: 1 / sqrt(n); more: allowed besides."""
    below, upto = ([(values + sign * 1e-4 <= q).mean() for q in recorded[1:-1]] for sign in (1, -1))  # four digits
    allowed = SIGMAS * error * np.sqrt(LEVELS * (1 - LEVELS)) + more
    assert (np.array(below) - allowed <= LEVELS).all() and (np.array(upto) + allowed >= LEVELS).all()


@pytest.mark.parametrize("name", RECORDED)
def test_hidden_parts_of_masked_crops_are_distributed_as_the_reference_s(name):
    """An even range of width .4 has the standard deviation .1155 and the kurtosis 1.8. The reference takes the upper
    edge of a ratio's bin in dinov3: its mean is half a bin higher, and a quantile's level is up to a bin away."""
    found, options = RECORDED[name], options_of(name)
    ratios = hidden_parts(options)
    masked = found["masked_crops_per_batch"][0]
    bins = 1 / masked if options.law == "dinov3" else 0.0
    error = of_both(masked * found["batches"])
    expected = found["ratio_of_masked_crops_mean"] - 0.4 * bins / 2
    assert ratios.mean() == pytest.approx(expected, abs=0.1155 * SIGMAS * error)
    assert ratios.std() == pytest.approx(found["ratio_sd"], abs=0.1155 * math.sqrt(0.8 / 4) * SIGMAS * error)
    assert_quantiles(ratios, found["ratio_of_masked_crops_quantiles"], error, bins)


@pytest.mark.parametrize("name", RECORDED)
def test_first_blocks_have_the_reference_s_areas_and_shapes(name):
    """How many blocks were recorded is not: the error is that of 1,000."""
    found, options = RECORDED[name], options_of(name)
    shapes = [_first_block(options, found["first_block_max_patches"], seed) for seed in range(DRAWS)]
    heights, widths = np.array(shapes).T
    areas = heights * widths / found["patches"]
    assert_quantiles(areas, found["first_block_area_share_quantiles"], of_both(1000))
    assert_quantiles(heights / widths, found["first_block_height_over_width_quantiles"], of_both(1000))
    assert (heights < options.grid[0]).all() and (widths < options.grid[1]).all()


def _first_block(options: MaskOptions, most: float, seed: int) -> tuple[int, int]:
    mask = np.zeros(options.grid, dtype=bool)
    assert add_block(mask, most, random.Random(seed)) == mask.sum() > 0
    return int(mask.any(1).sum()), int(mask.any(0).sum())


@pytest.mark.parametrize(
    ("side", "largest"),
    [*((math.isqrt(found["patches"]), found["max_num_patches"]) for found in RECORDED.values()), (7, 21), (37, 666)],
)
def test_the_largest_block_is_half_of_the_rows_rounded_down(monkeypatch, side, largest):
    """As recorded; for odd sides, the reference's expression by hand: 0.5 * 518 // 14 * 518 // 14 = 666."""
    allowed = []
    monkeypatch.setattr(masks_module, "add_block", lambda mask, most, rng: allowed.append(most) or 0)
    draw_mask(MaskOptions("dinov2", 1.0, (0.9, 0.9), (side, side)), 0)
    assert allowed == [largest]


@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (4, 4), (7, 7), (12, 5), (37, 37)])
def test_counts_of_the_exact_law_are_those_wanted_and_of_the_blocks_no_more(grid):
    patches = grid[0] * grid[1]
    for ratio in (0.1, 0.25, 0.5, 0.9):
        blocks = MaskOptions("dinov2", 1.0, (ratio, ratio), grid)
        for seed in range(20):
            mask = draw_mask(blocks, seed)
            exact = draw_mask(replace(blocks, law="dinov3"), seed)
            assert mask.shape == exact.shape == (patches,) and mask.dtype == exact.dtype == bool
            assert mask.sum() <= exact.sum() == int(patches * ratio)
            assert not (mask & ~exact).any()


def test_rows_and_weights_are_the_reference_s():
    recorded = golden_v2("masks")
    names = [name.removesuffix(".indices") for name in recorded if name.endswith(".indices")]
    assert len(names) == 4
    for name in names:
        entry = with_rows(recorded[f"{name}.masks"].bool())
        assert torch.equal(entry["rows"], recorded[f"{name}.indices"])
        assert torch.equal(entry["weights"], recorded[f"{name}.weights"])
    nothing = with_rows(torch.zeros(4, 9, dtype=torch.bool))
    assert nothing["rows"].shape == nothing["weights"].shape == (0,)
    assert (nothing["rows"].dtype, nothing["weights"].dtype) == (torch.int64, torch.float32)


MASKS = {"global": MaskOptions("dinov2", 0.5, (0.1, 0.5), (8, 8))}
MASKED = MultiCrop(CROPS.groups, "low_res", MASKS)


def load(count, crops=MASKED, source=None, start=START, **options):
    loader = Loader(source or Noise(), crops, LoaderOptions(**{"global_batch": 8, "micro_batch": 8} | options), start)
    with closing(DevicePrefetcher(loader, torch.device("cpu"))) as fed:
        return list(itertools.islice(fed, count))


def by_image(some) -> dict[tuple[int, int], list[list[bool]]]:
    """(epoch, index) -> the masks of the image's crops."""
    masks = {}
    for batch in some:
        for row, index in enumerate(batch.indices.tolist()):
            masks[batch.epoch, index] = batch.masks["global"]["mask"].unflatten(0, (2, -1))[:, row].tolist()
    return masks


def test_an_image_has_its_mask_whoever_loads_it():
    alone = by_image(load(6))
    assert len({str(masks) for masks in alone.values()}) > 20  # of 48, of which a quarter has no masked crop
    assert any(first != second for first, second in alone.values())
    ranks = [load(12, micro_batch=2, rank=rank, world_size=2) for rank in (0, 1)]
    assert by_image(itertools.chain(*ranks)) == {key: alone[key] for key in list(alone)[:48]}
    assert by_image(load(6, augment="device")) == alone
    assert by_image(load(6, source=Noise(broken=(3, 4)))) == alone
    more = MultiCrop(dino_groups(8, (0.4, 1.0), 4, (0.1, 0.4), 3), "low_res", MASKS)
    assert by_image(load(6, crops=more)) == alone
    assert by_image(load(6, seed=1)).items() != alone.items()
    assert alone[0, 0] != alone[1, 0]  # another epoch


def test_crops_are_those_of_a_run_without_masks():
    for masked, plain in zip(load(2), load(2, crops=CROPS), strict=True):
        assert plain.masks == {}
        for name, crops in plain.crops.items():
            assert all(torch.equal(a, b) for a, b in zip(crops, masked.crops[name], strict=True))


def test_a_recipe_s_masks():
    changes = {"crops.mask": "dinov3", "crops.mask_ratio": "0.2,0.4", "crops.mask_share": "0.7"}
    recipe = load_recipe(None, {**changes, "objective.ibot_weight": "1", "crops.global_size": "160"})
    assert MaskOptions.of(recipe) == {"global": MaskOptions("dinov3", 0.7, (0.2, 0.4), (10, 10))}
    assert MaskOptions.of(load_recipe(None, {})) == {} == MultiCrop.of(load_recipe(None, {})).masks

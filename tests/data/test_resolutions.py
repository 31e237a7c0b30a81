"""Mixed resolutions: every step draws one, the same for all ranks, micro-batches and loader processes."""

from __future__ import annotations

import itertools
import math
from contextlib import closing

import pytest
import torch

from dino_ds.config.crops import CropGroup, Resolution, crop_sizes
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.data.batches import LoaderBatch, LoaderOptions, augmented_crops
from dino_ds.data.feed import Position
from dino_ds.data.loader import DevicePrefetcher, Loader, ResumableSampler, draw_resolution
from dino_ds.data.multicrop import MultiCrop, to_tensor, with_rows
from dino_ds.data.normalization import IMAGENET
from dino_ds.errors import ConfigError
from tests.data.test_loader import BOTH, START, Noise

IMAGES, GLOBAL = 34, 8
WORDS = "32/16:0.3,48/16:0.5,64/32:0.2"
TINY = {"data.global_batch": str(GLOBAL), "model.patch_size": "8", "crops.num_local": "2", "crops.global_size": "32",
        "crops.local_size": "16", "crops.mask": "dinov3", "objective.ibot_weight": "1"}  # fmt: skip


def recipe_of(words: str = WORDS, **more: str) -> Recipe:
    return load_recipe(None, TINY | {"crops.resolutions": words} | more)


def batches(count: int, micro: int = GLOBAL, rank: int = 0, world: int = 1, workers: int = 0, start=START):
    recipe = recipe_of()
    options = LoaderOptions.of(recipe, micro_batch=micro, rank=rank, world_size=world, workers=workers)
    with closing(Loader(Noise(IMAGES, side=80), MultiCrop.of(recipe), options, start)) as loader:
        return list(itertools.islice(loader, count))


def side(batch: LoaderBatch) -> int:
    return batch.crops["global"].shape[-2]


def by_image(found: list[LoaderBatch]) -> dict[tuple[int, int], list[torch.Tensor]]:
    """(epoch, index) -> crops, and the masks of the two global ones."""
    images = {}
    for batch in found:
        crops = augmented_crops(batch)
        masks = batch.masks["global"]["mask"].unflatten(0, (2, -1))
        for row, index in enumerate(batch.indices.tolist()):
            own = [crop[row] for group in crops.values() for crop in group]
            images[batch.epoch, index] = [*own, masks[:, row]]
    return images


@pytest.mark.slow
def test_ranks_micro_batches_and_workers_share_out_what_one_process_has():
    whole = batches(5)
    assert len({side(batch) for batch in whole}) > 1
    shared = [batches(10, 2, rank, 2, workers=rank) for rank in (0, 1)]
    assert [side(b) for b in shared[0]] == [side(b) for b in shared[1]] == [side(b) for b in whole for _ in (0, 1)]
    for batch in shared[1]:  # of a loader process
        entry = batch.masks["global"]
        assert all(torch.equal(entry[key], value) for key, value in with_rows(entry["mask"]).items())
    ours, theirs = by_image(whole), by_image(shared[0] + shared[1])
    assert ours.keys() == theirs.keys()
    for key, tensors in ours.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, theirs[key], strict=True))


def test_a_resume_inside_an_epoch_gives_the_same_sizes():
    straight = [side(batch) for batch in batches(9)]
    position = Position()
    for done in range(6):
        assert [side(b) for b in batches(9 - done, start=position)] == straight[done:]
        position = position.advance(GLOBAL, per_epoch=32)


def test_a_step_has_one_size_after_the_global_batch_has_changed():
    """An epoch of 32 goes on at image 12 with steps of 8, two micro-batches each: one step lies in two epochs."""
    sampler = ResumableSampler(IMAGES, LoaderOptions.of(recipe_of(), micro_batch=4), Position(0, 12))
    numbers = [keys.resolution for keys in itertools.islice(sampler, 44)]
    assert numbers[0:44:2] == numbers[1:44:2] and len(set(numbers)) == 3


def test_the_shares_come_out_over_many_steps():
    """Of 20,000 steps in 20 epochs: within 4 standard deviations; neighboring steps are independent."""
    shares = [one.share for one in recipe_of().resolutions]
    drawn = [draw_resolution(shares, 3, epoch, step) for epoch in range(20) for step in range(1000)]
    for number, share in enumerate(shares):
        assert abs(drawn.count(number) - 20000 * share) < 4 * math.sqrt(20000 * share * (1 - share))
    pairs = sum(a == b == 1 for a, b in itertools.pairwise(drawn))
    assert abs(pairs - 20000 * 0.25) < 4 * math.sqrt(20000 * 0.25 * 0.75)
    assert drawn != [draw_resolution(shares, 4, epoch, step) for epoch in range(20) for step in range(1000)]


def test_groups_are_those_of_the_largest():
    recipe = recipe_of()
    assert crop_sizes(recipe.groups) == [64, 64, 32, 32]
    assert recipe.batch_bytes(2) == 2 * 3 * (2 * 64**2 + 2 * 32**2)
    assert [one.masks["global"].grid[0] for one in MultiCrop.of(recipe).resolutions] == [4, 6, 8]
    gram = recipe_of("48/16/96:0.5,64/16/64:0.5", **{"gram.weight": "2", "gram.crop_size": "64"})
    assert crop_sizes(gram.groups) == [48, 48, 16, 16, 96, 96]
    assert gram.resolutions[0] == Resolution(48, 16, 96, 0.5)


@pytest.mark.parametrize(
    ("words", "more", "message"),
    [
        ("32/16:0.3", {}, "there is one; set crops.global_size"),
        ("32/16:0.3,48/16:0.3", {}, "the shares sum to 0.6, and must sum to 1"),
        ("32/16:0.5,48:0.5", {}, "'48:0.5' is not GLOBAL/LOCAL:SHARE or GLOBAL/LOCAL/GRAM:SHARE"),
        ("32/16:0.5,50/16:0.5", {}, "50/16:0.5: global size 50 is not a multiple of the patch size 8"),
        ("32/16/64:0.5,48/16/64:0.5", {}, "has a Gram size, and Gram anchoring has no crops of its own here"),
        ("32/16:0.5,48/16:0.5", {"gram.weight": "1", "gram.crop_size": "64"}, "has no Gram size, and gram.crop_size"),
    ],
)
def test_refused_in_one_line(words, more, message):
    with pytest.raises(ConfigError) as caught:
        recipe_of(words, **more)
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


@BOTH
def test_a_group_without_augmentation_is_cut_and_flipped_only(augment):
    gram, source = CropGroup("gram", 1, 12, (1.0, 1.0), teachers=("ema",), student=False, augmented=False), Noise(8)
    crops = MultiCrop([gram], "low_res")
    with closing(Loader(source, crops, LoaderOptions(global_batch=8, micro_batch=8, augment=augment), START)) as loader:
        batch = next(DevicePrefetcher(loader, torch.device("cpu")))
    [found], whole = batch.crops["gram"], 0
    for index, crop in zip(batch.indices.tolist(), found, strict=True):
        image = to_tensor(source.load(index), IMAGENET)
        whole += any(torch.allclose(crop, some, atol=1e-5) for some in (image, image.flip(2)))
    drawn = [crops.sample(12, 12, seed)[0] for seed in range(100)]
    assert whole > 0 and {crop.flip for crop in drawn} == {True, False}
    assert all(not (crop.jitter or crop.gray or crop.solarize or crop.blur_radius) for crop in drawn)

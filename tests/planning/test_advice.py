"""The rules of `dino-ds advise`: each row has its source, changes in one direction only, and is a recipe that loads."""

from __future__ import annotations

import itertools

import pytest

from dino_ds.config.crop_checks import fitting_sizes
from dino_ds.config.loading import load_recipe
from dino_ds.planning.advice import RULE, advise, expected_knn
from dino_ds.planning.advise import with_known_network
from dino_ds.planning.rules import (
    LEAST_IMAGES,
    Data,
    Gpus,
    batch_size,
    continued_length,
    epochs,
    frozen_weights,
    momentum,
    prototypes,
    recipe_for,
    released_weights,
    small_momentum,
    useful_gpus,
)

COUNTS = [100, 101, 300, 1000, 2999, 10_000, 49_999, 50_000, 99_999, 100_000, 999_999, 10**6, 1_280_000, 10**7, 10**9]
SOURCES = ("arXiv", "dino", "LightlyTrain", "lightly", "docs/", RULE, "released weights")
CARD = {"none": Gpus(), "one of 24 GB": Gpus(1, 23.6), "three of 8 GB": Gpus(3, 7.6), "eight of 80 GB": Gpus(8, 79.1)}
CARD["64 of 80 GB"] = Gpus(64, 79.1)


@pytest.mark.parametrize("gpus", CARD.values(), ids=CARD)
def test_every_advice_has_a_reason_and_is_a_recipe_that_train_accepts(gpus):
    for images, side, channels in itertools.product(COUNTS[::3], (8, 32, 95, 96, 375), (1, 6)):
        data = Data(images, side, channels)
        rows = advise(data, gpus)
        assert all(any(source in row.why for source in SOURCES) for row in rows), rows
        assert any(source in "".join(expected_knn(data, gpus)) for source in SOURCES)
        flags = {name: value for row in rows for name, value in row.flags.items()}
        assert len(flags) == sum(len(row.flags) for row in rows), "two rows set one key"
        recipe = load_recipe(recipe_for(data, gpus), {"data.source": "folder", "data.root": "x", **flags})
        recipe.check_learning_rates()
        recipe.check_batch()
        crops = recipe.crops
        (said,) = [row.value for row in rows if row.setting == "crops"]
        assert said == f"2 x {crops.global_size} + {crops.num_local} x {crops.local_size} px"
        assert recipe.data.global_batch % max(1, gpus.count) == 0 or not gpus.count
        assert recipe.model.in_chans == (3 if data.color else channels)


def _falls(values):
    return all(a >= b for a, b in itertools.pairwise(values))


def test_more_images_are_seen_less_often_and_more_in_all():
    """Also where released weights are continued, by a quarter of those from scratch."""
    passes = [epochs(images) for images in COUNTS]
    assert _falls(passes)
    lengths = [(n, continued_length(n)) for n in COUNTS if n < 1_280_000]
    assert _falls([seen / n for n, seen in lengths]) and _falls([seen for _, seen in lengths][::-1])
    assert all(4 * seen == pytest.approx(epochs(n) * n, rel=0.01) for n, seen in lengths)
    # Each is rounded to whole epochs.
    seen = zip(passes, COUNTS, strict=True)
    assert all((b + 0.5) * m >= (a - 0.5) * n for (a, n), (b, m) in itertools.pairwise(seen))


def test_epochs_from_scratch_are_in_the_range_of_lightly_train():
    for images, low, high in [(1000, 200, 2000), (50_000, 200, 2000), (300_000, 100, 500), (20_000_000, 5, 100)]:
        assert low <= epochs(images) <= high


@pytest.mark.parametrize("gpus", [1, 3, 8, 64])
def test_batches_grow_with_the_images_and_leave_several_steps_an_epoch(gpus):
    used = [Gpus(useful_gpus(Data(images, 375), Gpus(gpus, 23.6)), 23.6) for images in COUNTS]
    batches = [batch_size(Data(images, 375), some) for images, some in zip(COUNTS, used, strict=True)]
    assert _falls(batches[::-1]) and all(batch % some.count == 0 for batch, some in zip(batches, used, strict=True))
    assert all(batch <= max(images / 8, 32) for images, batch in zip(COUNTS, batches, strict=True))
    assert all(batch <= LEAST_IMAGES for batch in batches[:1])


@pytest.mark.parametrize(
    ("images", "offered", "used"),
    [(120, 8, 1), (1000, 8, 2), (3000, 8, 8), (100_000, 12, 8), (100_000, 64, 32), (2_000_000, 64, 64), (120, 0, 0)],
)
def test_each_gpu_gets_a_sensible_share_of_a_step(images, offered, used):
    gpus = Gpus(offered, 79.1)
    assert useful_gpus(Data(images, 375), gpus) == used
    if used:
        assert batch_size(Data(images, 375), Gpus(used, 79.1)) // used >= 32


def test_prototypes_grow_with_the_images():
    found = [prototypes(images) for images in COUNTS]
    assert _falls(found[::-1]) and found[0] == 1024 and found[-1] == 65536


def test_momentum_is_dino_s_at_its_batch_higher_for_smaller_ones_and_lower_in_short_runs():
    assert momentum(512, 250_000) == 0.996
    assert _falls([momentum(batch, 250_000) for batch in (16, 32, 64, 128, 256, 512, 1024)])
    assert _falls([momentum(256, steps) for steps in (250_000, 50_000, 20_000, 10_000, 100)])
    assert momentum(256, 100) == 0.99


def test_momentum_of_the_small_recipe_is_its_own_at_its_batch_and_falls_with_the_batch():
    assert small_momentum(load_recipe("small", {}).data.global_batch) == load_recipe("small", {}).teacher.momentum
    assert (small_momentum(16), small_momentum(256)) == (0.949, 0.81)


@pytest.mark.parametrize("patch", [4, 8, 16])
def test_crops_are_whole_patches_and_not_larger_than_the_images(patch):
    for side in range(2 * patch, 300):
        large, small = fitting_sizes(side, patch, 224)
        assert large % patch == small % patch == 0 and patch <= small < large <= min(side, 224)
    assert fitting_sizes(500, 16, 224) == (224, 96)


def test_what_is_continued_and_what_not():
    one, eight = Gpus(1, 23.6), Gpus(8, 79.1)
    assert released_weights(Data(50_000, 375), one) == "vit_small_patch16_224.dino"
    assert released_weights(Data(500_000, 375), eight) == "vit_base_patch16_224.dino"
    for data in (Data(50_000, 375, 6), Data(50_000, 32), Data(2_000_000, 375)):
        assert released_weights(data, one) is None
    assert released_weights(Data(50_000, 375), Gpus()) is None
    assert recipe_for(Data(2_000_000, 375), eight) == "dinov2_vitl16_short"
    assert recipe_for(Data(2_000_000, 375), one) == "vits16"


def test_recipe_continue_is_the_advice_for_fifty_thousand_images():
    """Its numbers follow from the rules: the weights are all that is left to say."""
    data, gpus = Data(50_000, 375), Gpus(1, 23.6)
    flags = {name: text for row in advise(data, gpus) for name, text in row.flags.items()}
    start = {"model.init_from": flags["model.init_from"]}
    assert load_recipe(recipe_for(data, gpus), start) == load_recipe(recipe_for(data, gpus), flags)


@pytest.mark.parametrize(("images", "gpus", "limits"), [(120, 1, False), (1000, 2, True), (50_000, 1, False)])
def test_a_batch_that_the_number_of_images_limits_says_so(images, gpus, limits):
    (row,) = [row for row in advise(Data(images, 375), Gpus(gpus, 23.6)) if row.setting == "batch"]
    assert (f"8 steps an epoch of {images:,} images" in row.why) == limits


def test_without_a_gpu_frozen_features_come_first_and_few_images_are_not_seen_more_often_than_advised():
    assert frozen_weights(Data(120, 375), Gpus()) == "vit_small_patch16_224.dino"
    assert all(frozen_weights(data, Gpus()) is None for data in (Data(120, 32), Data(120, 375, 6)))
    lengths = [{row.setting: row for row in advise(Data(n, 375), Gpus())}["length"] for n in (120, 300)]
    assert [row.flags for row in lengths] == [{"length": "240000 images"}, {}]
    assert "each 2000 times" in lengths[0].value


@pytest.mark.parametrize("gpus", [Gpus(), Gpus(1, 14.5)])
def test_an_accuracy_is_that_of_so_many_images(gpus):
    assert "0,000" in expected_knn(Data(1000, 32), gpus)[0]


def test_more_gpus_never_give_a_smaller_network():
    for images, gib in itertools.product(COUNTS[::3], (7.6, 79.1)):
        recipes = [
            load_recipe(recipe_for(Data(images, 375), Gpus(n, gib)), _flags(images, n, gib)) for n in (1, 4, 8, 64)
        ]
        assert _falls([with_known_network(recipe).model.spec().width for recipe in recipes][::-1])


def _flags(images, count, gib):
    rows = advise(Data(images, 375), Gpus(count, gib))
    return {name: value for row in rows for name, value in row.flags.items()}

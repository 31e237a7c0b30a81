"""The rules of `dino-ds advise`: each row has its source, changes in one direction only, and is a recipe that loads."""

from __future__ import annotations

import itertools

import pytest

from dino_ds.config.crop_checks import fitting_sizes
from dino_ds.config.fields import MOST_PASSES
from dino_ds.config.loading import load_recipe
from dino_ds.method.specs.base import StepImages
from dino_ds.method.specs.of_recipe import check_images_together
from dino_ds.planning.advice import advise
from dino_ds.planning.rules import (
    Data,
    Gpus,
    batch_size,
    continued_length,
    epochs,
    momentum,
    prototypes,
    recipe_for,
    released_weights,
    small_momentum,
    useful_gpus,
)
from dino_ds.run.announcement import few_images

COUNTS = [100, 101, 300, 1000, 2999, 10_000, 49_999, 50_000, 99_999, 100_000, 999_999, 10**6, 1_280_000, 10**7, 10**9]
SOURCES = ("arXiv", "dino", "LightlyTrain", "docs/", "rule of thumb", "released weights")
CARDS = [Gpus(), Gpus(1, 23.6), Gpus(3, 7.6), Gpus(8, 79.1), Gpus(64, 79.1)]


@pytest.mark.parametrize("gpus", CARDS, ids=str)
def test_every_advice_has_a_reason_and_is_a_recipe_that_train_accepts(gpus):
    """And each value is the recipe's: crops, learning rate, length."""
    for images, side, channels in itertools.product(COUNTS[::3], (8, 32, 95, 96, 375), (1, 6)):
        data = Data(images, side, channels)
        rows = advise(data, gpus)
        assert all(any(source in row.why for source in SOURCES) for row in rows), rows
        flags = {name: value for row in rows for name, value in row.flags.items()}
        assert len(flags) == sum(len(row.flags) for row in rows), "two rows set one key"
        recipe = load_recipe(recipe_for(data, gpus), {"data.source": "folder", "data.root": "x", **flags})
        recipe.check_learning_rates()
        check_images_together(recipe, StepImages(recipe.data.global_batch, 1, 1))
        value, crops, batch = {row.setting: row.value for row in rows}, recipe.crops, recipe.data.global_batch
        assert value["crops"] == f"2 x {crops.global_size} + {crops.num_local} x {crops.local_size} px"
        if rate := value.get("learning rate"):
            assert rate.startswith(f"{recipe.optimizer.lr:g} for 256 images")
            assert batch == 256 or f": {recipe.peak_lr:.2g} for {batch}," in rate
        assert not gpus.count or batch % gpus.count == 0
        assert recipe.model.in_chans == (3 if data.color else channels)
        steps = max(1, images // batch)
        shown = recipe.length.in_steps(batch, steps) * batch
        assert not any("shown" in line for line in few_images(images, shown))


def test_a_length_beyond_the_limit_is_said_by_train():
    few, line = few_images(120, 600_000)
    assert few.startswith("120 images are few")
    assert line.startswith("each of 120 images is shown 5,000 times; LightlyTrain advises 2,000 at most")
    assert line.endswith('--length "240000 images"')
    assert len(few_images(600_000 // MOST_PASSES, 600_000)) == 1 and few_images(2000, 600_000) == []


def _falls(values):
    return all(a >= b for a, b in itertools.pairwise(values))


def test_more_images_are_seen_less_often_and_more_in_all():
    """Also where released weights are continued, by a quarter of those from scratch; within LightlyTrain's ranges."""
    passes = [epochs(images) for images in COUNTS]
    assert _falls(passes)
    lengths = [(n, continued_length(n)) for n in COUNTS if n < 1_280_000]
    assert _falls([seen / n for n, seen in lengths]) and _falls([seen for _, seen in lengths][::-1])
    assert all(4 * seen == pytest.approx(epochs(n) * n, rel=0.01) for n, seen in lengths)
    # Each is rounded to whole epochs.
    seen = zip(passes, COUNTS, strict=True)
    assert all((b + 0.5) * m >= (a - 0.5) * n for (a, n), (b, m) in itertools.pairwise(seen))
    for images, low, high in [(1000, 200, 2000), (50_000, 200, 2000), (300_000, 100, 500), (20_000_000, 5, 100)]:
        assert low <= epochs(images) <= high


@pytest.mark.parametrize(
    ("images", "offered", "used"),
    [(120, 8, 1), (1000, 8, 2), (3000, 8, 8), (100_000, 12, 8), (100_000, 64, 32), (2_000_000, 64, 64), (120, 0, 0)],
)
def test_each_gpu_gets_a_sensible_share_of_a_step(images, offered, used):
    assert useful_gpus(Data(images, 375), Gpus(offered, 79.1)) == used
    if used:
        batches = [batch_size(Data(n, 375), Gpus(used, 79.1)) for n in COUNTS if n >= images]
        assert batches[0] // used >= 32 and _falls(batches[::-1]) and batches[0] <= max(images / 8, 32)


def test_values_follow_the_images_and_the_batch():
    found = [prototypes(images) for images in COUNTS]
    assert _falls(found[::-1]) and found[0] == 1024 and found[-1] == 65536
    assert momentum(512, 250_000) == 0.996 and momentum(256, 100) == 0.99
    assert _falls([momentum(batch, 250_000) for batch in (16, 32, 64, 128, 256, 512, 1024)])
    assert _falls([momentum(256, steps) for steps in (250_000, 50_000, 20_000, 10_000, 100)])
    small = load_recipe("small", {})
    assert small_momentum(small.data.global_batch) == small.teacher.momentum and small_momentum(256) == 0.81
    for patch in (4, 8, 16):
        for side in range(2 * patch, 300):
            large, local = fitting_sizes(side, patch, 224)
            assert large % patch == local % patch == 0 and patch <= local < large <= min(side, 224)
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

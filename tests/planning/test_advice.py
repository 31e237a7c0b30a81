"""The rules of `dino-ds advise`: each row has its source, changes in one direction only, and is a recipe that loads."""

from __future__ import annotations

import itertools

import pytest

from dino_ds.config.fields import MOST_PASSES
from dino_ds.config.loading import load_recipe
from dino_ds.config.sections import fitting_sizes
from dino_ds.method.specs.base import StepImages
from dino_ds.method.specs.own import check_images_together
from dino_ds.planning import advice
from dino_ds.planning.advice import Situation, advise, continued_length, epochs, momentum, prototypes, small_momentum
from dino_ds.run.announcement import few_images

COUNTS = [100, 101, 300, 1000, 2999, 10_000, 49_999, 50_000, 99_999, 100_000, 999_999, 10**6, 1_280_000, 10**7, 10**9]
SOURCES = ("arXiv", "dino", "LightlyTrain", "docs/", "rule of thumb", "released weights")


@pytest.mark.parametrize("gpus", [0, 1, 3, 8, 64])
def test_every_advice_has_a_reason_and_is_a_recipe_that_train_accepts(gpus):
    for images, side, channels in itertools.product(COUNTS[::3], (8, 32, 95, 96, 375), (1, 6)):
        facts = Situation(images, side, channels, gpus)
        rows = advise(facts)
        assert all(any(source in row.why for source in SOURCES) for row in rows), rows
        flags = {name: value for row in rows for name, value in row.flags.items()}
        assert len(flags) == sum(len(row.flags) for row in rows), "two rows set one key"
        recipe = load_recipe(facts.recipe, {"data.source": "folder", "data.root": "x", **flags})
        recipe.check_learning_rates()
        check_images_together(recipe, StepImages(recipe.data.global_batch, 1, 1))
        value, crops, batch = {row.setting: row.value for row in rows}, recipe.crops, recipe.data.global_batch
        local = f" + {crops.num_local} x {crops.local_size}" if crops.num_local else ""
        assert value["crops"] == f"2 x {crops.global_size}{local} px"
        if rate := value.get("learning rate"):
            assert rate.startswith(f"{recipe.optimizer.lr:g} for 256 images")
            assert batch == 256 or f": {recipe.peak_lr:.2g} for {batch}," in rate
        assert not gpus or batch % gpus == 0
        assert recipe.model.in_chans == (3 if facts.has_color else channels)
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
    """Within LightlyTrain's ranges; also where released weights are continued, as long as recipe continue does."""
    passes = [epochs(images) for images in COUNTS]
    assert _falls(passes)
    lengths = [(n, continued_length(n)) for n in COUNTS if n < 1_280_000]
    assert _falls([seen / n for n, seen in lengths]) and _falls([seen for _, seen in lengths][::-1])
    assert lengths[-1][1] == load_recipe("continue", {"model.init_from": "x"}).length.value
    # Each is rounded to whole epochs.
    seen = zip(passes, COUNTS, strict=True)
    assert all((b + 0.5) * m >= (a - 0.5) * n for (a, n), (b, m) in itertools.pairwise(seen))
    for images, low, high in [(1000, 200, 2000), (50_000, 200, 2000), (300_000, 100, 500), (20_000_000, 5, 100)]:
        assert low <= epochs(images) <= high


def test_values_follow_the_images_and_the_batch():
    for gpus in (1, 8):
        batches = [Situation(images, 375, 3, gpus).batch for images in COUNTS]
        assert _falls(batches[::-1]) and batches[0] == 32 and batches[-1] == 512
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
    assert Situation(50_000, 375, gpus=1).weights == "vit_small_patch16_224.dino"
    assert Situation(500_000, 375, gpus=8).weights == "vit_base_patch16_224.dino"
    for images, side, channels, gpus in (
        (50_000, 375, 6, 1),
        (50_000, 32, 3, 1),
        (2_000_000, 375, 3, 1),
        (100, 375, 3, 0),
    ):
        assert Situation(images, side, channels, gpus).weights is None
    assert Situation(2_000_000, 375, gpus=8).recipe == "vitb16"
    assert Situation(2_000_000, 375, gpus=1).recipe == "vits16"


def test_recipe_continue_is_the_advice_for_fifty_thousand_images():
    facts = Situation(50_000, 375, gpus=1)
    flags = {name: text for row in advise(facts) for name, text in row.flags.items()}
    start = {"model.init_from": flags["model.init_from"]}
    assert load_recipe(facts.recipe, start) == load_recipe(facts.recipe, flags)


def test_without_a_gpu_released_weights_are_compared_with_none():
    """For each size in color: what each way gave, with its time; a small network is taught, not begun from nothing."""
    for side, channels in itertools.product((8, 31, 32, 64, 100, 375), (1, 3, 6)):
        facts = Situation(2000, side, channels)
        ways = advice.ways(facts)
        flags = {name: value for row in advise(facts) for name, value in row.flags.items()}
        assert bool(ways) == ("teacher.source" in flags) == (side >= 32 and channels != 6)
        if ways:
            assert load_recipe(facts.recipe, flags).crops.global_size >= 64
            assert [way.name for way in ways] == ["as they are", "continue", "teach", "from scratch"]
            assert all(way.gave and way.images * way.seconds < 60 * 60 for way in ways)
    assert advice.ways(Situation(2000, 375, 3, gpus=1)) == []


def test_without_a_gpu_the_length_has_a_time_and_a_shorter_one_beside_it():
    """Recipe small's own crops take what was measured, larger ones more."""
    hours = []
    for side in (32, 64, 128):
        row = next(row for row in advise(Situation(50_000, side, 6)) if row.setting == "length")
        hours.append(float(row.value.removesuffix(" h of a core").split()[-1]))
        assert row.why.endswith('a first look: --length "60000 images"')
    assert hours[0] == pytest.approx(23 / 60, abs=0.05) and all(hour > 2 * hours[0] for hour in hours[1:])

"""MultiCrop: sizes, scales and rates of every variant; pixels as torchvision makes them of the same numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as F
from PIL import Image, ImageFilter
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import CenterCrop, RandomResizedCrop, Resize

from dino_ds.basics.hashing import crop_seed
from dino_ds.config.crops import dino_groups
from dino_ds.config.loading import load_recipe
from dino_ds.data.cutting import EvalCrop, RandomCrop
from dino_ds.data.multicrop import AUGMENTATIONS, CropParameters, MultiCrop, apply_crop, to_tensor
from dino_ds.data.normalisation import IMAGENET, MEAN, STD, Normalisation, crops_picture
from dino_ds.errors import ConfigError
from tests.data.files import photo

IMAGES = 3000


def multicrop(augment: str = "dino", num_local: int = 3) -> MultiCrop:
    return MultiCrop(dino_groups(32, (0.4, 1.0), 16, (0.05, 0.4), num_local), augment)


def assert_rate(hits: int, trials: int, expected: float) -> None:
    """Within 4 standard deviations of the binomial: wrong once in 16,000 draws, and the seeds are fixed."""
    assert abs(hits - trials * expected) <= 4 * math.sqrt(trials * expected * (1 - expected)), (hits / trials, expected)


# sizes, scales, rates


def test_scales_and_ratios_fill_their_ranges():
    width, height = 500, 375
    crops = multicrop()
    views = [crops.sample(width, height, seed) for seed in range(IMAGES)]
    for which, (low, high) in (([0, 1], (0.4, 1.0)), ([2, 3, 4], (0.05, 0.4))):
        boxes = np.array([view[i].box for view in views for i in which])
        left, top, right, bottom = boxes.T
        assert left.min() >= 0 and top.min() >= 0 and right.max() <= width and bottom.max() <= height
        scale = (right - left) * (bottom - top) / (width * height)
        ratio = (right - left) / (bottom - top)
        # Sides are rounded to whole pixels.
        assert low - 0.005 <= scale.min() < low + 0.02 and high - 0.1 < scale.max() <= high + 0.005
        assert 0.73 <= ratio.min() < 0.78 and 1.28 < ratio.max() <= 1.36


@pytest.mark.parametrize("size", [(500, 375), (120, 400), (700, 90)])
@pytest.mark.slow
def test_boxes_are_distributed_as_torchvisions(size):
    """Means of area, ratio and place, equal within 5 standard errors; wide and tall images need the fallback."""
    width, height = size
    ours = np.array([multicrop(num_local=0).sample(width, height, seed)[0].box for seed in range(IMAGES)], dtype=float)
    torch.manual_seed(0)
    image = torch.empty(1, height, width)
    reference = RandomResizedCrop(8, scale=(0.4, 1.0))
    drawn = [reference.make_params([image]) for _ in range(IMAGES)]
    theirs = np.array([(d["left"], d["top"], d["left"] + d["width"], d["top"] + d["height"]) for d in drawn], float)
    for what in (
        lambda b: (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1]),
        lambda b: np.log((b[:, 2] - b[:, 0]) / (b[:, 3] - b[:, 1])),
        lambda b: b[:, 0],
        lambda b: b[:, 1],
    ):
        a, b = what(ours), what(theirs)
        assert abs(a.mean() - b.mean()) <= 5 * math.sqrt((a.var() + b.var()) / IMAGES) + 1e-9


# pixels


def reference_view(image: Image.Image, view: CropParameters, size: int) -> torch.Tensor:
    """The same numbers through torchvision's functions, in the order of DINO's Compose."""
    left, top, right, bottom = view.box
    image = F.resized_crop(image, top, left, bottom - top, right - left, [size, size], InterpolationMode.BICUBIC)
    if view.flip:
        image = F.horizontal_flip(image)
    for name, factor in view.jitter:
        image = getattr(F, f"adjust_{name}")(image, factor)
    if view.gray:
        image = F.rgb_to_grayscale(image, num_output_channels=3)
    if view.blur_radius is not None:
        image = image.filter(ImageFilter.GaussianBlur(radius=view.blur_radius))
    if view.solarize:
        image = F.solarize(image, 128)
    return F.normalize(F.to_dtype(F.to_image(image), torch.float32, scale=True), list(MEAN), list(STD))


ROUNDING = 2e-6
"""Of equal 8-bit levels, normalised in FP32 in two orders: roundings of 6e-8, divided by deviations of 0.22. A level is
0.017."""


@pytest.mark.parametrize("augment", sorted(AUGMENTATIONS))
def test_whole_pipeline_equals_torchvisions_for_the_drawn_parameters(augment):
    crops = multicrop(augment)
    for seed in range(15):
        for view, crop in zip(crops.sample(60, 45, seed), crops(photo(), seed), strict=True):
            torch.testing.assert_close(crop, reference_view(photo(), view, crop.shape[-1]), rtol=0, atol=ROUNDING)


def test_global_generators_are_neither_used_nor_moved():
    import random

    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    first = multicrop()(photo(), 5)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    torch.manual_seed(99)
    assert all(torch.equal(a, b) for a, b in zip(first, multicrop()(photo(), 5), strict=True))


def test_seeds_differ_in_every_argument():
    seeds = [crop_seed(s, e, i) for s in range(6) for e in range(6) for i in range(-1, 150)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    bits = np.array([[seed >> bit & 1 for bit in range(64)] for seed in seeds[:4000]]).mean(0)
    assert abs(bits - 0.5).max() < 0.05  # 6 standard deviations
    assert crop_seed(1, 0, 0) != crop_seed(0, 1, 0) != crop_seed(0, 0, 1)


# evaluation, pictures


@pytest.mark.parametrize(
    "width,height,size", [(500, 375, 224), (375, 500, 224), (300, 300, 96), (40, 40, 32), (61, 50, 32), (60, 60, 21)]
)
def test_eval_crop_equals_torchvisions(width, height, size):
    """But for borders that it rounds to even and transformers rounds down: there one pixel of it."""
    image = photo(width, height)
    resized = Resize(int(size * 256 / 224), InterpolationMode.BICUBIC)(image)
    up, left = (int((side - size) % 4 == 3) for side in (resized.height, resized.width))
    reference = CenterCrop(size)(resized.transform(resized.size, Image.Transform.AFFINE, (1, 0, -left, 0, 1, -up)))
    torch.testing.assert_close(EvalCrop(size, IMAGENET)(image), to_tensor(reference, IMAGENET), rtol=0, atol=0)


@pytest.mark.parametrize(("width", "height"), [(700, 20), (20, 700), (3001, 7), (900, 50)])
def test_a_flat_image_is_cut_before_it_is_enlarged(width, height):
    """Within a level of 255, the rounding of Pillow's steps; a million to one fits into memory, as in training."""
    image, crop = photo(width, height), EvalCrop(32, IMAGENET)
    size, (left, top) = crop._resized(width, height)
    whole = image.resize(size, Image.Resampling.BICUBIC).crop((left, top, left + 32, top + 32))
    assert np.abs(np.asarray(crop._cut(image), np.int16) - np.asarray(whole, np.int16)).max() <= 1
    assert crop(Image.new("RGB", (1_000_000, 1), "red")).shape == (3, 32, 32)


def test_small_images_lose_no_border_in_evaluation():
    image = photo(32, 32)
    torch.testing.assert_close(EvalCrop(32, IMAGENET)(image), to_tensor(image, IMAGENET), rtol=0, atol=0)
    assert EvalCrop(32, IMAGENET)(photo(20, 30)).shape == (3, 32, 32)
    reference = photo(20, 20).resize((32, 32), Image.Resampling.BICUBIC)
    torch.testing.assert_close(EvalCrop(32, IMAGENET)(photo(20, 20)), to_tensor(reference, IMAGENET), rtol=0, atol=0)


def test_other_channels_are_cut_alike_in_evaluation():
    image = photo(61, 50)
    out = EvalCrop(32, Normalisation.usual(4))(np.asarray(image)[:, :, [0, 1, 2, 2]])
    rgb = IMAGENET.undone(EvalCrop(32, IMAGENET)(image))
    torch.testing.assert_close(out[:3] * (sum(STD) / 3) + sum(MEAN) / 3, rgb, rtol=0, atol=1e-6)
    assert torch.equal(out[2], out[3])


def test_extreme_images_give_crops():
    for width, height in ((1, 1), (2, 1), (1, 300), (3000, 2)):
        assert len(multicrop("dino")(photo(width, height), 3)) == 5
    for shape in ((1, 1), (1, 300), (3000, 2)):
        assert EvalCrop(16, IMAGENET)(photo(*shape)).shape == (3, 16, 16)


def test_picture_shows_the_crops():
    crops = multicrop()
    stacked = [torch.stack(row) for row in zip(*(crops(photo(), seed) for seed in range(10)), strict=True)]
    batch = {"global": stacked[:2], "local": stacked[2:]}
    picture = crops_picture(batch, crops.normalisation, images=4)
    assert picture.shape == (3, 4 * 34, 5 * 34)
    assert picture.min() >= 0 and picture.max() <= 1
    view = crops.sample(60, 45, 0)[0]
    shown = np.asarray(apply_crop(photo(), view, 32)).transpose(2, 0, 1) / 255
    np.testing.assert_allclose(picture[:, :32, :32], shown, atol=1e-5)


OWN = Normalisation((0.1, 0.5, 0.9), (0.5, 0.25, 0.125))


def test_another_mean_and_deviation_change_crops_as_the_formula_says():
    """Of training's crops, evaluation's and the linear probe's, and in the pictures of them; FP32's rounding."""
    groups = dino_groups(32, (0.4, 1.0), 16, (0.05, 0.4), 2)
    own, usual = MultiCrop(groups, "dino", normalisation=OWN), MultiCrop(groups, "dino")
    image = photo()
    pairs = list(zip(own(image, 3), usual(image, 3), strict=True))
    pairs.append((EvalCrop(32, OWN)(image), EvalCrop(32, IMAGENET)(image)))
    pairs.append((EvalCrop(32, OWN)(np.asarray(image)), EvalCrop(32, IMAGENET)(np.asarray(image))))
    pairs.append((RandomCrop(32, OWN)(image, 5), RandomCrop(32, IMAGENET)(image, 5)))
    for ours, theirs in pairs:
        levels = 255 * IMAGENET.undone(theirs)
        torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-3)
        torch.testing.assert_close(ours, OWN(levels / 255), rtol=0, atol=1e-4)
    batches = [{"global": [crop[None]]} for crop in (own(image, 3)[0], usual(image, 3)[0])]
    pictures = [crops_picture(batch, crops.normalisation) for crops, batch in zip((own, usual), batches, strict=True)]
    torch.testing.assert_close(*pictures, rtol=0, atol=1e-5)


def test_images_of_other_channels_are_refused():
    for channels in (1, 4):
        with pytest.raises(ConfigError, match=f"an image has {channels} channels, and the model takes 3"):
            EvalCrop(32, OWN)(np.zeros((40, 50, channels), np.uint8))


def test_the_recipe_s_mean_and_deviation_and_the_usual_ones():
    recipe = load_recipe(None, {"data.mean": "0.1,0.5,0.9", "data.std": "0.5,0.25,0.125"})
    assert Normalisation.of(recipe) == MultiCrop.of(recipe).normalisation == OWN
    assert Normalisation.of(load_recipe(None, {})) == IMAGENET == Normalisation(MEAN, STD)
    five = Normalisation.of(load_recipe(None, {"model.in_chans": "5"}))
    assert five.mean == (sum(MEAN) / 3,) * 5 and five.std == (sum(STD) / 3,) * 5

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

from dino_ds.config.crops import dino_groups
from dino_ds.config.loading import load_recipe
from dino_ds.data.multicrop import AUGMENTATIONS, CropParameters, EvalCrop, MultiCrop, to_tensor
from dino_ds.data.normalization import IMAGENET, MEAN, STD, Normalization
from tests.data.files import photo

IMAGES = 1200


def multicrop(augment: str = "dino", num_local: int = 3) -> MultiCrop:
    return MultiCrop(dino_groups(32, (0.4, 1.0), 16, (0.05, 0.4), num_local), augment)


@pytest.mark.parametrize("size", [(500, 375), (700, 90)])
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
"""Of equal 8-bit levels, normalized in FP32 in two orders: roundings of 6e-8, divided by deviations of 0.22. A level is
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


def test_extreme_images_give_crops():
    for width, height in ((1, 1), (2, 1), (1, 300), (3000, 2)):
        assert len(multicrop("dino")(photo(width, height), 3)) == 5
    for shape in ((1, 1), (1, 300), (3000, 2)):
        assert EvalCrop(16, IMAGENET)(photo(*shape)).shape == (3, 16, 16)


OWN = Normalization((0.1, 0.5, 0.9), (0.5, 0.25, 0.125))


def test_another_mean_and_deviation_change_crops_as_the_formula_says():
    groups = dino_groups(32, (0.4, 1.0), 16, (0.05, 0.4), 2)
    own, usual = MultiCrop(groups, "dino", normalization=OWN), MultiCrop(groups, "dino")
    image = photo()
    pairs = list(zip(own(image, 3), usual(image, 3), strict=True))
    pairs.append((EvalCrop(32, OWN)(image), EvalCrop(32, IMAGENET)(image)))
    pairs.append((EvalCrop(32, OWN)(np.asarray(image)), EvalCrop(32, IMAGENET)(np.asarray(image))))
    for ours, theirs in pairs:
        levels = 255 * IMAGENET.undone(theirs)
        torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-3)
        torch.testing.assert_close(ours, OWN(levels / 255), rtol=0, atol=1e-4)


def test_the_recipe_s_mean_and_deviation_and_the_usual_ones():
    recipe = load_recipe(None, {"data.mean": "0.1,0.5,0.9", "data.std": "0.5,0.25,0.125"})
    assert Normalization.of(recipe) == MultiCrop.of(recipe).normalization == OWN
    assert Normalization.of(load_recipe(None, {})) == IMAGENET == Normalization(MEAN, STD)
    five = Normalization.of(load_recipe(None, {"model.in_chans": "5"}))
    assert five.mean == (sum(MEAN) / 3,) * 5 and five.std == (sum(STD) / 3,) * 5

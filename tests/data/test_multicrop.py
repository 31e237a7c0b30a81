"""MultiCrop: sizes, scales and rates of every variant, and of each option; pixels as torchvision makes them."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as nn_functional
import torchvision.transforms.v2.functional as F
from PIL import Image, ImageFilter
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import CenterCrop, RandomResizedCrop, Resize

from dino_ds.config.crops import AUGMENTATIONS, Augmentation, all_crops, dino_groups
from dino_ds.config.loading import dump_recipe, load_recipe
from dino_ds.data.batches import LoaderBatch, LoaderOptions, MultiCropDataset, augmented_crops
from dino_ds.data.multicrop import CropParameters, EvalCrop, MaskOptions, MultiCrop, sample_box, to_tensor
from dino_ds.data.normalization import IMAGENET, MEAN, STD, Normalization
from dino_ds.errors import ConfigError
from tests.data.files import Arrays, photo
from tests.data.test_photometric import changed_by_torchvision
from tests.reference import gram_crops

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
    facts = []
    for left, top, right, bottom in (ours.T, theirs.T):
        wide, high = right - left, bottom - top
        facts.append((wide * high, np.log(wide / high), left, top))
    for a, b in zip(*facts, strict=True):
        assert abs(a.mean() - b.mean()) <= 5 * math.sqrt((a.var() + b.var()) / IMAGES) + 1e-9


def reference_view(image: Image.Image, view: CropParameters, size: int) -> torch.Tensor:
    """The same numbers through torchvision's functions."""
    left, top, right, bottom = view.box
    image = F.resized_crop(image, top, left, bottom - top, right - left, [size, size], InterpolationMode.BICUBIC)
    image = changed_by_torchvision(
        image, view, lambda image, radius: image.filter(ImageFilter.GaussianBlur(radius)), 128
    )
    return F.normalize(F.to_dtype(F.to_image(image), torch.float32, scale=True), list(MEAN), list(STD))


ROUNDING = 2e-6
"""Of equal 8-bit levels, normalized in FP32 in two orders: roundings of 6e-8 by deviations of 0.22 (a level: 0.017)."""


@pytest.mark.parametrize("augment", sorted(AUGMENTATIONS))
def test_whole_pipeline_equals_torchvisions_for_the_drawn_parameters(augment):
    crops = multicrop(augment)
    for seed in range(15):
        for view, crop in zip(crops.sample(60, 45, seed), crops(photo(), seed), strict=True):
            torch.testing.assert_close(crop, reference_view(photo(), view, crop.shape[-1]), rtol=0, atol=ROUNDING)


def test_global_generators_are_neither_used_nor_moved():
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
    for shape in ((1, 1), (1, 300), (3000, 2)):
        assert len(multicrop("dino")(photo(*shape), 3)) == 5
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


DINO = AUGMENTATIONS["dino"]
PLAIN = Augmentation(blur=(0, 0, 0), solarize=(0, 0, 0), jitter=0, gray=0)
TURNED = replace(PLAIN, vertical_flip=0.5, rotation=0.75)
PHOTO = Arrays(photo(96, 96))
"""Square, so that a turned crop has pixels of the same size."""
GROUPS = dino_groups(32, (0.4, 1.0), 16, (0.05, 0.4), 3)
BOTH = pytest.mark.parametrize("mode", ["worker", "device"])


def batch_of(crops: MultiCrop, mode: str, epoch: int) -> LoaderBatch:
    return MultiCropDataset(PHOTO, crops, LoaderOptions(augment=mode)).__getitems__([(epoch, 0)])


ODD = replace(DINO, blur=(0.3, 0.6, 0.0), solarize=(0.1, 0, 0.7), gray=0.9, flip=0.2, jitter=0.5, brightness=0.3)


@pytest.mark.parametrize("name", [*sorted(AUGMENTATIONS), "odd"])
def test_draws_are_those_of_dino_in_its_order(name):
    """Number by number: an older run is resumed on the crops that it would have seen."""
    chances = AUGMENTATIONS.get(name, ODD)
    strengths = {kind: getattr(chances, kind) for kind in ("brightness", "contrast", "saturation", "hue")}
    if name != "odd":
        assert strengths == {"brightness": 0.4, "contrast": 0.4, "saturation": strengths["saturation"], "hue": 0.1}
        assert strengths["saturation"] == (0.4 if name == "low_res" else 0.2) and chances.solarize == (0, 0.2, 0)
        assert (chances.flip, chances.jitter, chances.gray) == (0.5, 0.8, 0.2)
    for seed in range(100):
        rng = random.Random(seed)
        for kind, crop in zip((0, 1, 2, 2, 2), multicrop(chances).sample(100, 80, seed), strict=True):
            assert crop.box == sample_box(rng, 100, 80, (0.05, 0.4) if kind == 2 else (0.4, 1.0))
            assert crop.flip == (rng.random() < chances.flip) and crop.turns == 0
            names = list(strengths) if rng.random() < chances.jitter else []
            rng.shuffle(names)
            jitter = [(one, (one != "hue") + rng.uniform(-strengths[one], strengths[one])) for one in names]
            assert crop.jitter == tuple(jitter)
            assert crop.gray == (rng.random() < chances.gray)
            assert crop.blur_radius == (rng.uniform(0.1, 2.0) if rng.random() < chances.blur[kind] else None)
            assert crop.solarize == (rng.random() < chances.solarize[kind])


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({}, {}),
        ({"jitter": "0.5"}, {"brightness": 0.2, "contrast": 0.2, "saturation": 0.1, "hue": 0.05}),
        ({"jitter": "0.3, 0.2, 0, 0.5"}, {"brightness": 0.3, "contrast": 0.2, "saturation": 0.0, "hue": 0.5}),
        ({"blur": "0.3"}, {"blur": (0.3, 0.3, 0.3)}),
        ({"solarize": "0.1,0.2,0.3", "grayscale": "0"}, {"solarize": (0.1, 0.2, 0.3), "gray": 0.0}),
        ({"vertical_flip": "0.5"}, {"vertical_flip": 0.5}),
    ],
)
def test_a_knob_replaces_its_part_of_the_preset(given, changes, tmp_path):
    recipe = load_recipe(None, {f"crops.{name}": value for name, value in given.items()})
    assert MultiCrop.of(recipe).augmentation == recipe.crops.augmentation == replace(DINO, **changes)
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(str(tmp_path / "again.yaml"), {}) == recipe


@pytest.mark.parametrize("given", [{"rotation": 0.75, "vertical_flip": 0.5}, {"jitter": "0"}, {"jitter": "0.5,0,0,0"}])
def test_turns_and_strengths_leave_all_other_draws_as_they_were(given):
    recipe = load_recipe(None, {f"crops.{name}": str(value) for name, value in given.items()})
    changed, plain = MultiCrop.of(recipe), MultiCrop.of(load_recipe(None, {}))
    for seed in range(100):
        for ours, theirs in zip(changed.sample(90, 80, seed), plain.sample(90, 80, seed), strict=True):
            if "jitter" in given:
                assert {name for name, _ in ours.jitter} <= ({"brightness"} if given["jitter"] != "0" else set())
                assert ours == replace(theirs, jitter=ours.jitter)
            else:
                assert ours == replace(theirs, flip=ours.flip, turns=ours.turns)


@BOTH
def test_a_turned_crop_is_the_same_crop_turned(mode):
    """Pixel by pixel; 1e-6 where other crops of a batch move the rounding of FP32. Masks stay where they are."""
    masks = {"global": MaskOptions("dinov2", 0.5, (0.1, 0.5), (4, 4))}
    plain, turned = MultiCrop(GROUPS, PLAIN, masks), MultiCrop(GROUPS, TURNED, masks)
    seen = set()
    for epoch in range(10):
        batches = [batch_of(crops, mode, epoch) for crops in (plain, turned)]
        assert torch.equal(*(batch.masks["global"]["mask"] for batch in batches))
        for a, b in zip(*(all_crops(augmented_crops(batch)) for batch in batches), strict=True):
            whole = [a[0].rot90(turns, (1, 2)) for turns in range(4)]
            whole += [crop.flip(2) for crop in whole]
            found = [i for i, crop in enumerate(whole) if torch.allclose(crop, b[0], rtol=0, atol=1e-6)]
            assert len(found) == 1
            seen.add(found[0])
    assert seen == set(range(8))


@BOTH
def test_gram_crops_lie_as_the_student_s_do(mode):
    """Also turned, so that patches are of the same places: each is its global crop with twice the pixels. Resizing
    makes 0.03 of a deviation, another orientation 0.7."""
    globals_, local = GROUPS
    crops = MultiCrop((globals_, local, gram_crops(globals_, 64)), TURNED)
    turned = 0
    for epoch in range(10):
        found = [crop[0] for crop in all_crops(augmented_crops(batch_of(crops, mode, epoch)))]
        for student, teacher in zip(found[:2], found[-2:], strict=True):
            assert (nn_functional.avg_pool2d(teacher, 2) - student).abs().mean() < 0.1
            assert (nn_functional.avg_pool2d(teacher, 2).rot90(1, (1, 2)) - student).abs().mean() > 0.3
        turned += sum(crop.turns > 0 for crop in crops.sample(96, 96, epoch)[-2:])
    assert turned > 0


REFUSED = [
    ("jitter", "0.4,0.4", r"jitter 0\.4,0\.4 has 2 numbers: give one factor .* such as 0\.4,0\.4,0\.2,0\.1"),
    ("jitter", "3", r"jitter 3 makes the strength of brightness 1\.2: it must be 0 to 1"),
    ("solarize", "1.5", r"solarize 1\.5 is not a chance: it must be 0 to 1"),
    ("rotation", "90", r"90 is not a chance, 0 to 1, of a turn by 90, 180 or 270 degrees: 0\.75"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_nonsense_is_refused_in_one_line(name, value, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(None, {f"crops.{name}": value})
    assert "\n" not in str(caught.value)


def test_colors_of_images_without_are_refused():
    five = {"model.in_chans": "5"}
    with pytest.raises(ConfigError, match=r"crops\.grayscale 0\.2 has no effect on images of 5 channels"):
        load_recipe(None, {**five, "crops.grayscale": "0.2"})
    with pytest.raises(ConfigError, match=r"jitter 0\.4,0\.3,0\.2,0\.1: .* no effect .*: write 0\.4,0\.3,0,0"):
        load_recipe(None, {**five, "crops.jitter": "0.4,0.3,0.2,0.1"})
    for allowed in ({"crops.jitter": "0.5"}, {"crops.jitter": "0.4,0.4,0,0"}, {"crops.grayscale": "0"}):
        load_recipe(None, {**five, **allowed})

"""crops.jitter, blur, grayscale, flip, solarize, vertical_flip, rotation: each changes its part and nothing else."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dino_ds.config.crops import AUGMENTATIONS, Augmentation, all_crops, dino_groups
from dino_ds.config.loading import dump_recipe, load_recipe
from dino_ds.data.batches import LoaderOptions, MultiCropDataset, augmented_crops
from dino_ds.data.masks import MaskOptions
from dino_ds.data.multicrop import MultiCrop, sample_box
from dino_ds.errors import ConfigError
from tests.data.files import Arrays, photo
from tests.data.test_multicrop import multicrop
from tests.reference import gram_crops

DINO = AUGMENTATIONS["dino"]
PLAIN = Augmentation(blur=(0, 0, 0), solarize=(0, 0, 0), jitter=0, gray=0)
TURNED = replace(PLAIN, vertical_flip=0.5, rotation=0.75)
PHOTO = Arrays(photo(96, 96))
"""Square, so that a turned crop has pixels of the same size."""
GROUPS = dino_groups(32, (0.4, 1.0), 16, (0.05, 0.4), 3)
BOTH = pytest.mark.parametrize("mode", ["worker", "device"])


def crops_of(crops: MultiCrop, mode: str, epoch: int) -> list[torch.Tensor]:
    dataset = MultiCropDataset(PHOTO, crops, LoaderOptions(augment=mode))
    return [crop[0] for crop in all_crops(augmented_crops(dataset.__getitems__([(epoch, 0)])))]


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
        ({"jitter": "1"}, {}),
        ({"jitter": "0.5"}, {"brightness": 0.2, "contrast": 0.2, "saturation": 0.1, "hue": 0.05}),
        ({"jitter": "0.3, 0.2, 0, 0.5"}, {"brightness": 0.3, "contrast": 0.2, "saturation": 0.0, "hue": 0.5}),
        ({"blur": "0.3"}, {"blur": (0.3, 0.3, 0.3)}),
        ({"blur": "0"}, {"blur": (0, 0, 0)}),
        ({"solarize": "0.1,0.2,0.3"}, {"solarize": (0.1, 0.2, 0.3)}),
        ({"grayscale": "0"}, {"gray": 0.0}),
        ({"flip": "0"}, {"flip": 0.0}),
        ({"vertical_flip": "0.5"}, {"vertical_flip": 0.5}),
        ({"rotation": "0.75"}, {"rotation": 0.75}),
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
        batches = [
            MultiCropDataset(PHOTO, crops, LoaderOptions(augment=mode)).__getitems__([(epoch, 0)])
            for crops in (plain, turned)
        ]
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
        found = crops_of(crops, mode, epoch)
        for student, teacher in zip(found[:2], found[-2:], strict=True):
            assert (F.avg_pool2d(teacher, 2) - student).abs().mean() < 0.1
            assert (F.avg_pool2d(teacher, 2).rot90(1, (1, 2)) - student).abs().mean() > 0.3
        turned += sum(crop.turns > 0 for crop in crops.sample(96, 96, epoch)[-2:])
    assert turned > 0


REFUSED = [
    ("jitter", "0.4,0.4", r"jitter 0\.4,0\.4 has 2 numbers: give one factor .* such as 0\.4,0\.4,0\.2,0\.1"),
    ("jitter", "3", r"jitter 3 makes the strength of brightness 1\.2: it must be 0 to 1"),
    ("jitter", "-1", r"makes the strength of brightness -0\.4: it must be 0 to 1"),
    ("jitter", "0,0,0,0.6", r"makes the strength of hue 0\.6: it must be 0 to 0\.5"),
    ("jitter", "strong", r"'strong' is not a number, nor several"),
    ("blur", "0.5,0.5", r"blur 0\.5,0\.5 has 2 numbers: give one chance for every crop, or three"),
    ("solarize", "1.5", r"solarize 1\.5 is not a chance: it must be 0 to 1"),
    ("blur", "nan", "nan is not a number"),
    ("grayscale", "2", r"2 must be <= 1"),
    ("flip", "-0.1", r"-0\.1 must be >= 0"),
    ("vertical_flip", "true", r"'true' is not a number"),
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

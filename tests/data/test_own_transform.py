"""data.transform module:function: the example of the docs, what it is given, and what is said of one that fails."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dino_ds.basics.hashing import crop_seed
from dino_ds.config.crops import all_crops
from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.data.batches import LoaderBatch, LoaderOptions, MultiCropDataset, augmented_crops, check_transform
from dino_ds.data.feed import Position
from dino_ds.data.multicrop import MultiCrop
from dino_ds.data.transform import OwnTransform
from dino_ds.errors import ConfigError, DataError, UserError
from dino_ds.run.other_settings import describe_settings, notes_on_changes
from tests.data.test_augmentation_knobs import BOTH, PLAIN
from tests.data.test_loader import CROPS, GLOBAL, Noise, batches
from tests.reference import gram_crops

REPOSITORY = Path(__file__).parent.parent.parent
DOCS = REPOSITORY / "docs/data.md"
NOISE = "def change(crop, rng):\n    return (crop + rng.integers(0, 9, crop.shape)).astype(crop.dtype)"


def crops_with(path: str, **more) -> MultiCrop:
    given = {"groups": CROPS.groups, "augment": PLAIN} | more
    return MultiCrop(**given, transform=OwnTransform(path))


def without_transform(crops: MultiCrop) -> MultiCrop:
    return MultiCrop(crops.groups, crops.augmentation)


def same(a: LoaderBatch, b: LoaderBatch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(all_crops(a.crops), all_crops(b.crops), strict=True))


@pytest.fixture
def example(write_module) -> MultiCrop:
    """The function of the docs."""
    (code,) = re.findall(r"```python\n# my_augmentation\.py\n(.*?)```", DOCS.read_text(), re.S)
    write_module("my_augmentation", code)
    return crops_with("my_augmentation:speckle")


@BOTH
def test_a_resumed_run_transforms_as_the_straight_one(example, mode):
    straight = batches(3, crops=example, augment=mode)
    assert not any(map(same, straight, batches(3, crops=without_transform(example), augment=mode)))
    assert same(straight[1], batches(1, crops=example, augment=mode, start=Position(0, GLOBAL))[0])


@pytest.mark.slow
def test_loader_processes_transform_as_this_one_does(example):
    here, there = (batches(3, crops=example, augment="device", workers=workers) for workers in (0, 2))
    assert all(map(same, here, there))


@BOTH
def test_it_comes_after_turns_and_before_flips_and_colours(write_module, mode):
    """It marks a corner of a crop, which then is flipped as the crop is, and made grey with it."""
    write_module("mark", "def mark(crop, rng):\n    crop[:2, :2] = (255, 0, 0)\n    return crop")
    crops = crops_with("mark:mark", augment=replace(PLAIN, flip=0.5, rotation=0.75, gray=0.5))
    dataset = MultiCropDataset(Noise(), crops, LoaderOptions(augment=mode))
    for epoch in range(10):
        found = all_crops(augmented_crops(dataset.__getitems__([(epoch, 0)])))
        for crop, sampled in zip(found, crops.sample(12, 12, crop_seed(0, epoch, 0)), strict=True):
            pixels = crops.normalisation.undone(crop[0])
            corner = (pixels.flip(2) if sampled.flip else pixels)[:, :2, :2]
            red = torch.tensor([0.299] * 3 if sampled.gray else [1.0, 0, 0]).view(3, 1, 1)
            assert (corner - red).abs().max() < 0.01


@BOTH
def test_crops_without_colours_are_not_given_to_it(write_module, mode):
    """The views of Gram anchoring; each of the others has random numbers of its own."""
    write_module("noise", NOISE)
    groups = (*CROPS.groups, gram_crops(CROPS.groups[0], 8))
    own = crops_with("noise:change", groups=groups)
    [changed], [plain] = (batches(1, crops=crops, augment=mode) for crops in (own, without_transform(own)))
    assert torch.equal(changed.crops["gram"], plain.crops["gram"])
    assert not any(torch.equal(changed.crops[name], plain.crops[name]) for name in ("global", "local"))
    seeds = [transform.keywords["seed"] for transform in own.transforms(7) if transform]
    assert len(set(seeds)) == 3 and own.transforms(7)[3:] == [None, None]


@pytest.mark.parametrize("value_range", [None, (0.0, 255.0)])
def test_it_is_given_8_bits_or_floats(write_module, value_range):
    write_module(
        "look", "seen = []\ndef look(crop, rng):\n    seen.append((crop.shape, str(crop.dtype)))\n    return crop"
    )
    dataset = MultiCropDataset(
        Noise(), crops_with("look:look"), LoaderOptions(augment="device", value_range=value_range)
    )
    dataset.__getitems__([(0, 0)])
    dtype = "float32" if value_range else "uint8"
    assert sys.modules["look"].seen == [((8, 8, 3), dtype)] * 2 + [((4, 4, 3), dtype)]


FAILING = [
    ("def f(crop, rng): return crop.astype(float)", DataError, "made float64 8 x 8 x 3 of uint8 8 x 8 x 3"),
    ("def f(crop, rng): return crop[1:]", DataError, "made uint8 7 x 8 x 3 of uint8 8 x 8 x 3: both must stay"),
    ("def f(crop, rng): crop[:] = 0", DataError, "returned NoneType, and must return an array"),
    ("def f(crop, rng):\n    return crop / [1, 2]", DataError, r"raised ValueError: .* \(mod.py, line 2\)"),
    (
        "from dino_ds.data.base import UnreadableImage\ndef f(crop, rng):\n    raise UnreadableImage('x', 'y')",
        DataError,
        "raised UnreadableImage",
    ),
    (
        "import numpy as np\ndef f(crop, rng): return np.random.permutation(crop)",
        ConfigError,
        "made something else of the same crop when called again: draw all random numbers from rng",
    ),
    ("import sys\ndef f(crop, rng):\n    sys.exit(5)", DataError, r"raised SystemExit: 5 \(mod.py, line 3\)"),
    (
        "import torch\ndef f(crop, rng):\n    torch.set_default_dtype(torch.float64)\n    return crop",
        DataError,
        "changes torch's default dtype to torch.float64, and so what is learned: name the dtype where tensors are made",
    ),
    (
        "import torch\ntorch.set_default_dtype(torch.float64)\ndef f(crop, rng): return crop",
        ConfigError,
        "importing mod changes torch's default dtype to torch.float64",
    ),
    ("import sys\nsys.exit(5)", ConfigError, "importing mod fails: SystemExit: 5"),
    ("def f(crop): return crop", ConfigError, r"must take two arguments: f\(crop, rng\)"),
    ("class f:\n    def __init__(self, crop, rng): pass", ConfigError, "mod has no function f"),
    (None, ConfigError, "there is no mod on Python's path or in"),
]


@pytest.mark.parametrize(("text", "kind", "message"), FAILING)
def test_what_is_wrong_with_a_function_is_one_line_before_anything_starts(write_module, text, kind, message):
    sys.modules.pop("mod", None)
    if text is not None:
        write_module("mod", text)
    sizes = {"crops.global_size": "8", "crops.local_size": "4", "model.patch_size": "4"}
    recipe = load_recipe(None, {"data.transform": "mod:f", **sizes})
    with pytest.raises(UserError, match=message) as caught:
        check_transform(recipe, Noise())
    said = str(caught.value)
    assert isinstance(caught.value, kind) and "\n" not in said and "data.transform mod:f" in said
    if kind is DataError:
        assert said.endswith("the image is noise/0")
    assert torch.get_default_dtype() == torch.float32


def test_floats_beyond_0_and_1_are_refused(write_module):
    for name, text in (("high", "crop + 1"), ("nothing", "crop * float('nan')")):
        write_module(name, f"def f(crop, rng): return ({text}).astype(crop.dtype)")
        with pytest.raises(DataError, match=r"returned values .* clip them to 0 and 1"):
            OwnTransform(f"{name}:f")(np.full((4, 4, 3), 0.5, np.float32), 0)


@BOTH
def test_a_function_that_fails_later_ends_the_run_and_names_the_image(write_module, mode):
    """It is no unreadable image, which would be replaced by another."""
    write_module("rare", "def f(crop, rng):\n    return crop if rng.random() < 0.9 else 1 / 0")
    with pytest.raises(DataError, match=r"rare:f raised ZeroDivisionError.*; the image is noise/\d+$"):
        batches(10, crops=crops_with("rare:f"), augment=mode)


@pytest.mark.parametrize("name", ["mod", "mod.py", "mod:f()", "mod:a:b", ":f"])
def test_the_recipe_refuses_what_is_no_name(name):
    with pytest.raises(ConfigError, match="is not a function of yours as module:function"):
        load_recipe(None, {"data.transform": name})
    assert load_recipe(None, {}).data.transform is None and MultiCrop.of(load_recipe(None, {})).transform is None


def test_a_resumed_run_says_that_the_code_has_changed(write_module, tmp_path):
    write_module("own_change", NOISE)
    OwnTransform("own_change:change")
    path, recipe = (
        str(REPOSITORY / "ds_configs/zero0_fp32.json"),
        load_recipe(None, {"data.transform": "own_change:change"}),
    )
    config = resolve_ds_config(load_ds_config(path, {}), path, recipe.data.global_batch, 1)
    before = describe_settings(recipe, config)
    saved: Any = SimpleNamespace(step=3, **before, model_dump=lambda: before)
    assert notes_on_changes(saved, recipe, config) == []
    (tmp_path / "own_change.py").write_text(NOISE.replace("9", "8"))
    [note] = notes_on_changes(saved, recipe, config)
    assert re.fullmatch("the code of own_change was [0-9a-f]{12} until step 3, is [0-9a-f]{12}", note)

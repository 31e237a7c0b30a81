"""Images deeper than 8 bits and of several bands: one range, mean and deviation for all that is made of a run, in
files, evaluations and exports, on resume: the user's, those of the weights, ImageNet's, or measured."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from safetensors.torch import load_file

import dino_ds
from dino_ds.config.loading import change_recipe, load_recipe
from dino_ds.data.multicrop import EvalCrop
from dino_ds.data.normalization import Normalization, Stated, with_image_settings
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.evals.tracking import read_results
from dino_ds.models.foreign import build_backbone
from dino_ds.weights import frozen, sidecar
from dino_ds.weights.export import FORMATS
from dino_ds.weights.load import Backbone
from dino_ds.weights.start import adapt_convolution
from tests.data.files import Arrays, tiff
from tests.ranks import run_on_ranks
from tests.run import test_resume
from tests.run.harness import TINY, image_folder, log_of, losses_of, train_alone, train_tiny
from tests.sample import sampled
from tests.weights.test_weights import _backbone


def deep_folder(root: Path, images: int, top: int, seed: int = 0) -> Path:
    """16-bit gray PNGs with values to `top`, in three classes."""
    generator = np.random.default_rng(seed)
    for i in range(images):
        (root / f"class{i % 3}").mkdir(parents=True, exist_ok=True)
        pixels = (generator.random((40, 48)) * top * (1 + i % 3) / 3).astype(np.uint16)
        pixels[0, :2] = 0, top
        Image.fromarray(pixels).save(root / f"class{i % 3}/{i}.png")
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two ranks, two steps, with an image beyond the range that the others show."""
    place = tmp_path_factory.mktemp("deep")
    root = deep_folder(place / "images", 24, 4000)
    changes = {"eval.every": "2 steps", "eval.root": str(deep_folder(place / "test", 9, 4095, seed=1)), "eval.k": "5"}
    assert run_on_ranks(train_tiny, root, place / "run", max_steps=2, changes=changes) == [None, None]
    return place / "run"


def test_the_range_is_said_and_written(run):
    assert "note     24 of 24 images looked at are deeper than 8 bits: uint16, values 0 to 4000; " in log_of(run)
    assert load_recipe(str(run / "config.yaml"), {}).data.known_range == (0, 4095)
    assert json.loads((run / "teacher.json").read_text())["value_range"] == [0, 4095]
    assert read_results(run / "evaluations.json")["knn"]["test_images"] == 9
    assert "unreadable" not in log_of(run)


def test_the_teacher_takes_deep_images(run, tmp_path):
    FORMATS["safetensors"](dino_ds.load(run), tmp_path / "copy.safetensors")
    FORMATS["timm"](dino_ds.load(run), tmp_path / "timm")
    deep = np.random.default_rng(0).integers(0, 4096, (50, 60), dtype=np.uint16)
    unit = np.repeat(deep.astype(np.float32)[:, :, None] / np.float32(4095), 3, axis=2)
    measured = dino_ds.load(run).normalization
    for path in (run, tmp_path / "copy.safetensors", tmp_path / "timm"):
        model = dino_ds.load(path)
        for image in (Image.fromarray(deep), np.repeat(deep[:, :, None], 3, axis=2)):
            torch.testing.assert_close(model.preprocess(image), EvalCrop(32, measured)(unit), rtol=0, atol=1e-6)
        assert model.preprocess(Image.new("L", (40, 50))).shape == (3, 32, 32)
        with pytest.raises(ConfigError, match=r"this image \(uint16 values, 0 to 8\d+: beyond data.value_range 0,4095"):
            model.preprocess(deep * 2)
    with pytest.raises(ConfigError, match=r"no data.value_range was given or found\); this model was trained on 8-bit"):
        _backbone().preprocess(Image.fromarray(deep))
    content = sidecar.read_sidecar(tmp_path / "copy.safetensors")
    for wrong in ([3, 2], ["a", 1], [0, 10**400]):
        (tmp_path / "copy.json").write_text(json.dumps({**content, "value_range": wrong}))
        with pytest.raises(CheckpointError, match="unusable value_range"):
            dino_ds.load(tmp_path / "copy.safetensors")


def test_evaluations_and_pictures_take_the_range_of_the_run(run, tmp_path):
    trained = read_results(run / "evaluations.json")["knn"]["results"]
    found = dino_ds.evaluate(run, k=(5,), workers=0)
    assert found["results"]["knn"]["results"] == pytest.approx(trained)
    # A model of 8-bit images gets a range for these, which is said.
    FORMATS["safetensors"](_backbone(), other := tmp_path / "other.safetensors")
    with pytest.warns(UserWarning, match="values 0 to 4095; data.value_range 0,4095"):
        dino_ds.evaluate(other, root=run.parent / "images", test_root=run.parent / "test", k=(5,), workers=0)
    dino_ds.pictures(run, out=tmp_path, only="pca")
    assert len(list(tmp_path.glob("*.png"))) == 1


def test_a_resumed_run_keeps_its_range(tmp_path):
    root, run = deep_folder(tmp_path / "images", 12, 4000), tmp_path / "run"

    def go(steps, resume=True, value_range="auto"):
        changes = {"data.value_range": value_range}
        return train_alone(root, run, max_steps=steps, resume=resume, changes=changes)

    assert go(2, False, "0,16383") is None
    (root / "class0/0.png").write_bytes(tiff(np.full((40, 48), 20000, np.uint16)))
    assert go(5) is None
    assert [step for step, _ in losses_of(run)] == [1, 2, 3, 4, 5]
    beyond = "0.png (uint16 values, 20000 to 20000: beyond data.value_range 0,16383)"
    assert log_of(run).count(f"{beyond}: store all") == 1 < log_of(run).count(beyond)  # the step that has skipped it
    refused = go(6, value_range="0,65535")
    assert "data.value_range [0.0, 16383.0] -> [0.0, 65535.0]; accept with --allow_change data.value_range" in refused


CHANNEL_MEANS, SPREAD = np.array([0.2, 0.4, 0.6, 0.1, 0.3, 0.7]), 0.05


def _pixels(index: int, channels: int, bits: int) -> np.ndarray:
    noise = np.random.default_rng(index).normal(CHANNEL_MEANS[:channels], SPREAD, (40, 48, channels))
    return (np.clip(noise, 0, 1) * (2**bits - 1)).astype(np.uint8 if bits == 8 else np.uint16)


def test_features_are_equal_wherever_they_come_from(tmp_path):
    """Of six bands, whichever way they lie in the files; a run also evaluates and draws them."""
    root, run = tmp_path / "images", tmp_path / "run"
    for i in range(16):
        (root / f"class{i % 2}").mkdir(parents=True, exist_ok=True)
        how = "contig" if i % 4 < 2 else "separate"
        values = _pixels(i, 6, 16) if how == "contig" else np.moveaxis(_pixels(i, 6, 16), -1, 0)
        tifffile.imwrite(root / f"class{i % 2}/{i:02d}.tif", values, photometric="minisblack", planarconfig=how)
    changes = {"eval.every": "2 steps", "eval.root": str(root), "eval.k": "3", "eval.pictures_every": "2 steps"}
    assert train_alone(root, run, max_steps=2, changes=changes | {"model.in_chans": "6"}) is None
    model, paths = dino_ds.load(run), sorted(root.rglob("*.tif"))[:3]
    images = torch.stack([model.preprocess(path) for path in paths])
    arrays = torch.stack([model.preprocess(_pixels(int(path.stem), 6, 16)) for path in paths])
    assert torch.equal(images, arrays) and images.shape == (3, 6, 32, 32)
    expected = model.features(images)
    rows = torch.from_numpy(dino_ds.embed(run, root, workers=0).features)
    assert rows.shape == (16, 32)
    torch.testing.assert_close(rows[:3], expected, rtol=0, atol=1e-5)
    for form, name in (("safetensors", "copy.safetensors"), ("timm", "timm")):
        FORMATS[form](model, tmp_path / name)
        again = dino_ds.load(tmp_path / name)
        assert again.normalization == model.normalization
        torch.testing.assert_close(again.features(images), expected, rtol=0, atol=1e-5)
    assert torch.equal(dino_ds.load(tmp_path / "copy.safetensors").preprocess(paths[0]), images[0])


PATCHES = "patch_embed.proj.weight"


def _start(rgb_place: Path, count: int) -> dict[str, str]:
    """Changes of a recipe that begin a run on `count` bands with the run called `rgb`."""
    statistics = {f"data.{key}": ",".join([value] * count) for key, value in (("mean", "0.4"), ("std", "0.2"))}
    return {"model.in_chans": str(count), "model.init_from": str(rgb_place / "rgb"), **statistics}


@pytest.fixture(scope="module")
def rgb_place(tmp_path_factory):
    """A run on photographs, `rgb`, and a folder of files with four bands, `4`."""
    rgb_place = tmp_path_factory.mktemp("bands")
    (rgb_place / "4").mkdir()
    for i in range(16):
        how = {"photometric": "minisblack", "planarconfig": "contig"}
        tifffile.imwrite(rgb_place / f"4/{i:02d}.tif", _pixels(i, 4, 16), **how)
    image_folder(rgb_place / "photographs")
    changes = _start(rgb_place, 3) | {"model.init_from": "none"}
    assert train_alone(rgb_place / "photographs", rgb_place / "rgb", max_steps=2, changes=changes) is None
    return rgb_place


def test_a_recipe_for_other_channels_is_told_theirs(rgb_place, tmp_path):
    start, run = {"model.init_from": str(rgb_place / "rgb")}, tmp_path / "run"
    said = train_alone(rgb_place / "4", run, max_steps=1, changes=start)
    assert said.startswith("model.in_chans is 3, and images of data.source folder have 4 channels; set --model.in_cha")
    assert "\n" not in said
    assert said.endswith("; model.init_from stays: its weights are adapted") and not run.exists()
    flags = dict(re.findall(r"--(\S+) ([^\s;]+)", said))
    assert flags == {"model.in_chans": "4"}
    assert train_alone(rgb_place / "4", run, max_steps=1, changes=start | flags) is None
    assert "its channels are adapted from 3 to 4 (patch_embed.proj.weight)" in log_of(run)


def test_the_start_is_the_adapted_teacher_and_a_resumed_run_does_not_adapt_again(rgb_place, tmp_path):
    """In partitions on two ranks, rate 0 in the first step; a resume, without the weights, is exact."""
    rgb = shutil.copytree(rgb_place / "rgb", tmp_path / "rgb")
    changes = _start(tmp_path, 4)
    whole, parts, images = tmp_path / "whole", tmp_path / "parts", rgb_place / "4"
    for run, steps in ((parts, 1), (whole, 3)):
        assert run_on_ranks(train_tiny, images, run, "zero3_fp32.json", steps, changes=changes) == [None] * 2
    ours, theirs = load_file(parts / "teacher.safetensors"), load_file(rgb / "teacher.safetensors")
    assert torch.equal(ours.pop(PATCHES), adapt_convolution(theirs[PATCHES], 4))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    shutil.rmtree(rgb)
    assert run_on_ranks(train_tiny, images, parts, "zero3_fp32.json", 3, True, changes) == [None] * 2
    test_resume.assert_same_checkpoint(parts, whole, 3)
    assert log_of(parts).count("adapted from") == 1


SAID = {1: 0.25, 3: (0.3, 0.5, 0.7), 4: (0.1, 0.2, 0.3, 0.4)}


def _recipe(channels: int, **changes: str):
    return load_recipe(None, {**TINY, "model.in_chans": str(channels), **changes})


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    for channels, mean in {**SAID, "": None}.items():
        spec = _recipe(channels or 3).model.spec()
        about = {} if mean is None else {"mean": mean, "std": 0.125 if channels == 1 else [0.125] * channels}
        FORMATS["safetensors"](Backbone(build_backbone(spec, 32), 32, "", about), folder / f"{channels}.safetensors")
    return folder


@pytest.mark.parametrize(
    ("channels", "bits", "says", "key"),
    sampled(
        itertools.product([1, 3, 4, 6], [8, 16], [None, "user", "", 1, 3, 4], ["model.init_from", "teacher.source"]),
        lambda cell: tuple(itertools.combinations(cell[:3], 2)) + cell[3:],
    ),
)
def test_each_start_takes_what_is_known(weights, channels, bits, says, key):
    """The user's numbers, else the weights', gray and RGB alike, else ImageNet's in 8 bits, else the images' own."""
    user = {"data.mean": ",".join(["0.5"] * channels), "data.std": ",".join(["0.25"] * channels)}
    changes = user if says == "user" else {} if says is None else {key: str(weights / f"{says}.safetensors")}
    recipe = _recipe(channels, **changes)
    images = Arrays(*[_pixels(i, channels, bits) for i in range(8)])
    found, notes = with_image_settings(recipe, images, stated=lambda: frozen.stated_images(recipe))
    mean, said = found.data.mean, [note for note in notes if note.startswith("mean ")]
    assert found.data.known_range == (None if bits == 8 else (0, 65535))
    takes = says in SAID and (channels == says or {channels, says} == {1, 3})
    if says == "user":
        assert mean == (0.5,) * channels and not said
    elif takes:
        theirs = np.broadcast_to(SAID[says], says)
        assert mean == pytest.approx(theirs if channels == says else (theirs.mean(),) * channels)
        assert found.data.std == (0.125,) * channels and f", as {key} {weights}/{says}.safetensors says (" in said[0]
    elif channels in (1, 3) and bits == 8:
        assert mean is None and not said and Normalization.of(found) == Normalization.usual(channels)
    else:
        assert mean == pytest.approx(CHANNEL_MEANS[:channels], abs=0.005) and ", measured on 8 images (" in said[0]
        assert found.data.std == pytest.approx([SPREAD] * channels, abs=0.01)


def test_a_run_that_goes_on_keeps_what_it_began_with():
    """One of an earlier version too, whose recipe has no mean of its four channels; a stage as well."""
    images, earlier = Arrays(*[_pixels(i, 4, 16) for i in range(8)]), _recipe(4, **{"data.value_range": "0,65535"})
    stage = change_recipe(earlier, {"stage_start": "restart"})
    for recipe, before in ((_recipe(4), earlier), (stage, None)):
        found, notes = with_image_settings(recipe, images, lambda before=before: before, pytest.fail)
        assert (found.data.mean, found.data.known_range, notes) == (None, (0, 65535), [])


def test_a_range_that_the_weights_state_is_taken_where_it_fits():
    """Signed values, of which the images alone do not tell which are black and white."""
    images = Arrays(*[_pixels(i, 1, 8).astype(np.int16) - 100 for i in range(8)])
    found, notes = with_image_settings(_recipe(1), images, stated=lambda: Stated("it", None, (-1000.0, 1000.0)))
    assert found.data.known_range == (-1000, 1000) and "data.value_range -1000,1000, as it says" in notes
    with pytest.raises(ConfigError, match="which of them are black and white is not known"):
        with_image_settings(_recipe(1), images, stated=lambda: Stated("it", None, (0.0, 1000.0)))


def test_means_that_are_not_known_are_refused(weights, tmp_path):
    shutil.copy(weights / "4.safetensors", tmp_path / "alone.safetensors")
    with pytest.raises(CheckpointError, match="no file says the mean and std of its images' 4 channels: write both, 4"):
        dino_ds.load(tmp_path / "alone.safetensors", heads=2)
    (tmp_path / "alone.json").write_text('{"mean": 0.5, "std": [0.1, 0.2, 0.3, 0.4]}')
    assert dino_ds.load(tmp_path / "alone.safetensors", heads=2).normalization.mean == (0.5,) * 4
    with pytest.raises(ConfigError, match=r"data.mean and data.std can't be measured on images"):
        with_image_settings(_recipe(4), Arrays(np.full((4, 4, 4), np.nan, np.float32)))

"""TIFFs of several bands of 16 bits: trained on, embedded, exported, and started from a run on RGB photographs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from safetensors.torch import load_file

import dino_ds
from dino_ds.commands import embed
from dino_ds.config.loading import load_recipe
from dino_ds.evals.tracking import read_results
from dino_ds.options.definition import EmbedOptions
from dino_ds.weights.export import FORMATS
from dino_ds.weights.start import adapt_convolution
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, log_of, losses_of, train_alone, train_tiny
from tests.run.test_resume import assert_same_checkpoint

MEAN, STD = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4), (0.02, 0.03, 0.04, 0.05, 0.06, 0.1)
CHANGES = {"model.in_chans": "6", "data.mean": ",".join(map(str, MEAN)), "data.std": ",".join(map(str, STD))}


def bands(index: int) -> np.ndarray:
    """(40, 48, 6) uint16, values to about 4000."""
    noise = np.random.default_rng(index).random((40, 48, 6))
    return (4095 * np.clip((noise - 0.5) * STD + MEAN + 0.1 * (index % 2), 0, 1)).astype(np.uint16)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run of two steps of one process, with an evaluation, and its images in two classes."""
    place = tmp_path_factory.mktemp("bands")
    for i in range(16):
        folder = place / f"images/class{i % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        how = "contig" if i % 4 < 2 else "separate"
        values = bands(i) if how == "contig" else np.moveaxis(bands(i), -1, 0)
        tifffile.imwrite(folder / f"{i:02d}.tif", values, photometric="minisblack", planarconfig=how)
    changes = {**CHANGES, "eval.every": "2 steps", "eval.root": str(place / "images"), "eval.k": "3"}
    changes["eval.pictures_every"] = "2 steps"
    assert run_on_ranks(train_tiny, place / "images", place / "run", max_steps=2, changes=changes, world=1) == [None]
    return place


def test_it_trains_with_the_bits_that_are_used(place):
    recipe = load_recipe(str(place / "run/config.yaml"), {})
    assert recipe.data.known_range == (0, 4095) and recipe.data.mean == MEAN
    assert [step for step, _ in losses_of(place / "run")] == [1, 2]
    assert "knn" in read_results(place / "run/evaluations.json")
    assert list((place / "run/pictures/step_00000002").glob("*.png"))


def test_features_are_equal_wherever_they_come_from(place, tmp_path):
    model = dino_ds.load(place / "run")
    paths = sorted((place / "images").rglob("*.tif"))[:3]
    images = torch.stack([model.preprocess(path) for path in paths])
    arrays = torch.stack([model.preprocess(bands(int(path.stem))) for path in paths])
    assert torch.equal(images, arrays) and images.shape == (3, 6, 32, 32)
    expected = model.features(images)
    named = dict.fromkeys(("source", "size", "batch", "workers"))
    given = {**named, "root": str(place / "images"), "out": str(tmp_path / "x.npy"), "what": "cls"}
    given |= {"half": False, "json": True, "batch": 16, "workers": 0}
    embed.run(EmbedOptions(model=str(place / "run"), **given))
    rows = torch.from_numpy(np.load(tmp_path / "x.npy"))
    assert rows.shape == (16, 32)
    torch.testing.assert_close(rows[:3], expected, rtol=0, atol=1e-5)
    for form, name in (("safetensors", "copy.safetensors"), ("timm", "timm")):
        FORMATS[form][0](model, tmp_path / name)
        again = dino_ds.load(tmp_path / name)
        assert again.normalization == model.normalization
        torch.testing.assert_close(again.features(images), expected, rtol=0, atol=1e-5)
    assert torch.equal(dino_ds.load(tmp_path / "copy.safetensors").preprocess(paths[0]), images[0])


def test_images_are_prepared_by_the_run_s_mean_and_deviation(place, tmp_path):
    about = json.loads((place / "run/teacher.json").read_text())
    assert about["mean"] == list(MEAN) and about["std"] == list(STD)
    model = dino_ds.load(place / "run")
    pixels = model.preprocess(np.full((40, 48, 6), 1638, np.uint16))
    expected = (1638 / 4095 - np.array(MEAN)) / STD
    torch.testing.assert_close(pixels.mean((1, 2)), torch.tensor(expected).float(), rtol=0, atol=1e-4)
    FORMATS["timm"][0](model, tmp_path / "timm")
    config = json.loads((tmp_path / "timm/config.json").read_text())["pretrained_cfg"]
    assert config["mean"] == list(MEAN) and config["std"] == list(STD)


def test_another_mean_is_refused_on_resume(place):
    other = {**CHANGES, "data.mean": "0.05,0.1,0.15,0.2,0.3,0.5"}
    said = train_tiny(place / "images", place / "run", max_steps=3, resume=True, changes=other)
    assert re.search(r"changed since step 2: .*data.mean .*accept with --allow_change .*data.mean", said)


PATCHES = "patch_embed.proj.weight"
MEANS = np.array([0.1, 0.2, 0.4, 0.6])


def _some_bands(index: int, count: int) -> np.ndarray:
    """(40, 48, count) uint16, around other values in each band."""
    noise = np.random.default_rng(index).random((40, 48, count))
    return (65535 * np.clip(0.1 * (noise - 0.5) + MEANS[:count], 0, 1)).astype(np.uint16)


def _write(path: Path, values: np.ndarray) -> None:
    how = {"planarconfig": "contig"} if values.shape[2] > 1 else {}
    tifffile.imwrite(path, values.squeeze(), photometric="minisblack", **how)


def _start(rgb_place: Path, count: int, name: str = "rgb") -> dict[str, str]:
    """Changes of a recipe that begin a run on `count` bands with the run called `name`."""
    statistics = {f"data.{key}": ",".join([value] * count) for key, value in (("mean", "0.4"), ("std", "0.2"))}
    return {"model.in_chans": str(count), "model.init_from": str(rgb_place / name), **statistics}


@pytest.fixture(scope="module")
def rgb_place(tmp_path_factory):
    """A run on photographs, `rgb`, and folders of files with one and four bands, `1` and `4`."""
    rgb_place = tmp_path_factory.mktemp("bands")
    for count in (1, 4):
        (rgb_place / str(count)).mkdir()
        for i in range(16):
            _write(rgb_place / f"{count}/{i:02d}.tif", _some_bands(i, count))
    image_folder(rgb_place / "photographs")
    changes = _start(rgb_place, 3) | {"model.init_from": "none"}
    assert train_alone(rgb_place / "photographs", rgb_place / "rgb", max_steps=2, changes=changes) is None
    return rgb_place


def _flags(said: str) -> dict[str, str]:
    return dict(re.findall(r"--(\S+) ([^\s;]+)", said))


def test_a_recipe_for_other_channels_is_told_theirs(rgb_place, tmp_path):
    start, run = {"model.init_from": str(rgb_place / "rgb")}, tmp_path / "run"
    said = train_alone(rgb_place / "4", run, max_steps=1, changes=start)
    assert said.startswith("model.in_chans is 3, and images of data.source folder have 4 channels; set --model.in_cha")
    assert "\n" not in said
    assert said.endswith("; model.init_from stays: its weights are adapted") and not run.exists()
    flags = _flags(said)
    assert flags == {"model.in_chans": "4"}
    assert train_alone(rgb_place / "4", run, max_steps=1, changes=start | flags) is None
    assert "its channels are adapted from 3 to 4 (patch_embed.proj.weight)" in log_of(run)


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.full), 4])
def test_the_start_is_the_adapted_teacher_and_a_resumed_run_does_not_adapt_again(rgb_place, tmp_path, count):
    """The student is in partitions on two ranks, learning rate 0 in the first step; a resume, without the weights, is
    exact."""
    rgb = shutil.copytree(rgb_place / "rgb", tmp_path / "rgb")
    changes = _start(tmp_path, count)
    ds = "zero3_fp32.json"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for run, steps in ((parts, 1), (whole, 3)):
        assert run_on_ranks(train_tiny, rgb_place / str(count), run, ds, steps, changes=changes) == [None] * 2
    ours, theirs = load_file(parts / "teacher.safetensors"), load_file(rgb / "teacher.safetensors")
    assert torch.equal(ours.pop(PATCHES), adapt_convolution(theirs[PATCHES], count))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    shutil.rmtree(rgb)
    assert run_on_ranks(train_tiny, rgb_place / str(count), parts, ds, 3, True, changes) == [None] * 2
    assert_same_checkpoint(parts, whole, 3)
    assert log_of(parts).count("adapted from") == 1


def test_a_run_of_its_weights_can_teach_where_the_first_can_t(rgb_place, tmp_path):
    """A frozen teacher never learns and is not adapted: the message says what makes one that fits."""
    start = _start(rgb_place, 4)
    base = start | {"model.init_from": "none", "model.drop_path": "0"}
    teach = {"teacher.source": str(rgb_place / "rgb"), "teacher.distill": "features"}
    anchor = {"gram.teacher": str(rgb_place / "rgb"), "gram.weight": "1"}
    for given in (teach, anchor):
        said = train_alone(rgb_place / "4", tmp_path / "run", changes=base | given)
        assert said.startswith(f"{next(iter(given))} {rgb_place / 'rgb'} is for images of 3 channels, and this")
        assert said.endswith(f"started with --model.init_from {rgb_place / 'rgb'}, which adapts its weights")
    kept = train_alone(rgb_place / "4", tmp_path / "run", changes=start | {"objective.preserve_weight": "1"})
    assert "is for images of 3 channels, and has no features of these of 4" in kept
    assert kept.endswith(": add --objective.preserve_weight 0")
    assert train_alone(rgb_place / "4", tmp_path / "made", max_steps=1, changes=start) is None
    teach["teacher.source"] = str(tmp_path / "made")
    assert train_alone(rgb_place / "4", tmp_path / "run", max_steps=1, changes=base | teach) is None

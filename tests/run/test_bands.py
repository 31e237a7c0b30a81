"""A folder of TIFFs with six bands of 16 bits: trained on, looked at, embedded, exported and loaded again."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tifffile
import torch

import dino_ds
from dino_ds.commands import embed
from dino_ds.config.loading import load_recipe
from dino_ds.evals.tracking import read_results
from dino_ds.options.definition import EmbedOptions
from dino_ds.weights.export import FORMATS
from tests.ranks import run_on_ranks
from tests.run.harness import losses_of, train_tiny

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

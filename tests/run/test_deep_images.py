"""Runs on images deeper than 8 bits: one value range, in the run's files, in its evaluations and on resume."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dino_ds
from dino_ds.checkpoint.manifest import read_manifest
from dino_ds.commands import evaluate
from dino_ds.config.loading import load_recipe
from dino_ds.data.multicrop import EvalCrop
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.evals.tracking import read_results
from dino_ds.options.definition import EvalOptions, PicturesOptions
from dino_ds.report import pictures
from dino_ds.weights.export import FORMATS
from dino_ds.weights.sidecar import read_sidecar
from tests.data.files import tiff
from tests.ranks import run_on_ranks
from tests.run.harness import log_of, losses_of, train_tiny
from tests.weights.test_weights import _backbone

STEP = "checkpoints/step_00000002"


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
    assert "data.value_range 0,4095, 8-bit images 0,255" in log_of(run)
    assert load_recipe(str(run / "config.yaml"), {}).data.known_range == (0, 4095)
    assert read_manifest(run / STEP).recipe["data"]["value_range"] == [0, 4095]
    assert json.loads((run / "teacher.json").read_text())["value_range"] == [0, 4095]
    assert read_results(run / "evaluations.json")["knn"]["test_images"] == 9
    assert "unreadable" not in log_of(run)


def test_the_teacher_takes_deep_images(run, tmp_path):
    FORMATS["safetensors"][0](dino_ds.load(run), tmp_path / "copy.safetensors")
    FORMATS["timm"][0](dino_ds.load(run), tmp_path / "timm")
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
        for wrong in (torch.zeros(3, 50, 60), [deep], None):
            with pytest.raises(ConfigError, match=f"a {type(wrong).__name__} is not an image"):
                model.preprocess(wrong)
            with pytest.raises(ConfigError, match=r"is not a tensor of images|images of shape"):
                model.features(wrong)
    with pytest.raises(ConfigError, match=r"no data.value_range was given or found\); this model was trained on 8-bit"):
        _backbone().preprocess(Image.fromarray(deep))
    content = read_sidecar(tmp_path / "copy.safetensors")
    for wrong in ("0,4095", [1], [3, 2], ["a", 1], [0, 10**400], None):
        (tmp_path / "copy.json").write_text(json.dumps({**content, "value_range": wrong}))
        with pytest.raises(CheckpointError, match="unusable value_range"):
            dino_ds.load(tmp_path / "copy.safetensors")


def test_evaluations_and_pictures_take_the_range_of_the_run(run, tmp_path):
    given = dict.fromkeys(("source", "root", "test_root", "benchmark_root", "size", "temperature", "images", "out"))
    given |= {"evals": ("knn",), "k": (5,), "workers": 0, "json": True}
    trained = read_results(run / "evaluations.json")["knn"]["results"]
    result = evaluate.run(EvalOptions(model=str(run), **given))
    assert result.data["results"]["knn"]["results"] == pytest.approx(trained)
    # A model of 8-bit images gets a range for these, which is said.
    FORMATS["safetensors"][0](_backbone(), tmp_path / "other.safetensors")
    named = {"root": str(run.parent / "images"), "test_root": str(run.parent / "test")}
    result = evaluate.run(EvalOptions(model=str(tmp_path / "other.safetensors"), **{**given, **named}))
    assert "values 0 to 4095; data.value_range 0,4095" in "".join(result.notes)
    pictures.run(PicturesOptions(model=str(run), out=str(tmp_path), only=("pca",), json=True))
    assert len(list(tmp_path.glob("*.png"))) == 1


def test_a_resumed_run_keeps_its_range(tmp_path):
    root, run = deep_folder(tmp_path / "images", 12, 4000), tmp_path / "run"

    def go(steps, resume=False, value_range="auto"):
        changes = {"data.value_range": value_range}
        return run_on_ranks(train_tiny, root, run, max_steps=steps, resume=resume, changes=changes, world=1)

    assert go(2, value_range="0,16383") == [None]
    before = log_of(run)
    (root / "class0/0.png").write_bytes(tiff(np.full((40, 48), 20000, np.uint16)))
    assert go(5, resume=True) == [None]
    assert [step for step, _ in losses_of(run)] == [1, 2, 3, 4, 5]
    beyond = "0.png (uint16 values, 20000 to 20000: beyond data.value_range 0,16383)"
    assert f"{beyond}: store all" not in before and log_of(run).count(f"{beyond}: store all") == 1
    assert log_of(run).count(beyond) > 1  # the step that has skipped it
    [refused] = go(6, resume=True, value_range="0,65535")
    assert "settings changed since step 5: data.value_range [0.0, 16383.0] -> [0.0, 65535.0]" in refused
    assert "accept with --allow_change data.value_range" in refused

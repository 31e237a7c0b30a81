"""Runs with a mean and a standard deviation of their own, of images with five channels of 16 bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import dino_ds
from dino_ds.checkpoint.manifest import read_manifest
from dino_ds.commands import evaluate
from dino_ds.config.loading import change_recipe, load_recipe
from dino_ds.data.normalisation import Normalisation
from dino_ds.errors import CheckpointError
from dino_ds.evals.results import read_results
from dino_ds.options.model import EvalOptions
from dino_ds.run.run_folder import RunFolder
from dino_ds.weights.export import FORMATS
from dino_ds.weights.sidecar import read_sidecar
from dino_ds.weights.start import find_start
from tests.ranks import run_on_ranks
from tests.run.harness import train_tiny

MEAN, STD = (0.1, 0.25, 0.5, 0.7, 0.9), (0.05, 0.1, 0.2, 0.3, 0.4)
CHANNELS = {"data.source": f"{__name__}:Planes", "data.value_range": "0,65535", "model.in_chans": "5"}
CHANNELS |= {"data.mean": ",".join(map(str, MEAN)), "data.std": ",".join(map(str, STD))}


class Planes:
    """Images of five channels, uint16, made from their number; `root` says how many."""

    def __init__(self, root: str) -> None:
        self._count = int(root)

    def __len__(self) -> int:
        return self._count

    def load(self, index: int) -> np.ndarray:
        noise = np.random.default_rng(index).random((40, 48, 5))
        return (65535 * np.clip(noise * STD + MEAN, 0, 1)).astype(np.uint16)

    def name(self, index: int) -> str:
        return f"planes/{index}"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("channels") / "run"
    changes = {**CHANNELS, "data.root": "16", "eval.every": "2 steps", "eval.evals": "statistics"}
    assert run_on_ranks(train_tiny, "16", place, max_steps=2, changes=changes, world=1) == [None]
    return place


def test_the_teacher_s_images_are_prepared_as_in_the_run(run):
    about = json.loads((run / "teacher.json").read_text())
    assert about["mean"] == list(MEAN) and about["std"] == list(STD)
    flat = np.broadcast_to(np.array([0, 13107, 26214, 52428, 65535], np.uint16), (40, 48, 5))
    expected = (np.array([0, 0.2, 0.4, 0.8, 1]) - MEAN) / STD
    pixels = dino_ds.load(run).preprocess(flat)
    assert pixels.shape == (5, 32, 32)
    # Means less than a deviation from 0 are kept to FP32's rounding of a few units of 20.
    torch.testing.assert_close(pixels.mean((1, 2)), torch.tensor(expected).float(), rtol=0, atol=1e-5)


def test_features_are_those_of_the_run(run, tmp_path, capsys):
    """Statistics of them that the run wrote are found again; with the usual mean they are others."""
    given = dict.fromkeys(("source", "root", "test_root", "benchmark_root", "size", "temperature", "images", "out"))
    given |= {"evals": ("statistics",), "k": None, "epochs": None, "batch": None, "workers": 0, "json": True}
    trained = read_results(run / "evaluations.json")["statistics"]["results"]

    def found(model: Path) -> dict[str, float]:
        evaluate.run(EvalOptions(model=str(model), **{**given, "source": CHANNELS["data.source"], "root": "16"}))
        return json.loads(capsys.readouterr().out)["results"]["statistics"]["results"]

    assert found(run) == pytest.approx(trained, rel=1e-4)
    FORMATS["safetensors"][0](dino_ds.load(run), copy := tmp_path / "copy.safetensors")
    assert found(copy) == pytest.approx(trained, rel=1e-4)
    about = read_sidecar(copy)
    usual = {key: value for key, value in about.items() if key not in ("mean", "std")}
    copy.with_suffix(".json").write_text(json.dumps(usual))
    assert found(copy) != pytest.approx(trained, rel=1e-2)
    for wrong in (
        {"mean": [0.5]},
        {"std": [0.1] * 4 + [0]},
        {"std": None},
        {"mean": ["a"] * 5},
        {"mean": [10**400] * 5},
    ):
        copy.with_suffix(".json").write_text(json.dumps(about | wrong))
        with pytest.raises(CheckpointError, match="unusable mean or std of 5 channels"):
            dino_ds.load(copy)


def test_exports_name_them(run, tmp_path):
    model = dino_ds.load(run)
    FORMATS["timm"][0](model, tmp_path / "timm")
    config = json.loads((tmp_path / "timm/config.json").read_text())["pretrained_cfg"]
    assert config["mean"] == list(MEAN) and config["std"] == list(STD)
    assert dino_ds.load(tmp_path / "timm").normalisation == model.normalisation
    assert str(list(MEAN)) in (tmp_path / "timm/README.md").read_text()


def test_others_are_refused_on_resume_and_noted_in_a_start_from_the_teacher(run):
    recipe = load_recipe(str(run / "config.yaml"), {})
    other = change_recipe(recipe, {"data.mean": "0.1,0.25,0.5,0.7,0.8"})
    folder, saved = RunFolder(run, other, _Config(), resume=True), read_manifest(run / "checkpoints/step_00000002")
    with pytest.raises(
        CheckpointError, match=r"changed since step 2: data.mean .* accept with --allow_change data.mean"
    ):
        folder.check_settings(saved)
    model = change_recipe(recipe, {"model.init_from": str(run)}).model
    assert find_start(model, (0.0, 65535.0), Normalisation.of(recipe)).notes == []
    assert "its images had mean 0.1,0.25,0.5,0.7,0.9, std" in find_start(model, (0.0, 65535.0)).notes[-1]


class _Config:
    clipping = 3.0

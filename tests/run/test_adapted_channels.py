"""Runs on TIFFs of four bands and of one, of 16 bits, that start from a run on RGB photographs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from safetensors.torch import load_file

from dino_ds.weights.start import adapt_convolution
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, log_of, train_alone, train_tiny
from tests.run.test_resume import assert_same_checkpoint

PATCHES = "patch_embed.proj.weight"
MEANS = np.array([0.1, 0.2, 0.4, 0.6])


def _bands(index: int, count: int) -> np.ndarray:
    """(40, 48, count) uint16, around other values in each band."""
    noise = np.random.default_rng(index).random((40, 48, count))
    return (65535 * np.clip(0.1 * (noise - 0.5) + MEANS[:count], 0, 1)).astype(np.uint16)


def _write(path: Path, values: np.ndarray) -> None:
    how = {"planarconfig": "contig"} if values.shape[2] > 1 else {}
    tifffile.imwrite(path, values.squeeze(), photometric="minisblack", **how)


def _start(place: Path, count: int, name: str = "rgb") -> dict[str, str]:
    """Changes of a recipe that begin a run on `count` bands with the run called `name`."""
    statistics = {f"data.{key}": ",".join([value] * count) for key, value in (("mean", "0.4"), ("std", "0.2"))}
    return {"model.in_chans": str(count), "model.init_from": str(place / name), **statistics}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run on photographs, `rgb`, and folders of files with one and four bands, `1` and `4`."""
    place = tmp_path_factory.mktemp("bands")
    for count in (1, 4):
        (place / str(count)).mkdir()
        for i in range(16):
            _write(place / f"{count}/{i:02d}.tif", _bands(i, count))
    image_folder(place / "photographs")
    changes = _start(place, 3) | {"model.init_from": "none"}
    assert train_alone(place / "photographs", place / "rgb", max_steps=2, changes=changes) is None
    return place


def _flags(said: str) -> dict[str, str]:
    return dict(re.findall(r"--(\S+) ([^\s;]+)", said))


def test_a_recipe_for_other_channels_is_told_theirs(place, tmp_path):
    start, run = {"model.init_from": str(place / "rgb")}, tmp_path / "run"
    said = train_alone(place / "4", run, max_steps=1, changes=start)
    assert said.startswith("model.in_chans is 3, and images of data.source folder have 4 channels; set --model.in_cha")
    assert "\n" not in said
    assert said.endswith("; model.init_from stays: its weights are adapted") and not run.exists()
    flags = _flags(said)
    assert flags == {"model.in_chans": "4"}
    assert train_alone(place / "4", run, max_steps=1, changes=start | flags) is None
    assert "its channels are adapted from 3 to 4 (patch_embed.proj.weight)" in log_of(run)


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.full), 4])
def test_the_start_is_the_adapted_teacher_and_a_resumed_run_does_not_adapt_again(place, tmp_path, count):
    """The student is in partitions on two ranks, learning rate 0 in the first step; a resume, without the weights, is
    exact."""
    rgb = shutil.copytree(place / "rgb", tmp_path / "rgb")
    changes = _start(tmp_path, count)
    ds = "zero3_fp32.json"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for run, steps in ((parts, 1), (whole, 3)):
        assert run_on_ranks(train_tiny, place / str(count), run, ds, steps, changes=changes) == [None] * 2
    ours, theirs = load_file(parts / "teacher.safetensors"), load_file(rgb / "teacher.safetensors")
    assert torch.equal(ours.pop(PATCHES), adapt_convolution(theirs[PATCHES], count))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    shutil.rmtree(rgb)
    assert run_on_ranks(train_tiny, place / str(count), parts, ds, 3, True, changes) == [None] * 2
    assert_same_checkpoint(parts, whole, 3)
    assert log_of(parts).count("adapted from") == 1


def test_a_run_of_its_weights_can_teach_where_the_first_can_t(place, tmp_path):
    """A frozen teacher never learns and is not adapted: the message says what makes one that fits."""
    start = _start(place, 4)
    base = start | {"model.init_from": "none", "model.drop_path": "0"}
    teach = {"teacher.source": str(place / "rgb"), "teacher.distill": "features"}
    anchor = {"gram.teacher": str(place / "rgb"), "gram.weight": "1"}
    for given in (teach, anchor):
        said = train_alone(place / "4", tmp_path / "run", changes=base | given)
        assert said.startswith(
            f"{next(iter(given))} {place / 'rgb'} is for images of 3 channels, and this run's have 4"
        )
        assert said.endswith(f"started with --model.init_from {place / 'rgb'}, which adapts its weights")
    kept = train_alone(place / "4", tmp_path / "run", changes=start | {"objective.preserve_weight": "1"})
    assert "is for images of 3 channels, and has no features of these of 4" in kept
    assert kept.endswith(": add --objective.preserve_weight 0")
    assert train_alone(place / "4", tmp_path / "made", max_steps=1, changes=start) is None
    teach["teacher.source"] = str(tmp_path / "made")
    assert train_alone(place / "4", tmp_path / "run", max_steps=1, changes=base | teach) is None

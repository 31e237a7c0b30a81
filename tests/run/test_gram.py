"""Gram anchoring in whole runs: resumed across a replacement, with a teacher from a file, and refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file

from dino_ds.models.specs.backbones import VITS
from dino_ds.models.vit import VisionTransformer
from dino_ds.weights.sidecar import read_sidecar
from tests.ranks import run_on_ranks
from tests.run.harness import copy_until, image_folder, read_metrics, train_tiny, whole_tensors
from tests.run.test_resume import assert_same_checkpoint

GRAM = {"gram.weight": "2", "gram.crop_size": "48"}
SNAPSHOT = GRAM | {
    "gram.start": "1 steps",
    "gram.refresh_every": "3 steps",
    "gram.refreshes": "2",
    "save_every": "3 steps",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Images, a run of the usual tiny network, and one of patches and a width of its own."""
    place = tmp_path_factory.mktemp("trained")
    image_folder(place / "images")
    other = {"model.patch_size": "16", "model.width": "48", "model.depth": "1"}
    for name, changes in (("run", {}), ("other", other)):
        assert run_on_ranks(train_tiny, place / "images", place / name, max_steps=2, changes=changes, world=1) == [None]
    return place


def test_a_run_resumed_across_a_replacement_is_bit_identical(trained, tmp_path):
    """Replaced after steps 1 (the snapshot) and 4; dead after 3, and stopped exactly at 4."""
    straight, parts, ds = tmp_path / "straight", tmp_path / "parts", "zero2_bf16.json"
    for run, steps, resume in ((straight, 6, False), (parts, 4, True), (parts, 6, True)):
        if not parts.exists() and resume:
            copy_until(3, straight, parts)
        assert run_on_ranks(train_tiny, trained / "images", run, ds, steps, resume, SNAPSHOT) == [None, None]
    assert_same_checkpoint(parts, straight, 6)
    kept = {name for name in whole_tensors(straight, 6) if name.startswith("teachers.gram.backbone.")}
    assert len(kept) == 30
    losses = [record["gram_loss"] for record in read_metrics(straight) if "gram_loss" in record]
    assert losses[0] == 0 < min(losses[1:])
    assert read_metrics(parts)[-1]["gram_loss"] == read_metrics(straight)[-1]["gram_loss"]


@pytest.mark.parametrize(
    ("name", "ds"), [("other", "zero2_bf16.json"), ("run/checkpoints/step_00000002", "zero3_fp32.json")]
)
def test_a_teacher_from_a_run(trained, tmp_path, name, ds):
    """The other run may have other patches and width. Its teacher is never trained: a checkpoint has its digest."""
    changes, run = GRAM | {"gram.teacher": str(trained / name)}, tmp_path / "run"
    for steps, resume in ((1, False), (3, True)):
        assert run_on_ranks(train_tiny, trained / "images", run, ds, steps, resume, changes) == [None] * 2
    assert read_metrics(run)[-1]["gram_loss"] > 0
    kept = {key: t for key, t in whole_tensors(run, 3).items() if key.startswith("teachers.gram.")}
    assert [(key, tuple(t.shape)) for key, t in kept.items()] == [("teachers.gram.sha256", (32,))]


def test_other_weights_in_the_teacher_s_place_are_refused_on_a_resume(trained, tmp_path):
    run, place = tmp_path / "run", tmp_path / "teacher"
    copytree(trained / "run", place)
    file = place / "teacher.safetensors"
    changes = GRAM | {"gram.teacher": str(file)}
    assert run_on_ranks(train_tiny, trained / "images", run, max_steps=1, changes=changes, world=1) == [None]
    weights, about = load_file(file), read_sidecar(file)
    weights["norm.bias"][3] += 1e-6
    save_file(weights, file)
    (place / "teacher.json").write_text(json.dumps(about))  # changed on purpose: it describes no file
    (said,) = run_on_ranks(train_tiny, trained / "images", run, max_steps=2, resume=True, changes=changes, world=1)
    assert said.startswith(f"gram.teacher {file} has other weights than the one that this run was trained with")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gram.teacher": "OTHER", "gram.crop_size": "40"}, "OTHER can't take its crops: images of 40 x 40 pixels"),
        ({"gram.teacher": "OTHER", "gram.refresh_every": "2"}, "whose EMA teacher can't replace it: set gram.refresh"),
        ({"gram.teacher": "OTHER/none"}, "gram.teacher OTHER/none: OTHER/none does not exist"),
        ({"gram.teacher": "GRAY"}, "gram.teacher GRAY is for images of 1 channels, and this run's have 3"),
        (
            {"model.backbone": "tests.run.test_gram:NoPatches", "model.drop_path": "0", "gram.crop_size": "none"},
            "gram.weight is for patches: tests.run.test_gram:NoPatches gives features of whole images only",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_anything_is_written(trained, tmp_path, changes, says):
    places = {"OTHER": str(trained / "other"), "GRAY": str(trained / "gray.safetensors")}
    if "GRAY" in says:
        gray = VisionTransformer(replace(VITS["vit_tiny_patch16_224"], in_chans=1), 32)
        save_file(gray.state_dict(), places["GRAY"])

    def placed(text):
        for word, place in places.items():
            text = text.replace(word, place)
        return text

    given = GRAM | {key: placed(value) for key, value in changes.items()}
    drop = ["model.patch_size", "model.width", "model.depth", "model.heads"] if "model.backbone" in changes else []
    overrides = given | dict.fromkeys(drop, "none")
    (said,) = run_on_ranks(train_tiny, trained / "images", tmp_path / "run", changes=overrides, world=1)
    assert said is not None and placed(says) in said and "\n" not in said
    assert not (tmp_path / "run/config.yaml").exists()


class NoPatches(torch.nn.Module):
    """Gives features of images alone."""

    def __init__(self, in_chans):
        super().__init__()
        self.layer = torch.nn.Linear(in_chans, 8)

    def forward(self, images):
        return self.layer(images.mean((2, 3)))

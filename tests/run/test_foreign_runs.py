"""Runs of backbones that dino_ds does not build: what they leave behind, what is refused, and starting the next one."""

from __future__ import annotations

import json
import shutil

import pytest
import safetensors.torch
import timm
import torch

import dino_ds
import dino_ds.cli.main as cli
from dino_ds.basics import own_code
from dino_ds.errors import CheckpointError
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, log_of, train_tiny

MODEL = {f"model.{key}": "none" for key in ("patch_size", "width", "depth", "heads")} | {"model.drop_path": "0"}
MODEL |= {"crops.global_size": "64", "crops.local_size": "32", "length": "2 steps", "optimizer.warmup": "0 steps"}
RESNET = MODEL | {
    "model.backbone": "resnet18",
    "model.arguments": '{"channels": [8, 8, 16, 16], "layers": [1, 1, 1, 1]}',
}
OWN = MODEL | {"model.backbone": "tests.weights.own:Own", "model.arguments": '{"width": 12}'}
LOOKS = {"eval.every": "2 steps", "eval.evals": "statistics,knn", "eval.k": "3", "eval.pictures_every": "2 steps"}
FAMILIES = "tests.models.test_families:"
IMAGES = torch.randn(2, 3, 96, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """images/, with a ResNet's run and an own class's."""
    folder = tmp_path_factory.mktemp("foreign")
    images = image_folder(folder / "images", classes=2)
    image_folder(folder / "test", classes=2, seed=1)
    looks = LOOKS | {"eval.root": str(folder / "test")}
    for name, changes in (("resnet", RESNET | looks), ("own", OWN)):
        assert run_on_ranks(train_tiny, images, folder / name, changes=changes, world=1) == [None]
    return folder


def test_timm_loads_a_teacher_by_the_line_that_is_written(runs):
    about = json.loads((runs / "resnet/teacher.json").read_text())
    arguments = about["timm_arguments"]
    theirs = timm.create_model(about["timm_name"], **arguments).eval()
    theirs.load_state_dict(safetensors.torch.load_file(runs / "resnet/teacher.safetensors"))
    ours = dino_ds.load(runs / "resnet")
    with torch.no_grad():
        torch.testing.assert_close(ours.features(IMAGES), theirs(IMAGES), rtol=0, atol=1e-5)
    assert ", ".join(f"{key}={value!r}" for key, value in arguments.items()) in about["load"]
    assert ours.heads["head"] and dict(ours.network.named_buffers())["bn1.num_batches_tracked"] == 2


def test_pictures_and_evaluations_of_a_run(runs, capsys, monkeypatch):
    """A map of 16 patches a side, of crops that have 2; what a CNN has not is left out, or refused where asked for."""
    for step in ("step_00000000", "step_00000002"):
        assert {p.stem for p in (runs / "resnet/pictures" / step).iterdir()} == {"map", "neighbors", "pca"}
    assert "no pictures" not in log_of(runs / "resnet")
    assert {"statistics", "knn"} == json.loads((runs / "resnet/evaluations.json").read_text()).keys()
    asked = ["pictures", str(runs / "resnet"), "--out", str(runs / "out")]
    monkeypatch.setattr("sys.argv", ["dino-ds", *asked])
    cli.main()
    assert {p.stem for p in (runs / "out").iterdir()} == {"pca", "neighbors", "map"}
    monkeypatch.setattr("sys.argv", ["dino-ds", *asked, "--only", "attention"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "resnet18 is not a Vision Transformer" in capsys.readouterr().err


def test_the_next_run_keeps_the_statistics_that_it_starts_with(runs, tmp_path):
    """teacher.batch_norm frozen, on the source's architecture; also resumed, when the source is gone."""
    shutil.copytree(runs / "resnet", tmp_path / "source")
    changes = RESNET | {"model.init_from": str(tmp_path / "source"), "teacher.batch_norm": "frozen"}
    args = (runs / "images", tmp_path / "run")
    assert run_on_ranks(train_tiny, *args, max_steps=1, changes=changes, world=1) == [None]
    shutil.rmtree(tmp_path / "source")
    assert run_on_ranks(train_tiny, *args, resume=True, changes=changes, world=1) == [None]
    was, now = (safetensors.torch.load_file(p / "teacher.safetensors") for p in (runs / "resnet", tmp_path / "run"))
    for name, tensor in was.items():
        is_buffer = "running" in name or "num_batches" in name
        assert torch.equal(now[name], tensor) == is_buffer, name


def test_an_own_class_is_imported_where_it_is_named(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(own_code, "_allowed", set())
    assert "says how timm loads it" in log_of(runs / "resnet")
    how = f"dino_ds.load({str(runs / 'own')!r}, backbone='tests.weights.own:Own') loads it"
    assert how in log_of(runs / "own")
    for name in ("teacher.safetensors", "teacher.json"):
        shutil.copy(runs / "own" / name, tmp_path / name)
    (checkpoint,) = (runs / "own/checkpoints").glob("step_*")
    alone = shutil.copytree(checkpoint, tmp_path / "alone")
    places = runs / "own", tmp_path / "teacher.safetensors", checkpoint, alone
    for place in places:
        with pytest.raises(CheckpointError, match=r"the class tests[.]weights[.]own:Own, whose code would run"):
            dino_ds.load(place)
    ours, *others = (dino_ds.load(place, backbone="tests.weights.own:Own") for place in places)
    assert ours.patch_tokens(IMAGES).shape == (2, 12, 8, 24)
    assert all(torch.equal(other.features(IMAGES), ours.features(IMAGES)) for other in others)


REFUSED = [
    ({"model.backbone": f"{FAMILIES}Raises"}, "gives no features of images: no weights here"),
    ({"teacher.batch_norm": "frozen"}, "give model.init_from, or take reference or ema"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_refused_network_leaves_no_run_folder(changes, message, runs, tmp_path):
    own = {**RESNET, **changes}
    if "model.backbone" in changes:
        own = {**own, "model.arguments": "{}", "model.drop_path": "0"}
    (said,) = run_on_ranks(train_tiny, runs / "images", tmp_path / "run", world=1, changes=own)
    assert said is not None and message in said and "\n" not in said
    assert not (tmp_path / "run").exists()

"""`--config continue`: whatever the source's layout and the ds config, student and teacher begin as the source is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch

import dino_ds
from dino_ds.cli.main import parse, prepare
from dino_ds.config.crops import EMA
from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.errors import UserError
from dino_ds.method.build import build_network, build_step
from dino_ds.weights.load import load
from dino_ds.weights.start import as_source
from tests.engine.harness import fp32_student
from tests.ranks import run_on_ranks
from tests.run.harness import REPOSITORY, image_folder, unpredicted
from tests.weights.originals import Original, write_native

SMALL = {"data.global_batch": "8", "crops.num_local": "1"}
SMALL |= {"head.bottleneck": "16"}
DS = {"dino": "zero0_fp32", "dinov2": "zero1_bf16", "dinov3": "zero2_fp16", "hf": "zero3_fp16", "resnet": "zero2_bf16"}
DS |= {"timm.safetensors": "zero3_bf16"}
"""A ds config for the file or folder of each layout."""
VIT = {"embed_dim": 64, "num_heads": 2, "depth": 2, "num_classes": 0}


def _write(layout: str, path: Path) -> None:
    torch.manual_seed(0)
    models: dict[str, Any] = {
        "dino": lambda: Original(32, 8, 64, 2, 2),
        "dinov2": lambda: Original(28, 14, 64, 2, 2, v2=True, registers=2),
        "dinov3": lambda: timm.create_model("vit_small_patch16_dinov3", **VIT),
        "timm.safetensors": lambda: timm.create_model(
            "vit_small_patch14_reg4_dinov2", **VIT, patch_size=8, img_size=32
        ),
        "resnet": lambda: timm.create_model("resnet18", num_classes=0),
    }
    if layout == "hf":
        write_native(None, path)
    elif path.suffix:
        safetensors.torch.save_file(models[layout]().state_dict(), path)
    else:
        torch.save(models[layout]().state_dict(), path)


def _recipe(source: Path, layout: str, **changes: str) -> Recipe:
    heads = {} if layout in ("hf", "resnet") else {"model.heads": "2"}  # these files state none
    return as_source(load_recipe("continue", {**SMALL, **heads, "model.init_from": str(source), **changes}), None)


def _states_at_start(folder: Path) -> list[tuple[str, str, float]]:
    """The greatest difference of features to the source's, of student and teacher, by layout."""
    found = []
    for layout, name in DS.items():
        recipe, path = _recipe(folder / layout, layout), f"{REPOSITORY}/ds_configs/{name}.json"
        step = build_step(recipe, resolve_ds_config(load_ds_config(path, {}), path, 8, 2), epoch_steps=10)
        student = build_network(recipe, PerformanceOptions())
        student.load_state_dict(fp32_student(step.engine, student))
        images = torch.randn(2, 3, recipe.crops.local_size, recipe.crops.global_size)
        source = load(folder / layout, heads=recipe.model.heads if layout != "resnet" else None)
        with torch.no_grad():
            for who, network in (("student", student), ("teacher", step.teachers[EMA].network)):
                ours = network.backbone.eval().features(images)
                found.append((layout, who, float((ours - source.features(images)).abs().max())))
    return found


def test_student_and_teacher_begin_as_the_source_whatever_its_layout_and_the_ds_config(tmp_path):
    """Features to 1e-6, of the FP32 masters on two ranks and of the teacher: the same values in the same network."""
    for layout in DS:
        _write(layout, tmp_path / layout)
    for found in run_on_ranks(_states_at_start, tmp_path):
        assert len(found) == 2 * len(DS)
        assert [one for one in found if not one[2] <= 1e-6] == [], found


@pytest.mark.parametrize(
    ("layout", "changes", "sizes", "said"),
    [
        ("dino", {}, (32, 16), "crops.global_size 32 and crops.local_size 16, for the images and patches that"),
        ("dino", {"crops.global_size": "64", "crops.local_size": "24"}, (64, 24), ""),
        ("dinov2", {}, (28, 14), "crops.global_size 28 and crops.local_size 14, for"),
        ("dinov3", {}, (224, 96), ""),
    ],
)
def test_crops_have_the_sizes_that_the_source_knows(tmp_path, layout, changes, sizes, said):
    _write(layout, tmp_path / layout)
    heads, notes = {} if layout == "resnet" else {"model.heads": "2"}, list[str]()
    given = load_recipe("continue", {**SMALL, **heads, **changes, "model.init_from": str(tmp_path / layout)})
    recipe = as_source(given, None, notes)
    assert (recipe.crops.global_size, recipe.crops.local_size) == sizes
    assert [note.startswith(said) for note in notes] == [True] * bool(said)
    assert load_recipe(None, {}).crops.global_size == 224 and recipe.crops.num_local == 1


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        ((), "model: backbone from_source is that of weights: name them with model.init_from", 2),
        (("--model.init_from", "/nowhere.pth"), "/nowhere.pth does not exist; give a run folder or one of its", 3),
        (("--model.init_from", "{dino}", "--model.train", "first 2 blocks"), "'first 2 blocks' is not all, 'last N", 2),
        (("--model.init_from", "{dino}", "--crops.local_size", "20"), "crops.local_size 20 is not a multiple of", 2),
    ],
)
def test_what_can_t_be_continued_is_said_in_one_line(tmp_path, monkeypatch, words, said, code):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    _write("dino", tmp_path / "dino")
    given = [word.format(dino=tmp_path / "dino") for word in words]
    place = ["--data.root", str(tmp_path), "--run_dir", str(tmp_path / "run"), "--model.heads", "2"]
    with pytest.raises(UserError) as caught:
        prepare(*parse(["train", "--config", "continue", *place, *given]))
    assert said in str(caught.value) and "\n" not in str(caught.value) and caught.value.exit_code == code
    assert not (tmp_path / "run").exists()


def test_a_short_run_needs_no_choice_but_its_length(tmp_path):
    """From Python: schedules are shares of the length, the start is the first evaluation, its distance is logged."""
    for split, count in (("train", 24), ("test", 8)):
        image_folder(tmp_path / split, count, classes=2)
    torch.manual_seed(0)
    size = {"patch_size": 8, "img_size": 32, "embed_dim": 16, "depth": 1, "num_heads": 1}
    network = timm.create_model("vit_tiny_patch16_224", num_classes=0, **size)
    timm.models.save_for_hf(network, tmp_path / "start", model_args=size, safe_serialization=True)
    data = {"root": str(tmp_path / "train"), "global_batch": 8, "workers": 0}
    options = {"model": {"init_from": str(tmp_path / "start")}, "data": data, "eval": {"k": 3}, "log_every": 1}
    options["eval"]["root"] = str(tmp_path / "test")
    with unpredicted():
        run = dino_ds.train("continue", run_dir=str(tmp_path / "run"), length="40 images", **options)
    recipe = load_recipe(str(tmp_path / "run/config.yaml"), {})
    assert (str(recipe.optimizer.warmup), str(recipe.eval.every)) == ("4 images", "2 images")
    distances = [line["preserve_loss"] for line in run.metrics if "preserve_loss" in line]
    assert distances[0] < 1e-4 < distances[-1]
    assert next(line["step"] for line in run.metrics if "knn_top1" in line) == 0
    assert run.load().features(torch.zeros(1, 3, 32, 32)).shape == (1, 16)

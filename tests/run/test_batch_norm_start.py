"""A run from weights with BatchNorm keeps their statistics: no recipe of ours replaces these by those of crops."""

from __future__ import annotations

import json
import shutil

import pytest
import timm
import torch
from safetensors.torch import load_file

from dino_ds.config.ds_config import load_ds_config
from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.loading import load_recipe, recipe_names
from dino_ds.config.stages import RecipeRequest
from dino_ds.errors import UserError
from dino_ds.method.build import build_network
from dino_ds.method.frozen import FrozenTeacher
from dino_ds.models.batch_norm import batch_norms
from dino_ds.run.train_options import TrainOptions
from dino_ds.train import train
from tests.ranks import run_on_ranks
from tests.run.harness import REPOSITORY, TINY, image_folder, log_of, unpredicted

ARGUMENTS = {"channels": [8, 8, 16, 16], "layers": [1, 1, 1, 1]}
RESNET = {f"model.{key}": "none" for key in ("patch_size", "width", "depth", "heads")} | {"model.drop_path": "0"}
RESNET |= {"model.backbone": "resnet18", "model.arguments": json.dumps(ARGUMENTS), "length": "8 steps"}
STILL = {"optimizer.lr": "1e-30", "optimizer.min_lr": "0", "model.freeze_backbone": "0 steps"}
FEATURES = {"teacher.distill": "features", "crops.num_local": "0", "objective.coding_rate_weight": "0"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """images/, and start/: weights with statistics far from those that crops of these images have."""
    place = tmp_path_factory.mktemp("start")
    image_folder(place / "images")
    torch.manual_seed(0)
    network = timm.create_model("resnet18", num_classes=0, **ARGUMENTS)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.5)  # no weight is 0, which a rate of 1e-30 would move
            module.bias.data.uniform_(0.1, 0.2)
            module.running_mean.normal_(std=3)
            module.running_var.uniform_(5, 10)
    timm.models.save_for_hf(network, place / "start", model_args=ARGUMENTS, safe_serialization=True)
    return place


def _recipe(config, place, changes):
    values = TINY | {"data.root": str(place / "images"), "optimizer.warmup": "0 steps"} | RESNET | changes
    return load_recipe(config, values)


def _train(config, place, run, changes, max_steps=None, resume=False):
    path = str(REPOSITORY / "ds_configs" / "zero1_fp32.json")
    options = TrainOptions(run_dir=str(place / run), max_steps=max_steps, resume=resume)
    with unpredicted():
        try:
            train(options, recipe=_recipe(config, place, changes), ds=load_ds_config(path, {}), ds_path=path)
        except UserError as error:
            return str(error)
    return None


def _from_start(place, **changes):
    return {"model.init_from": str(place / "start"), **changes}


def _assert_exports_start(place, run):
    start, exported = load_file(place / "start/model.safetensors"), load_file(place / run / "teacher.safetensors")
    assert exported.keys() == start.keys() and all(torch.equal(exported[name], start[name]) for name in start)


@pytest.mark.parametrize("config", recipe_names())
def test_each_recipe_keeps_the_statistics_of_a_start_alone(config, place):
    """Without an option; from scratch it has DINO's rule, and in a distillation that of a student."""
    backbone = {"model.backbone": "resnet18", "model.arguments": json.dumps(ARGUMENTS)}
    try:
        recipe = load_recipe(config, backbone | _from_start(place))
    except UserError:  # a recipe of options that a ResNet does not have
        recipe = load_recipe(config, _from_start(place) if load_recipe(config, {}).stage_start is None else {})
    if recipe.stage_start != "continue":
        assert recipe.batch_norm == "frozen"
    alone = {"model.backbone": "resnet18", "objective.preserve_weight": "0"}
    scratch = load_recipe(config, alone if config == "continue" else {})
    if scratch.stage_start is None:
        assert scratch.batch_norm == ("reference" if scratch.teacher.source is None else "ema")


@pytest.mark.parametrize("config", ["continue", "resnet18", "resnet50", "features"])
def test_at_no_rate_what_is_exported_stays_the_start_to_the_bit(config, place):
    """In 8 steps averages of crops would move by half. A distillation has the start as its frozen teacher too."""
    changes = _from_start(place) | STILL
    if config == "features":
        config, changes = (
            "small",
            changes | FEATURES | {"teacher.source": str(place / "start"), "objective.dino_weight": "1"},
        )
    run = f"still-{config}-{len(changes)}"
    ranks = 2 if config == "continue" else 1
    assert run_on_ranks(_train, config, place, run, changes, world=ranks) == [None] * ranks
    _assert_exports_start(place, run)
    assert "BatchNorm keeps the statistics of the start" in log_of(place / run)


def test_it_holds_over_a_resume_without_the_source_and_in_the_next_stage(place, tmp_path):
    shutil.copytree(place / "start", tmp_path / "start")
    changes = STILL | {"model.init_from": str(tmp_path / "start"), "objective.preserve_weight": "0"}
    assert run_on_ranks(_train, "continue", place, "again", changes, 2, world=1) == [None]
    shutil.rmtree(tmp_path / "start")
    assert run_on_ranks(_train, "continue", place, "again", changes, 4, True, world=1) == [None]
    _assert_exports_start(place, "again")
    of_run, scratch = load_recipe(str(place / "again/config.yaml"), {}), _recipe(None, place, {})
    for before, stage_start, rule in ((of_run, "continue", "frozen"), (scratch, "continue", "reference"),
                                      (of_run, "restart", "frozen"), (scratch, "restart", "frozen")):  # fmt: skip
        assert RecipeRequest(None, {"stage_start": stage_start}).applied_to(before).batch_norm == rule


def test_what_trains_is_what_is_exported(place):
    """The student too normalizes by the start's statistics: an image's features do not depend on its batch, and what is
    evaluated follows the weights. Frozen teachers evaluate. Heads without statistics of their own learn them."""
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for rule, alone in (("auto", True), ("reference", False)):
        changes = (
            _from_start(place)
            | STILL
            | {"teacher.batch_norm": rule, "head.batch_norm": "true", "objective.dino_weight": "1"}
        )
        recipe = _recipe("continue", place, changes)
        network = build_network(recipe, PerformanceOptions())
        backbone = network.train().backbone
        assert torch.allclose(backbone.features(images)[:2], backbone.features(images[:2]), atol=1e-6) is alone
        assert [norm.frozen for norm in batch_norms(network.heads()["head"])] == [False] * 2


def test_a_student_with_batch_norm_is_distilled_without_an_option(place, monkeypatch):
    """From scratch, by a frozen teacher with BatchNorm, which is in evaluation mode in every pass."""
    modes, call = [], FrozenTeacher.__call__

    def observed(self, *inputs):
        modes.extend(norm.training for norm in batch_norms(self._running))
        return call(self, *inputs)

    monkeypatch.setattr(FrozenTeacher, "__call__", observed)
    changes = FEATURES | {"teacher.source": str(place / "start"), "objective.dino_weight": "1", "length": "2 steps"}
    assert _train("small", place, "student", changes) is None
    assert modes and not any(modes)
    before, after = load_file(place / "start/model.safetensors"), load_file(place / "student/teacher.safetensors")
    assert before.keys() == after.keys()

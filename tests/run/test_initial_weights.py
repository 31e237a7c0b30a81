"""Starting from weights that exist, and training only the head at first."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.loading import load_recipe
from dino_ds.method.build import build_network
from dino_ds.method.dino import DINO
from dino_ds.models.base import CLS
from dino_ds.weights.load import load
from tests.engine.harness import build_step, crops, ds_config, fp32_student, run_windows, tiny_network, tiny_schedules
from tests.ranks import run_on_ranks
from tests.reference import product
from tests.run.harness import MASKED, image_folder, losses_of, train_tiny
from tests.weights.originals import saved_by_dino


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Images and a short run whose teacher the others start from."""
    place = tmp_path_factory.mktemp("trained")
    image_folder(place / "images")
    assert run_on_ranks(train_tiny, place / "images", place / "run", max_steps=2, world=1) == [None]
    return place


@pytest.mark.parametrize("ds, changes", [("zero0_fp32.json", {}), ("zero3_fp32.json", MASKED)])
def test_a_run_starts_from_another_s_teacher(trained, tmp_path, ds, changes):
    """With learning rate 0 at step 0 the first checkpoint is the start itself, on two ranks and in partitions too.

    A mask token, which the other does not have, starts at zero.
    """
    changes = changes | {"model.init_from": str(trained / "run"), "model.freeze_backbone": "3 steps"}
    args = (trained / "images", tmp_path / "run", ds, 1)
    assert run_on_ranks(train_tiny, *args, changes=changes) == [None, None]
    ours, theirs = load_file(tmp_path / "run/teacher.safetensors"), load_file(trained / "run/teacher.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    log = (tmp_path / "run/log.txt").read_text()
    assert f"started from {trained / 'run'} (dino_ds): 30 tensors of the backbone" in log
    assert "the head too (7 tensors)" in log
    assert ("it has no mask token: our own starts at zero" in log) == bool(changes.get("crops.mask"))


@pytest.mark.parametrize("of", ["a run", "a file of DINO's"])
def test_a_student_takes_backbone_and_head(trained, tmp_path, of):
    model, source = load(trained / "run"), trained / "run"
    if of != "a run":
        torch.save(saved_by_dino(model), source := tmp_path / "checkpoint.pth")
    recipe = load_recipe(str(trained / "run/config.yaml"), {"model.init_from": str(source)})
    network = build_network(recipe, PerformanceOptions())
    assert all(torch.equal(t, network.head.get_parameter(name)) for name, t in model.heads["head"].items())
    assert all(torch.equal(t, network.backbone.get_parameter(name)) for name, t in model.vit.named_parameters())
    kind, heads = "dino_ds", ""
    if of != "a run":
        kind, heads = "dino or timm", "; no file says its attention heads: 2 as the model"
    assert network.started_from == f"{source} ({kind}): 30 tensors of the backbone; the head too (7 tensors){heads}"


def test_a_head_of_other_shapes_starts_anew(trained, tmp_path):
    changes = {"model.init_from": str(trained / "run"), "head.prototypes": "5"}
    args = (trained / "images", tmp_path / "run")
    assert run_on_ranks(train_tiny, *args, max_steps=1, changes=changes, world=1) == [None]
    log = (tmp_path / "run/log.txt").read_text()
    assert "its head does not fit (head.prototypes.weight" in log and "(5, 16)): our own starts anew" in log


def test_another_crop_size_resizes_positions_and_a_resume_does_not_read_the_file_again(trained, tmp_path):
    torch.save(saved_by_dino(load(trained / "run")), tmp_path / "start.pth")
    changes = {"model.init_from": str(tmp_path / "start.pth"), "crops.global_size": "48"}
    assert run_on_ranks(train_tiny, trained / "images", tmp_path / "run", max_steps=1, changes=changes) == [None] * 2
    assert "position embedding resized to 37 places" in (tmp_path / "run/log.txt").read_text()
    (tmp_path / "start.pth").unlink()
    args = (trained / "images", tmp_path / "run")
    assert run_on_ranks(train_tiny, *args, max_steps=2, resume=True, changes=changes) == [None] * 2
    assert [step for step, _ in losses_of(tmp_path / "run")] == [1, 2]


def test_weights_that_do_not_fit_are_one_line(trained, tmp_path):
    changes = {"model.init_from": str(trained / "run"), "model.width": "64"}
    (message,) = run_on_ranks(train_tiny, trained / "images", tmp_path / "run", changes=changes, world=1)
    assert "another architecture: it has width 32, not 64; start with --model.width 32, or with" in message
    assert "\n" not in message and not (tmp_path / "run").exists()


def _head_only_windows(stage, precision):
    """Masters at the start, while the backbone is frozen, and after the first step in which it moves."""
    network = tiny_network()
    network.freezes_backbone = True
    schedules = tiny_schedules(warmup_steps=0, freeze_backbone_steps=2)
    step = build_step(ds_config(stage, precision, 8), network, schedules)
    states = [fp32_student(step.engine, tiny_network())]
    for window in range(3):
        run_windows(step, window, 1)
        states.append(fp32_student(step.engine, tiny_network()))
    return states


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (3, "fp32")])
def test_a_frozen_backbone_stays_to_the_last_bit_and_starts_afresh(stage, precision):
    """Two steps of the head alone; then Adam's first step of the backbone, which is at most lr in each weight."""
    states = run_on_ranks(_head_only_windows, stage, precision)[0]
    for name in states[0]:
        frozen = name.startswith("backbone.")
        assert torch.equal(states[2][name], states[0][name]) == frozen, name
    lr = tiny_schedules(warmup_steps=0).at(2).lr
    for name in (n for n in states[0] if n.startswith("backbone.")):
        moved = (states[3][name] - states[2][name]).abs().max()
        assert 0 < moved <= lr * (1 + tiny_schedules().at(2).weight_decay * 5) + 1e-7, name


def test_a_frozen_backbone_leaves_the_head_s_gradient_as_it_is():
    """Against a backbone whose features are detached by hand."""
    network = tiny_network()
    views = crops(torch.arange(2))
    network.freeze_backbone(True)
    product(network(views)[DINO]).square().sum().backward()
    head = {name: p.grad.clone() for name, p in network.head.named_parameters()}
    assert all(not p.grad.any() for p in network.backbone.parameters())
    network.zero_grad()
    product(network.head(network.backbone(views)[CLS].detach())).square().sum().backward()
    assert all(torch.equal(p.grad, head[name]) for name, p in network.head.named_parameters())

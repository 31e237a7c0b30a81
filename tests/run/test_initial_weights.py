"""Starting from weights that exist, with their BatchNorm statistics, also by `--config continue`, and training only the
head at first, or a part of the backbone: nothing else moves, whatever the ds config, also after a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from safetensors.torch import load_file

from dino_ds.cli.main import parse, prepare
from dino_ds.config import ds_schema, stages
from dino_ds.config.crops import EMA
from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.errors import UserError
from dino_ds.method import build, dino
from dino_ds.method.frozen import FrozenTeacher
from dino_ds.models import base, batch_norm
from dino_ds.models.trained import adapters_in
from dino_ds.run.run_folder import TeacherFiles
from dino_ds.weights.load import load
from dino_ds.weights.read import find_weights
from dino_ds.weights.start import as_source
from tests.engine import harness as engines
from tests.engine.harness import build_step, ds_config, fp32_student, run_windows, tiny_network, tiny_schedules
from tests.ranks import run_on_ranks
from tests.reference import product
from tests.run import harness, test_resume
from tests.run.harness import MASKED, TINY, image_folder, log_of, losses_of, train_alone, train_tiny, whole_tensors
from tests.run.test_stages import flags, run, words_of
from tests.weights import originals


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("trained")
    image_folder(place / "images")
    assert train_alone(place / "images", place / "run", max_steps=2) is None
    return place


def test_a_run_starts_from_another_s_teacher(trained, tmp_path):
    """With rate 0 the first checkpoint is the start itself; a mask token, which the other has not, starts at zero."""
    changes = MASKED | {"model.init_from": str(trained / "run"), "model.freeze_backbone": "3 steps"}
    args = (trained / "images", tmp_path / "run", "zero3_fp32.json", 1)
    assert run_on_ranks(train_tiny, *args, changes=changes) == [None, None]
    ours, theirs = load_file(tmp_path / "run/teacher.safetensors"), load_file(trained / "run/teacher.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    log = log_of(tmp_path / "run")
    assert "the head too (7 tensors)" in log and "it has no mask token: our own starts at zero" in log


def test_another_crop_size_resizes_positions_and_a_resume_does_not_read_the_file_again(trained, tmp_path):
    """A head of other shapes starts anew."""
    start, run = tmp_path / "start.pth", tmp_path / "run"
    torch.save(originals.saved_by_dino(load(trained / "run")), start)
    changes = {"model.init_from": str(start), "crops.global_size": "48", "head.prototypes": "5"}
    assert train_alone(trained / "images", run, max_steps=1, changes=changes) is None
    assert "position embedding resized to 37 places" in log_of(run)
    assert "its head does not fit (head.prototypes.weight" in log_of(run)
    start.unlink()
    assert train_alone(trained / "images", run, max_steps=2, resume=True, changes=changes) is None
    assert [step for step, _ in losses_of(run)] == [1, 2]


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
    views = engines.crops(torch.arange(2))
    network.freeze_backbone(True)
    product(network(views)[dino.DINO]).square().sum().backward()
    head = {name: p.grad.clone() for name, p in network.head.named_parameters()}
    assert all(not p.grad.any() for p in network.backbone.parameters())
    network.zero_grad()
    product(network.head(network.backbone(views)[base.CLS].detach())).square().sum().backward()
    assert all(torch.equal(p.grad, head[name]) for name, p in network.head.named_parameters())


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
    recipe = _recipe(config, place, changes)
    return train_tiny(place / "images", place / run, "zero1_fp32.json", max_steps, resume, recipe=recipe)


def _from_start(place):
    return {"model.init_from": str(place / "start")}


def _assert_exports_start(place, run):
    start, exported = load_file(place / "start/model.safetensors"), load_file(place / run / "teacher.safetensors")
    assert exported.keys() == start.keys() and all(torch.equal(exported[name], start[name]) for name in start)


@pytest.mark.parametrize("config", ["continue", "resnet18", "features"])
def test_at_no_rate_what_is_exported_stays_the_start_to_the_bit(config, place):
    """In 8 steps averages of crops would move by half. A distillation has the start as its frozen teacher too."""
    changes, run, ranks = _from_start(place) | STILL, f"still-{config}", 2 if config == "continue" else 1
    if config == "features":
        config = "small"
        changes |= FEATURES | {"teacher.source": str(place / "start"), "objective.dino_weight": "1"}
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
        assert stages.Request(recipe={"stage_start": stage_start}).applied_to(before).batch_norm == rule


def test_what_trains_is_what_is_exported(place):
    """An image's features don't depend on its batch: the student has the start's statistics, heads their own."""
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for rule, alone in (("auto", True), ("reference", False)):
        changes = {"teacher.batch_norm": rule, "head.batch_norm": "true", "objective.dino_weight": "1"}
        recipe = _recipe("continue", place, _from_start(place) | STILL | changes)
        network = build.build_network(recipe, ds_schema.PerformanceOptions())
        backbone = network.train().backbone
        assert torch.allclose(backbone.features(images)[:2], backbone.features(images[:2]), atol=1e-6) is alone
        assert [norm.frozen for norm in batch_norm.batch_norms(network.heads()["head"])] == [False] * 2


def test_a_student_with_batch_norm_is_distilled_without_an_option(place, monkeypatch):
    """From scratch, by a frozen teacher with BatchNorm, which is in evaluation mode in every pass."""
    modes, call = [], FrozenTeacher.__call__

    def observed(self, *inputs):
        modes.extend(norm.training for norm in batch_norm.batch_norms(self._running))
        return call(self, *inputs)

    monkeypatch.setattr(FrozenTeacher, "__call__", observed)
    changes = FEATURES | {"teacher.source": str(place / "start"), "objective.dino_weight": "1", "length": "2 steps"}
    assert _train("small", place, "student", changes) is None
    assert modes and not any(modes)
    before, after = load_file(place / "start/model.safetensors"), load_file(place / "student/teacher.safetensors")
    assert before.keys() == after.keys()


SMALL = {"data.global_batch": "8", "crops.num_local": "1", "head.bottleneck": "16"}
DS = {"dino": "zero0_fp32", "dinov2": "zero1_bf16", "dinov3": "zero2_fp16", "hf": "zero3_fp16", "resnet": "zero2_bf16"}
DS |= {"timm.safetensors": "zero3_bf16"}
"""A ds config for the file or folder of each layout."""
VIT = {"embed_dim": 64, "num_heads": 2, "depth": 2, "num_classes": 0}


def _write(layout: str, path: Path) -> None:
    torch.manual_seed(0)
    models: dict[str, Any] = {
        "dino": lambda: originals.Original(32, 8, 64, 2, 2),
        "dinov2": lambda: originals.Original(28, 14, 64, 2, 2, v2=True, registers=2),
        "dinov3": lambda: timm.create_model("vit_small_patch16_dinov3", **VIT),
        "timm.safetensors": lambda: timm.create_model(
            "vit_small_patch14_reg4_dinov2", **VIT, patch_size=8, img_size=32
        ),
        "resnet": lambda: timm.create_model("resnet18", num_classes=0),
    }
    if layout == "hf":
        originals.write_native(None, path)
    elif path.suffix:
        safetensors.torch.save_file(models[layout]().state_dict(), path)
    else:
        torch.save(models[layout]().state_dict(), path)


def _continued(source: Path, layout: str, **changes: str) -> Recipe:
    heads = {} if layout in ("hf", "resnet") else {"model.heads": "2"}  # these files state none
    return as_source(load_recipe("continue", {**SMALL, **heads, "model.init_from": str(source), **changes}), None)


def _states_at_start(folder: Path) -> list[tuple[str, str, float]]:
    """The greatest difference of features to the source's, of student and teacher, by layout."""
    found = []
    for layout, name in DS.items():
        recipe, path = _continued(folder / layout, layout), f"{harness.REPOSITORY}/ds_configs/{name}.json"
        step = build.build_step(recipe, resolve_ds_config(load_ds_config(path, {}), path, 8, 2), epoch_steps=10)
        student = build.build_network(recipe, ds_schema.PerformanceOptions())
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
    values, notes = {"model.heads": "2", "model.init_from": str(tmp_path / layout)}, list[str]()
    given = load_recipe("continue", SMALL | values | changes)
    recipe = as_source(given, None, notes)
    assert (recipe.crops.global_size, recipe.crops.local_size) == sizes
    assert [note.startswith(said) for note in notes] == [True] * bool(said)
    assert load_recipe(None, {}).crops.global_size == 224 and recipe.crops.num_local == 1


def test_a_recipe_of_weights_that_are_not_named_is_refused_before_anything_is_written(tmp_path):
    words = ["--config", "continue", "--data.root", str(tmp_path), "--run_dir", str(tmp_path / "run")]
    with pytest.raises(UserError, match=r"from_source is that of weights: name them with model\.init_from"):
        prepare(*parse(["train", *words]))
    assert not (tmp_path / "run").exists()


PARTS = {
    "lora": {"model.train": "lora", "model.lora_rank": "4"},
    "last": {"model.train": "last 1 blocks"},
    "norms": {"model.train": "norms_and_biases"},
}
HARD = test_resume.DINOV2 | {"gram.weight": "2", "objective.centering": "sinkhorn", "save_every": "2 steps"}
"""iBOT with its own head, KoLeo, Gram anchoring to a snapshot, rates by layer."""
STEPS = 4


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    place = tmp_path_factory.mktemp("started")
    image_folder(place / "images")
    for name, changes in (("start", {}), ("scaled", {"model.layer_scale": "1e-5"})):
        assert train_alone(place / "images", place / name, max_steps=2, changes=changes) is None
    return place


def _train_part(started: Path, folder: Path, part: str, ds: str, world: int = 2, **how) -> None:
    changes = how.pop("changes", {})
    base = started / ("scaled" if "model.layer_scale" in changes else "start")
    changes = {"model.init_from": str(base), **PARTS[part], **changes}
    steps = how.pop("steps", STEPS)
    said = run_on_ranks(harness.train_tiny, started / "images", folder, ds, steps, changes=changes, world=world, **how)
    assert said == [None] * world


def _check_frozen(folder: Path, base: Path, part: str, step: int = STEPS) -> None:
    """Frozen weights are the start to the bit, trained ones have moved; the optimizer has the state of these."""
    before = load_file(base / "teacher.safetensors")
    whole, layouts = whole_tensors(folder, step), harness.read_manifest(folder, step)["layouts"]
    shapes = layouts[0]["shapes"]
    trained = {name.removeprefix("backbone.") for name in shapes if name.startswith("backbone.")}
    assert {piece[0] for rank in layouts for flat in rank["flats"] for piece in flat["pieces"]} == set(shapes)
    teacher = {name.removeprefix("teacher.backbone."): t for name, t in whole.items()}
    frozen = before.keys() - trained
    assert frozen and all(torch.equal(teacher[name], before[name]) for name in frozen)
    assert not any(torch.equal(teacher[name], before[name]) for name in trained & before.keys())
    assert bool(adapters_in(teacher)) == (part == "lora")
    weights = find_weights(folder / f"checkpoints/step_{step:08d}").backbone
    if part != "lora":
        assert all(torch.equal(weights[name], before[name]) for name in frozen)
    assert weights.keys() == before.keys() == load_file(folder / "teacher.safetensors").keys()


@pytest.fixture(scope="module")
def reference(started, tmp_path_factory):
    place = tmp_path_factory.mktemp("reference")
    for part in PARTS:
        _train_part(started, place / part, part, "zero0_fp32.json", world=1)
    return place


@pytest.mark.parametrize(
    ("part", "ds", "ds_changes"),
    [
        ("lora", "zero2_fp32.json", {"gradient_accumulation_steps": "2"}),
        ("last", "zero1_fp32.json", {}),
        ("norms", "zero3_fp32.json", {"activation_checkpointing.number_checkpoints": "2"}),
    ],
)
def test_two_ranks_of_any_stage_equal_one_process(started, reference, tmp_path, part, ds, ds_changes):
    """Losses and teacher in FP32 to 1e-5: sums in another order."""
    _train_part(started, tmp_path / "run", part, ds, ds_changes=ds_changes)
    _check_frozen(tmp_path / "run", started / "start", part)
    theirs = reference / part
    assert dict(losses_of(tmp_path / "run")) == pytest.approx(dict(losses_of(theirs)), rel=1e-5)
    assert engines.max_difference(whole_tensors(tmp_path / "run", STEPS), whole_tensors(theirs, STEPS)) < 1e-5


@pytest.mark.parametrize(
    ("part", "ds", "other_ds"),
    [
        ("lora", "zero2_bf16.json", "zero3_bf16_offload.json"),
        pytest.param("last", "zero3_bf16.json", "zero0_fp32.json", marks=pytest.mark.full),
    ],
)
def test_a_resumed_run_is_bit_identical_and_goes_on_elsewhere(started, tmp_path, part, ds, other_ds):
    """With iBOT, KoLeo and Gram anchoring, in low precision: 2 + 2 steps are 4; then on under another stage and
    precision. Frozen weights keep the FP32 values of the file, which the student has rounded."""
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    _train_part(started, straight, part, ds, steps=4, changes=HARD)
    _train_part(started, harness.copy_until(2, straight, parts), part, ds, steps=4, resume=True, changes=HARD)
    test_resume.assert_same_checkpoint(parts, straight, 4)
    _check_frozen(parts, started / "scaled", part)
    _train_part(started, parts, part, other_ds, steps=5, resume=True, changes=HARD)
    _check_frozen(parts, started / "scaled", part, 5)


def test_the_best_teacher_is_merged_too(reference, tmp_path):
    run, prefix = reference / "lora", "teacher.backbone."
    backbone = {name[len(prefix) :]: t for name, t in whole_tensors(run, STEPS).items() if name.startswith(prefix)}
    files = TeacherFiles(tmp_path, load_recipe(str(run / "config.yaml"), {}), None)
    files.write(backbone, STEPS, {"metric": "knn", "value": 0.5, "start": 0.4})
    best, newest = (load_file(file) for file in (tmp_path / "best_teacher.safetensors", run / "teacher.safetensors"))
    assert adapters_in(backbone) and best.keys() == newest.keys()
    assert all(torch.equal(best[name], tensor) for name, tensor in newest.items())


def test_a_stage_begins_with_merged_adapters(reference, tmp_path):
    """A stage that restarts trains another part of what the adapters have made; one that continues can't."""
    before, more = reference / "lora", {"model.train": "norms_and_biases", "model.lora_rank": "8", "length": "2 steps"}
    words = ["--from", str(before), *flags(more)]
    assert run(words_of(tmp_path / "next", *words, stage_start="restart")) is None
    teachers = [load_file(folder / "teacher.safetensors") for folder in (before, tmp_path / "next")]
    assert all(torch.equal(teachers[1][name], t) for name, t in teachers[0].items() if t.ndim > 1)
    said = run(words_of(tmp_path / "other", *words, stage_start="continue"))
    assert said is not None and "trained another part: model.train lora there, norms_and_biases here" in said

"""Training a part of the backbone in whole runs: nothing else moves, whatever the ds config, also after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dino_ds.config.loading import load_recipe
from dino_ds.models.trained import adapters_in
from dino_ds.run.run_folder import TeacherFiles
from dino_ds.weights.read import find_weights
from tests.engine.harness import max_difference
from tests.ranks import run_on_ranks
from tests.run import harness, test_resume
from tests.run.harness import copy_until, image_folder, log_of, losses_of, read_manifest, train_alone, whole_tensors
from tests.run.test_stages import flags, run, words_of

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


def _train(started: Path, folder: Path, part: str, ds: str, world: int = 2, **how) -> None:
    changes = how.pop("changes", {})
    base = started / ("scaled" if "model.layer_scale" in changes else "start")
    changes = {"model.init_from": str(base), **PARTS[part], **changes}
    steps = how.pop("steps", STEPS)
    said = run_on_ranks(harness.train_tiny, started / "images", folder, ds, steps, changes=changes, world=world, **how)
    assert said == [None] * world


def _check_frozen(folder: Path, base: Path, part: str, step: int = STEPS) -> None:
    """Frozen weights are the start to the bit, trained ones have moved; the optimizer has the state of these."""
    before = load_file(base / "teacher.safetensors")
    whole, layouts = whole_tensors(folder, step), read_manifest(folder, step)["layouts"]
    trained = {name.removeprefix("backbone.") for name in layouts[0]["shapes"] if name.startswith("backbone.")}
    assert {piece[0] for rank in layouts for flat in rank["flats"] for piece in flat["pieces"]} == set(
        layouts[0]["shapes"]
    )
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
        _train(started, place / part, part, "zero0_fp32.json", world=1)
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
    _train(started, tmp_path / "run", part, ds, ds_changes=ds_changes)
    _check_frozen(tmp_path / "run", started / "start", part)
    theirs = reference / part
    assert [loss for _, loss in losses_of(tmp_path / "run")] == pytest.approx(
        [loss for _, loss in losses_of(theirs)], rel=1e-5
    )
    assert max_difference(whole_tensors(tmp_path / "run", STEPS), whole_tensors(theirs, STEPS)) < 1e-5


@pytest.mark.parametrize(
    ("part", "ds", "other_ds"),
    [
        ("lora", "zero2_bf16.json", "zero3_bf16_offload.json"),
        pytest.param("last", "zero3_bf16.json", "zero0_fp32.json", marks=pytest.mark.full),
        pytest.param("norms", "zero2_bf16_checkpointing.json", "zero2_fp16.json", marks=pytest.mark.full),
    ],
)
def test_a_resumed_run_is_bit_identical_and_goes_on_elsewhere(started, tmp_path, part, ds, other_ds):
    """With iBOT, KoLeo and Gram anchoring, in low precision: 2 + 2 steps are 4; then on under another stage and
    precision. Frozen weights keep the FP32 values of the file, which the student has rounded."""
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    _train(started, straight, part, ds, steps=4, changes=HARD)
    _train(started, copy_until(2, straight, parts), part, ds, steps=4, resume=True, changes=HARD)
    test_resume.assert_same_checkpoint(parts, straight, 4)
    _check_frozen(parts, started / "scaled", part)
    _train(started, parts, part, other_ds, steps=5, resume=True, changes=HARD)
    _check_frozen(parts, started / "scaled", part, 5)


def test_the_best_teacher_is_merged_too(reference, tmp_path):
    run = reference / "lora"
    whole = whole_tensors(run, STEPS)
    backbone = {name.removeprefix("teacher.backbone."): t for name, t in whole.items() if "teacher.backbone." in name}
    files = TeacherFiles(tmp_path, load_recipe(str(run / "config.yaml"), {}), None)
    files.write(backbone, STEPS, {"metric": "knn", "value": 0.5, "start": 0.4})
    best, newest = (load_file(file) for file in (tmp_path / "best_teacher.safetensors", run / "teacher.safetensors"))
    assert adapters_in(backbone) and best.keys() == newest.keys()
    assert "trained  lora, rank 4, alpha 16, in all linear layers of the backbone: " in log_of(run)
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

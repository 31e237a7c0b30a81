"""Stop, resume, also under another stage, precision or split: where an uninterrupted run is, to the last bit."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import run_on_ranks
from tests.run import harness
from tests.run.harness import copy_until, image_folder, log_of, losses_of, read_metrics, train_alone, train_tiny


def assert_same_checkpoint(ours: Path, theirs: Path, step: int) -> None:
    """To the last bit: student, optimizer, teacher, center and position; they may differ in the id of the run alone."""
    mine, other = harness.read_manifest(ours, step), harness.read_manifest(theirs, step)
    for key in ("run_id", "crc32"):
        assert mine.pop(key) and other.pop(key)
    for name in mine.pop("files").keys() | other.pop("files").keys():
        a, b = (load_file(run / f"checkpoints/step_{step:08d}" / name) for run in (ours, theirs))
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a), name
    assert mine == other
    a, b = (load_file(run / "teacher.safetensors") for run in (ours, theirs))
    assert all(torch.equal(a[key], b[key]) for key in a)


DINOV2 = harness.MASKED | {
    "objective.koleo_weight": "0..0.1 over 6 steps",
    "ibot_head.learned_lengths": "true",
    "optimizer.layer_decay": "0.8",
    "model.layer_scale": "1e-5",
}
"""Masks, both heads, two running centers, a weight on its way: what the run must pick up again."""
ACCUMULATE = {"gradient_accumulation_steps": "2"}


@pytest.mark.parametrize(
    ("ds", "objective"),
    [
        pytest.param("zero0_fp32.json", {}, marks=pytest.mark.full),
        ("zero3_fp32.json", DINOV2),
        ("zero1_fp16.json", {}),
        ("zero2_bf16.json", DINOV2 | {"objective.centering": "sinkhorn"}),
    ],
)
def test_resumed_run_is_bit_identical(tmp_path, ds, objective):
    """3 + 3 = 6 steps, two an epoch; accumulation 2, drop path, prototypes released at step 4, 2 ranks."""
    root = image_folder(tmp_path / "images")
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    changes = {"objective.freeze_prototypes": "4 steps", "save_every": "3 steps", **objective}
    assert run_on_ranks(train_tiny, root, straight, ds, 6, False, changes, ACCUMULATE) == [None, None]
    copy_until(3, straight, parts)
    assert run_on_ranks(train_tiny, root, parts, ds, 6, True, changes, ACCUMULATE) == [None, None]
    assert "resumed  at step 3" in log_of(parts)
    assert losses_of(parts) == losses_of(straight)
    assert [step for step, _ in losses_of(parts)] == list(range(1, 7))
    assert_same_checkpoint(parts, straight, 6)


def test_from_the_checkpoint_of_a_step(tmp_path):
    root, run = image_folder(tmp_path / "images"), tmp_path / "run"
    changes = {"save_every": "1 steps"}
    train_alone(root, run, max_steps=4, changes=changes)
    before = losses_of(run)
    assert read_metrics(run)[2].keys() >= {"save_seconds", "save_stall_seconds", "checkpoint_gib"}
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 99.0}\n{"step": 6, "lo')  # a process has died while it wrote
    message = train_alone(root, run, max_steps=4, resume=9, changes=changes)
    assert "checkpoint of step 9 not found in" in message and "found: 2, 3, 4" in message
    assert train_alone(root, run, max_steps=3, resume=2, changes=changes) is None
    assert losses_of(run) == before[:3]
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {"step_00000002", "step_00000003", "aside_step_00000004", "latest"}
    assert "put aside as aside_step_*: 3, 4" in log_of(run)


def test_one_command_line_starts_and_goes_on(tmp_path):
    root, run = image_folder(tmp_path / "images"), tmp_path / "run"
    for steps in (2, 4):
        assert train_alone(root, run, max_steps=steps, resume="auto") is None
    assert [step for step, _ in losses_of(run)] == [1, 2, 3, 4]
    shutil.rmtree(run / "checkpoints")
    (run / "teacher.safetensors").unlink()  # else they would be lost: tests/run/test_faults.py
    message = train_alone(root, run, max_steps=3, resume=True)
    assert "no checkpoint in" in message and "--resume auto" in message
    assert train_alone(root, run, max_steps=3, resume="auto") is None
    assert [step for step, _ in losses_of(run)] == [1, 2, 3]
    assert "no checkpoint yet" in log_of(run)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("refusals")
    train_alone(image_folder(place / "images"), place / "run", max_steps=1)
    return place / "run"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"changes": {"optimizer.kind": "sgd"}}, "optimizer.kind adamw -> sgd since step 1, .* --model.init_from"),
        ({"changes": {"optimizer.kind": "sgd"}, "allow_change": "optimizer.kind"}, "moments are of no use to another"),
        ({"changes": {"model.width": "64"}, "allow_change": "model.width"}, "model differs from the checkpoint in"),
        ({"allow_change": "lr"}, "--allow_change lr: it is not a key of the recipe. Did you mean optimizer.lr?"),
        ({"allow_change": "optimizer.lr,log_every"}, "--allow_change log_every: it may change freely, leave it out."),
        ({"resume": False, "allow_change": "seed"}, "--allow_change seed acts only with --resume"),
    ],
)
def test_what_can_not_be_continued_or_allowed_is_refused(run, how, says):
    path = run if how.get("resume", True) else run.parent / "other"
    message = train_alone(run.parent / "images", path, **{"max_steps": 3, "resume": True} | how)
    assert message is not None and re.search(says, message) and "\n" not in message


def test_other_settings_are_refused_unless_allowed(run):
    root = run.parent / "images"
    changes = {"optimizer.lr": "0.5", "head.prototypes": "48", "log_every": "7", "seed": "3"}
    clipping = {"gradient_clipping": "0.5"}
    message = run_on_ranks(train_tiny, root, run, "zero1_bf16.json", 3, True, changes, clipping)[0]
    assert "gradient_clipping 3.0 -> 0.5, optimizer.lr 0.02 -> 0.5, seed 0 -> 3; accept with --allow_change" in message
    message = train_alone(root, run, max_steps=3, resume=True, changes=changes, allow_change="seed")
    assert message.endswith("optimizer.lr 0.02 -> 0.5; accept with --allow_change optimizer.lr")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Images; a run of 3 steps; and it resumed for 2 more with nothing changed."""
    place = tmp_path_factory.mktemp("begun")
    root = image_folder(place / "images")
    train_alone(root, place / "run", max_steps=3)
    shutil.copytree(place / "run", place / "same")
    assert train_alone(root, place / "same", max_steps=5, resume=True) is None
    return place


@pytest.mark.parametrize(
    ("key", "how"),
    [
        ("data.global_batch", {"changes": {"data.global_batch": "4"}}),
        ("gradient_clipping", {"ds_changes": {"gradient_clipping": "0.01"}}),
    ],
)
def test_an_allowed_change_takes_effect(begun, tmp_path, key, how):
    run = shutil.copytree(begun / "run", tmp_path / "run")
    assert train_alone(begun / "images", run, max_steps=5, resume=True, allow_change=key, **how) is None
    mine, other = read_metrics(run), read_metrics(begun / "same")
    assert mine[:3] == other[:3] and mine[-1]["loss"] != other[-1]["loss"]
    assert (mine[4]["images"] == other[4]["images"]) == ("ds_changes" in how)
    assert f"changed since step 3, as allowed: {key} " in log_of(run)


def test_evaluation_survives_a_resume(tmp_path):
    """The baselines measured at the start are still in the last line. What is evaluated may change at any time."""
    root, run, test = image_folder(tmp_path / "images", 24, 3), tmp_path / "run", tmp_path / "test"
    changes = {"eval.every": "2 steps", "eval.root": str(image_folder(test, 9, 3, seed=1))}
    assert train_alone(root, run, max_steps=2, changes=changes) is None
    assert train_alone(root, run, max_steps=4, resume=True, changes=changes) is None
    assert [line["step"] for line in read_metrics(run) if "knn_top1" in line] == [0, 2, 4]
    assert "untrained network" in _last_verdict(run)
    changes |= {"eval.k": "3", "eval.evals": "knn,statistics"}
    assert train_alone(root, run, max_steps=6, resume=True, changes=changes) is None
    assert {"knn_top1", "eval/rankme"} <= read_metrics(run)[-1].keys()
    assert "untrained network" not in _last_verdict(run)


def _last_verdict(run: Path) -> str:
    """The log's last line about k-NN; advice may follow it."""
    return [line for line in log_of(run).splitlines() if "k-NN" in line and "warning" not in line][-1]


SAVED = {"save_every": "3 steps", "length": "30 steps", "objective.freeze_prototypes": "2 steps"}
SAVED |= {"optimizer.lr": "0.002"}
# Without KoLeo, which sees a micro-batch at a time.
SINKHORN = DINOV2 | {"objective.centering": "sinkhorn", "objective.koleo_weight": "0"}


@pytest.mark.parametrize(
    ("before", "after", "objective", "tolerance"),
    [
        pytest.param(("zero0_fp32", 1, 1), ("zero3_fp32", 2, 2), {}, 1e-5, marks=pytest.mark.full),
        (("zero2_bf16", 2, 1), ("zero3_bf16_offload", 1, 4), {}, 1e-2),
        (("zero1_fp16", 2, 1), ("zero2_bf16", 2, 1), {}, 0.15),  # 0.11 on one CPU
        (("zero1_fp32", 2, 1), ("zero3_fp32", 1, 4), SINKHORN, 1e-5),
    ],
)
def test_resume_under_another_setup(tmp_path, before, after, objective, tolerance):
    """The loss of every step is that of the run that was not interrupted, on the same images. FP32 sums in another
    order, bf16 and fp16 round at other places; a loss in bf16 differs from that in fp16 by percents, as the logits are
    divided by a temperature of 0.04."""
    root, straight, parts = image_folder(tmp_path / "images"), tmp_path / "straight", tmp_path / "parts"
    for run, (ds, world, accumulation), resume in ((straight, before, False), (parts, after, True)):
        ds_changes = {"gradient_accumulation_steps": str(accumulation)}
        if ds.endswith("fp16"):
            ds_changes["fp16.initial_scale_power"] = "4"  # no scale to be found, with batches left out meanwhile
        if resume:
            copy_until(3, straight, parts)
        args = (root, run, f"{ds}.json", 6, resume, SAVED | objective, ds_changes)
        assert run_on_ranks(train_tiny, *args, world=world) == [None] * world
    for (step, mine), (other, theirs) in zip(losses_of(parts), losses_of(straight), strict=True):
        assert step == other and mine == pytest.approx(theirs, rel=tolerance)
    assert "note     resumed from ZeRO " in log_of(parts)

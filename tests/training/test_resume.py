"""Stop, resume, and be where an uninterrupted run is: to the last bit, mid-epoch, on the same data."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import run_on_ranks
from tests.training.harness import image_folder, losses_of, read_metrics, train_tiny

ACCUMULATE = {"gradient_accumulation_steps": "2"}


@pytest.mark.parametrize("ds", ["zero2_bf16.json", "zero0_fp32.json", "zero3_fp32.json", "zero1_fp16.json"])
def test_resumed_run_is_bit_identical(tmp_path, ds):
    """3 steps + resume + 6 = 9 steps: two steps an epoch, so the stop is inside the second one. Accumulation 2,
    drop path 0.2, frozen prototypes released at step 2, 2 ranks."""
    root = image_folder(tmp_path / "images")
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    changes = {"objective.freeze_prototypes": "4 steps"}
    for run, steps, resume in ((straight, 9, False), (parts, 3, False), (parts, 9, True)):
        outcome = run_on_ranks(train_tiny, root, run, ds, steps, resume, changes, ACCUMULATE)
        assert outcome == [None, None]
    assert losses_of(parts) == losses_of(straight)
    assert [step for step, _ in losses_of(parts)] == list(range(1, 10))
    for name in ("teacher.safetensors", "checkpoints/step_00000009/whole.safetensors"):
        ours, theirs = load_file(parts / name), load_file(straight / name)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    state = json.loads((parts / "checkpoints/step_00000009/state.json").read_text())
    assert state == json.loads((straight / "checkpoints/step_00000009/state.json").read_text())


def test_lines_after_the_checkpoint_are_written_again_once(tmp_path):
    """A run that went on after its last save and died: its later lines are replaced, not doubled."""
    root, run = image_folder(tmp_path / "images"), tmp_path / "run"
    run_on_ranks(train_tiny, root, run, max_steps=4, world=1)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 99.0}\n{"step": 6, "lo')
    run_on_ranks(train_tiny, root, run, max_steps=6, resume=True, world=1)
    records = losses_of(run)
    assert [step for step, _ in records] == [1, 2, 3, 4, 5, 6]
    assert all(loss < 50 for _, loss in records)


def test_rotation_keeps_the_newest(tmp_path):
    root, run = image_folder(tmp_path / "images"), tmp_path / "run"
    changes = {"save_every": "1 steps", "keep_checkpoints": "2"}
    run_on_ranks(train_tiny, root, run, max_steps=5, changes=changes, world=1)
    names = sorted(p.name for p in (run / "checkpoints").iterdir() if p.is_dir())
    assert names == ["step_00000004", "step_00000005"]
    assert (run / "checkpoints/latest").read_text() == "step_00000005\n"


def test_a_half_written_checkpoint_does_not_exist(tmp_path):
    root, run = image_folder(tmp_path / "images"), tmp_path / "run"
    run_on_ranks(train_tiny, root, run, max_steps=2, world=1)
    (run / "checkpoints/writing_step_00000003").mkdir()
    (run / "checkpoints/step_00000009").mkdir()
    (run / "checkpoints/latest").unlink()
    assert run_on_ranks(train_tiny, root, run, max_steps=3, resume=True, world=1) == [None]
    assert [step for step, _ in losses_of(run)] == [1, 2, 3]


def test_a_run_that_died_before_its_first_checkpoint_starts_again(tmp_path):
    root, run = image_folder(tmp_path / "images"), tmp_path / "run"
    run_on_ranks(train_tiny, root, run, max_steps=2, world=1)
    shutil.rmtree(run / "checkpoints")
    assert run_on_ranks(train_tiny, root, run, max_steps=3, resume=True, world=1) == [None]
    assert [step for step, _ in losses_of(run)] == [1, 2, 3]
    assert "no checkpoint yet" in (run / "log.txt").read_text()


class TestRefusals:
    @pytest.fixture
    def run(self, tmp_path):
        run_on_ranks(train_tiny, image_folder(tmp_path / "images"), tmp_path / "run", max_steps=1, world=1)
        return tmp_path / "run"

    def test_a_folder_with_a_run_in_it(self, run):
        before = (run / "metrics.jsonl").read_bytes()
        message = run_on_ranks(train_tiny, run.parent / "images", run, world=1)[0]
        assert "already holds a run" in message and "--resume" in message and "--run_dir" in message
        assert (run / "metrics.jsonl").read_bytes() == before

    def test_nothing_to_resume(self, run, tmp_path):
        for message in run_on_ranks(train_tiny, run.parent / "images", tmp_path / "other", resume=True):
            assert "nothing to resume" in message
        assert not (tmp_path / "other").exists()

    def test_another_recipe_stage_or_number_of_ranks(self, run):
        root = run.parent / "images"
        changes = {"optimizer.lr": "0.5", "head.prototypes": "48", "log_every": "7"}
        message = run_on_ranks(train_tiny, root, run, "zero1_bf16.json", 3, True, changes)[0]
        for part in ("world_size was 1, is 2", "stage was 0, is 1", "precision", "optimizer.lr was 0.02, is 0.5"):
            assert part in message
        assert "log_every" not in message

    @pytest.mark.parametrize("change", ["truncated", "missing"])
    @pytest.mark.parametrize("name", ["whole.safetensors", "mp_rank_00_model_states.pt"])
    def test_a_damaged_checkpoint(self, run, name, change):
        path = run / "checkpoints/step_00000001" / name
        content = path.read_bytes()
        path.unlink()
        if change == "truncated":
            path.write_bytes(content[: len(content) // 2])
        message = run_on_ranks(train_tiny, run.parent / "images", run, resume=True, world=1)[0]
        assert name in message and "latest" in message

    def test_another_clipping(self, run):
        message = run_on_ranks(
            train_tiny, run.parent / "images", run, resume=True, ds_changes={"gradient_clipping": "0.5"}, world=1
        )[0]
        assert "gradient_clipping was 3.0, is 0.5" in message

    def test_a_run_folder_that_can_not_be_made(self, run):
        (run.parent / "file").write_text("")
        for message in run_on_ranks(train_tiny, run.parent / "images", run.parent / "file/run"):
            assert "can't be made" in message and "--run_dir" in message

    def test_a_latest_that_names_nothing(self, run):
        (run / "checkpoints/latest").write_text("step_00000077\n")
        message = run_on_ranks(train_tiny, run.parent / "images", run, resume=True, world=1)[0]
        assert "step_00000077" in message and "step_00000001" in message


def test_evaluation_survives_a_resume(tmp_path):
    """The baselines measured at the start are still in the last line."""
    root, test = image_folder(tmp_path / "images", 24, 3), image_folder(tmp_path / "test", 9, 3, seed=1)
    changes = {"eval.every": "2 steps", "eval.root": str(test)}
    run_on_ranks(train_tiny, root, tmp_path / "run", max_steps=2, changes=changes)
    run_on_ranks(train_tiny, root, tmp_path / "run", max_steps=4, resume=True, changes=changes)
    evaluations = [r for r in read_metrics(tmp_path / "run") if "knn_top1" in r]
    assert [r["step"] for r in evaluations] == [0, 2, 4]
    assert "untrained network" in (tmp_path / "run/log.txt").read_text().splitlines()[-1]

"""The files that a run leaves behind: metrics, TensorBoard, teacher, configs."""

from __future__ import annotations

import json
import threading
from datetime import datetime, timedelta, timezone

import pytest
import timm
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dino_ds.config.loading import load_recipe
from dino_ds.models.vit import VisionTransformer
from dino_ds.run import run_folder
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, read_metrics, train_tiny, whole_tensors

FIELDS = {"step", "images", "loss", "teacher_entropy", "kl", "lr", "weight_decay", "teacher_momentum", "teacher_temp"}
FIELDS |= {"grad_norm", "loss_scale", "skipped_steps", "images_per_second", "data_wait_fraction", "memory_gib"}
FIELDS |= {"memory_predicted_gib", "host_memory_gib", "host_free_gib"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    root, test = image_folder(folder / "images", 24, 3), image_folder(folder / "test", 9, 3, seed=1)
    changes = {"eval.every": "2 steps", "eval.root": str(test), "length": "4 steps"}
    changes |= {"model.registers": "2", "model.layer_scale": "0.1"}
    args = root, folder / "run", "zero2_bf16.json"
    assert run_on_ranks(train_tiny, *args, changes=changes, predicts=True) == [None, None]
    return folder / "run"


def test_one_line_of_metrics_per_step_with_every_field(run):
    lines = [r for r in read_metrics(run) if "loss" in r]
    assert [r["step"] for r in lines] == [1, 2, 3, 4]
    for record in lines:
        assert set(record) >= FIELDS
        assert record["images"] == 8 * record["step"]
        assert record["host_memory_gib"] > record["memory_gib"] / 2 > 0 and record["host_free_gib"] > 0
        assert record["loss"] == pytest.approx(record["teacher_entropy"] + record["kl"], abs=1e-6)
    assert lines[0]["lr"] == 0 and lines[1]["lr"] > 0


def test_tensorboard_has_scalars(run):
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert {"loss", "kl", "teacher_entropy", "knn_top1"} <= set(events.Tags()["scalars"])
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3, 4]


def test_timm_loads_the_teacher_as_its_json_says(run):
    """Strict, FP32, and the same features as the teacher in the checkpoint; with the registers and LayerScale that the
    recipe adds to timm's network."""
    about = json.loads((run / "teacher.json").read_text())
    state = load_file(run / "teacher.safetensors")
    assert {t.dtype for t in state.values()} == {torch.float32}
    model = timm.create_model(about["timm_name"], **about["timm_arguments"])
    model.load_state_dict(state)
    assert "mask_token" not in state
    recipe = load_recipe(str(run / "config.yaml"), {})
    ours = VisionTransformer(recipe.model.spec(), recipe.crops.global_size)
    whole = whole_tensors(run, 4)
    prefix = "teacher.backbone."
    ours.load_state_dict({k.removeprefix(prefix): v for k, v in whole.items() if k.startswith(prefix)})
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model.eval()(images), ours.eval().features(images), rtol=1e-4, atol=1e-5)


def test_configs_and_environment_are_written(run):
    resolved = json.loads((run / "ds_config.json").read_text())
    assert resolved["train_batch_size"] == 8
    assert load_recipe(str(run / "config.yaml"), {}).data.global_batch == 8
    environment = json.loads((run / "environment.json").read_text())
    assert environment["ranks"] == 2 and "torch" in environment["versions"]


def test_the_log_says_what_a_reader_wants(run):
    log = (run / "log.txt").read_text()
    for part in ("24 in ", "micro-batch 4 x accumulation 1 x ranks 2", "ZeRO 2, bf16", "raw pixels", "chance 33.3 %"):
        assert part in log
    times = [datetime.strptime(line.split(" ")[0], "%Y-%m-%dT%H:%M:%SZ") for line in log.splitlines()]
    assert times == sorted(times) and abs(datetime.now(timezone.utc).replace(tzinfo=None) - times[-1]) < timedelta(1)


@pytest.mark.slow
def test_a_file_of_another_machine_is_waited_for(tmp_path, monkeypatch):
    """NFS remembers for a while that a file was not there."""
    late = tmp_path / "late"
    threading.Timer(0.5, late.touch).start()
    assert run_folder._becomes_visible(late)
    monkeypatch.setattr(run_folder, "_SECONDS_TO_SEE", 0.3)
    assert not run_folder._becomes_visible(tmp_path / "never")

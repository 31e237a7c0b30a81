"""What a run shows on the screen and leaves behind, of a foreign backbone too: metrics, in services of others as well,
teacher, configs; and k-NN on images that eval.val_share holds out of training."""

from __future__ import annotations

import io
import json
import shutil
import struct
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import timm
import torch
from safetensors.torch import load_file
from tqdm import tqdm

import dino_ds
import dino_ds.cli.main as cli
from dino_ds.basics import own_code
from dino_ds.config.loading import load_recipe
from dino_ds.data.sources import training_images
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.evals.runner import EvalRunner
from dino_ds.run import loop as loop_module
from dino_ds.run import metrics
from tests.ranks import run_on_ranks
from tests.run.harness import TINY, image_folder, log_of, read_metrics, train_alone, train_tiny

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


def test_timm_loads_the_teacher_as_its_json_says(run):
    """Strict, FP32, the features of the checkpoint's teacher; with the recipe's registers and LayerScale."""
    about = json.loads((run / "teacher.json").read_text())
    state = load_file(run / "teacher.safetensors")
    assert {t.dtype for t in state.values()} == {torch.float32}
    model = timm.create_model(about["timm_name"], **about["timm_arguments"])
    model.load_state_dict(state)
    assert all(f"{key}={value!r}" in about["load"] for key, value in about["timm_arguments"].items())
    ours, images = dino_ds.load(run / "checkpoints/step_00000004"), torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model.eval()(images), ours.features(images), rtol=1e-4, atol=1e-5)


MODEL = {f"model.{key}": "none" for key in ("patch_size", "width", "depth", "heads")} | {"model.drop_path": "0"}
MODEL |= {"crops.global_size": "64", "crops.local_size": "32", "length": "2 steps", "optimizer.warmup": "0 steps"}
NARROW = '{"channels": [8, 8, 16, 16], "layers": [1, 1, 1, 1]}'
RESNET = MODEL | {"model.backbone": "resnet18", "model.arguments": NARROW}
OWN = MODEL | {"model.backbone": "tests.weights.own:Own", "model.arguments": '{"width": 12}'}
LOOKS = {"eval.every": "2 steps", "eval.evals": "statistics,knn", "eval.k": "3", "eval.pictures_every": "2 steps"}
IMAGES = torch.randn(2, 3, 96, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """images/, with a ResNet's run and an own class's."""
    folder = tmp_path_factory.mktemp("foreign")
    images = image_folder(folder / "images", classes=2)
    image_folder(folder / "test", classes=2, seed=1)
    looks = LOOKS | {"eval.root": str(folder / "test")}
    for name, changes in (("resnet", RESNET | looks), ("own", OWN)):
        assert train_alone(images, folder / name, changes=changes) is None
    return folder


def test_pictures_and_evaluations_of_a_run(runs, capsys):
    """A map of 16 patches a side, of crops that have 2; what a CNN has not is left out, or refused where asked for."""
    for step in ("step_00000000", "step_00000002"):
        assert {p.stem for p in (runs / "resnet/pictures" / step).iterdir()} == {"map", "neighbors", "pca"}
    assert "no pictures" not in (log := log_of(runs / "resnet"))
    assert f"picture  {runs}/resnet/pictures/step_00000002/map.png" in log
    assert {"statistics", "knn"} == json.loads((runs / "resnet/evaluations.json").read_text()).keys()
    asked = ["pictures", str(runs / "resnet"), "--out", str(runs / "out")]
    cli.main(asked)
    assert {p.stem for p in (runs / "out").iterdir()} == {"pca", "neighbors", "map"}
    with pytest.raises(SystemExit):
        cli.main([*asked, "--only", "attention"])
    assert "resnet18 is not a Vision Transformer" in capsys.readouterr().err


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


def _numbers(folder):
    found: dict[int, dict[str, float]] = {}
    for line in read_metrics(folder):
        values = {k: v for k, v in line.items() if k != "step" and isinstance(v, (int, float))}
        found.setdefault(line["step"], {}).update(values)
    return found


def _wandb_history(folder):
    from wandb.proto import wandb_internal_pb2

    found: dict[int, dict[str, float]] = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for raw in _records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(raw)
            items = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            if items:
                logged = {name: value for name, value in items.items() if not name.startswith("_")}
                found.setdefault(int(items["_step"]), {}).update(logged)
    return found


def _records(content):
    """Records of a file of W&B, a LevelDB log after 7 bytes: blocks of 32 KiB, pieces of (crc, length, kind)."""
    at, whole = 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


@pytest.fixture(scope="module")
def log_root(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("loggers"))


@pytest.mark.slow
def test_offline_wandb_has_every_number_and_a_resume_goes_on(log_root, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_RUN_ID", "WANDB_NAME", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)
    sections, run = {"wandb.enabled": "true", "wandb.project": "mine"}, tmp_path / "run"
    assert train_tiny(log_root, run, max_steps=2, ds_changes=sections) is None
    time.sleep(1.1)  # wandb names a folder by the second
    assert train_tiny(log_root, run, max_steps=4, resume=True, ds_changes=sections) is None
    assert sorted(_numbers(run)) == [1, 2, 3, 4]
    assert _wandb_history(run) == _numbers(run)


@pytest.mark.slow
def test_trackio_has_every_number_over_a_resume_and_a_missing_server_stops_no_run(log_root, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    sections, run = {"trackio.enabled": "true", "trackio.project": "mine"}, tmp_path / "run"
    assert train_tiny(log_root, run, max_steps=2, ds_changes=sections) is None
    assert train_tiny(log_root, run, max_steps=4, resume=True, ds_changes=sections) is None
    (name,) = SQLiteStorage.get_runs("mine")
    found: dict[int, dict[str, float]] = {}
    for line in SQLiteStorage.get_logs("mine", name):
        found.setdefault(line.pop("step"), {}).update({k: v for k, v in line.items() if k != "timestamp"})
    assert found == _numbers(run)
    gone = {"trackio.enabled": "true", "trackio.server_url": "http://127.0.0.1:1"}
    assert train_tiny(log_root, tmp_path / "other", max_steps=1, ds_changes=gone) is None


def test_a_service_that_fails_is_left_out_once_and_training_goes_on(tmp_path, capsys):
    write = mock.Mock(side_effect=RuntimeError("the server\nis gone"))
    log = metrics.RunLog(tmp_path, 0, [metrics.Logger("wandb", write, mock.Mock(side_effect=RuntimeError))])
    for step in (1, 2):
        log.write({"step": step, "loss": 1.5})
    log.close()
    assert write.call_count == 1 and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    said = capsys.readouterr().err
    assert said.count("wandb takes no more metrics: the server is gone; metrics.jsonl has them all") == 1


def test_what_can_t_be_used_is_refused_before_the_run_begins(log_root, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    for section, message in (
        ({"wandb.enabled": "true"}, "the ds JSON's section wandb needs a package: pip install wandb"),
        ({"mlflow.enabled": "true"}, "a callback of dino_ds.train"),
    ):
        try:
            said = train_tiny(log_root, tmp_path / "run", max_steps=1, ds_changes=section)
        except ConfigError as error:
            said = str(error)
        assert said is not None and message in said
        assert not (tmp_path / "run").exists()
    monkeypatch.setattr(metrics, "find_spec", lambda name: name)
    fails = mock.Mock(side_effect=OSError("no key"))
    monkeypatch.setattr(metrics, "_open_wandb", fails)
    with pytest.raises(ConfigError, match="wandb does not start: no key; set it up"):
        metrics.open_loggers({"wandb": {"enabled": True}}, tmp_path, "0123456789abcdef")
    monkeypatch.setattr(metrics, "_open_trackio", fails)
    loggers, (warning,) = metrics.open_loggers({"trackio": {"enabled": True}}, tmp_path, "0123456789abcdef")
    assert not loggers and "trackio does not start: no key; metrics.jsonl has all metrics" in warning


SHARE = {"eval.val_share": "0.3", "eval.every": "2 steps", "eval.k": "5", "length": "6 steps"}
DETAILS = ("ZeRO", "kernels", "prototypes", "saves ", "save ", "entropy", "bottleneck", "micro-batch")


def _several(images, place):
    """For each start: its outcome, and the lines on its screen."""
    found = []
    for how in ({"max_steps": 4}, {"resume": True, "verbose": True}):
        lines: list[str] = []
        with mock.patch.object(tqdm, "write", lambda line, lines=lines, **_: lines.append(line)):
            said = train_tiny(images, place / "run", changes={**TINY, **SHARE, "save_every": "1 steps"}, **how)
        found.append((said, lines))
    return found


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """A folder of 40 images in two classes, and the starts of a run: with the default screen, then resumed, verbose."""
    place = tmp_path_factory.mktemp("screen")
    return (place, *run_on_ranks(_several, image_folder(place / "images", 40, classes=2), place, world=1)[0])


def test_the_screen_says_what_is_trained_and_what_moves(starts):
    place, (said, lines), _ = starts
    first = next(number for number, line in enumerate(lines) if line.startswith("step 1/"))
    assert said is None and first <= 12 and not [line for line in lines if any(word in line for word in DETAILS)]
    assert f"folder   {place / 'run'}" in "\n".join(lines[:first])
    moving = [line for line in lines[first:] if line.startswith("k-NN ") and " raw pixels " not in line]
    assert len(moving) == 2 and all("since the untrained network)" in line for line in moving)
    assert "raw pixels" in lines[-2] and "untrained network" in lines[-2]
    assert lines[-1].startswith("report   dino-ds report ")


def test_the_log_has_the_rest_and_verbose_shows_it(starts):
    place, (_, short), (said, long) = starts
    logged = [line.partition(" ")[2] for line in log_of(place / "run").splitlines()]
    assert said is None and logged[-len(long) :] == long and set(short) < set(logged)


def test_held_out_images_are_test_images(starts):
    place, *_ = starts
    assert [line["step"] for line in read_metrics(place / "run") if "knn_top1" in line] == [0, 2, 4, 6]
    values = {**TINY, **SHARE, "data.root": str(place / "images")}
    train = training_images(load_recipe(None, values).data, float(SHARE["eval.val_share"]))
    named = load_recipe(None, values | {"eval.root": str(place / "images")})
    assert len(EvalRunner.build(named, train, 3)._sources[1]) == 40
    runner = EvalRunner.build(load_recipe(None, values | {"eval.k": "30"}), train, 3)
    assert runner._names == () and "no k-NN on the held-out images: " in runner._notes[0] and runner.held_out


def test_a_terminal_shows_a_bar(tmp_path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    log = metrics.RunLog(tmp_path, 0)
    for step in (3, 4):  # from a checkpoint of step 2
        log.progress(step, 8)
        time.sleep(0.15)  # tqdm draws ten times a second
    log.close()
    assert "25 %|" in screen.getvalue() and "| 4/8 " in screen.getvalue() and screen.getvalue().endswith("\r")


def test_a_run_says_how_long_it_will_take_seconds_after_its_first_step(monkeypatch):
    def said(first: int, last: int, warmup: int = 0) -> list[str]:
        lines, now = [], [0.0]
        step = SimpleNamespace(applied_steps=first, schedules=SimpleNamespace(steps=last, warmup_steps=warmup))
        options = SimpleNamespace(last_step=last, global_batch=8)
        monkeypatch.setattr(loop_module.time, "monotonic", lambda: now[0])
        of_run = object.__new__(loop_module.Reports)
        of_run._run, of_run._log = SimpleNamespace(step=step, options=options), SimpleNamespace(info=lines.append)
        of_run._began, of_run._after_first, of_run._foretold = (0.0, first), None, False
        for _ in range(20):  # the first step takes 21 s, all others 1
            step.applied_steps, now[0] = step.applied_steps + 1, now[0] + (21 if now[0] == 0 else 1)
            of_run.foretell()
        return lines

    assert said(0, 206) == ['time     about 3.3 min left; a quarter of it: a new run with --length "412 images"']
    assert said(0, 206, 60)[0].endswith('--length "412 images" --optimizer.warmup "10 %"')
    assert said(100, 306) == ["time     about 3.3 min left"]
    assert said(0, 60) == []

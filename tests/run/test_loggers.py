"""Weights & Biases offline has every number of metrics.jsonl, over a resume too; what fails does not stop training."""

from __future__ import annotations

import json
import struct
import sys
import time

import pytest

from dino_ds.errors import ConfigError
from dino_ds.run.metrics import RunLog, open_loggers
from tests.run.harness import image_folder, read_metrics, train_tiny


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


def _config(**sections):
    return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("loggers"))


@pytest.mark.slow
def test_offline_wandb_has_every_number_and_a_resume_goes_on(root, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_RUN_ID", "WANDB_NAME", "WANDB_RESUME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    sections = _config(wandb={"enabled": "true", "project": "mine"})
    run = tmp_path / "run"
    assert train_tiny(root, run, max_steps=2, ds_changes=sections) is None
    time.sleep(1.1)  # wandb names a folder by the second
    assert train_tiny(root, run, max_steps=4, resume=True, ds_changes=sections) is None
    assert sorted(_numbers(run)) == [1, 2, 3, 4]
    assert _wandb_history(run) == _numbers(run)


@pytest.mark.slow
def test_trackio_has_every_number_over_a_resume_and_a_missing_server_stops_no_run(root, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    sections, run = _config(trackio={"enabled": "true", "project": "mine"}), tmp_path / "run"
    assert train_tiny(root, run, max_steps=2, ds_changes=sections) is None
    assert train_tiny(root, run, max_steps=4, resume=True, ds_changes=sections) is None
    (name,) = SQLiteStorage.get_runs("mine")
    found: dict[int, dict[str, float]] = {}
    for line in SQLiteStorage.get_logs("mine", name):
        found.setdefault(line.pop("step"), {}).update({k: v for k, v in line.items() if k != "timestamp"})
    assert found == _numbers(run)
    gone = _config(trackio={"enabled": "true", "server_url": "http://127.0.0.1:1"})
    assert train_tiny(root, tmp_path / "other", max_steps=1, ds_changes=gone) is None


class _Broken:
    name = "wandb"

    def __init__(self):
        self.asked = 0

    def write(self, values, step):
        self.asked += 1
        raise RuntimeError("the server\nis gone")

    def close(self):
        raise RuntimeError


def test_a_service_that_fails_is_left_out_once_and_training_goes_on(tmp_path, capsys):
    broken = _Broken()
    log = RunLog(tmp_path, 0, [broken])
    for step in (1, 2):
        log.write({"step": step, "loss": 1.5})
    log.close()
    assert broken.asked == 1 and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    said = capsys.readouterr().err
    assert said.count("wandb takes no more metrics: the server is gone; metrics.jsonl has them all") == 1


def test_what_can_t_be_used_is_refused_before_the_run_begins(root, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    for section, message in (
        (_config(wandb={"enabled": "true"}), "the ds JSON's section wandb needs a package: pip install wandb"),
        (_config(wandb={"enabled": "yes"}), "--ds.wandb.enabled"),
        (_config(mlflow={"enabled": "true"}), "a callback of dino_ds.train"),
        (_config(csv_monitor={"enabled": "true"}), "metrics.jsonl"),
    ):
        try:
            said = train_tiny(root, tmp_path / "run", max_steps=1, ds_changes=section)
        except ConfigError as error:
            said = str(error)
        assert said is not None and message in said
        assert not (tmp_path / "run").exists()
    monkeypatch.setattr("dino_ds.run.metrics.find_spec", lambda name: name)
    monkeypatch.setattr("dino_ds.run.metrics._open_wandb", _fails)
    with pytest.raises(ConfigError, match="wandb does not start: no key; set it up"):
        open_loggers({"wandb": {"enabled": True}}, tmp_path, "0123456789abcdef")
    monkeypatch.setattr("dino_ds.run.metrics._open_trackio", _fails)
    loggers, (warning,) = open_loggers({"trackio": {"enabled": True}}, tmp_path, "0123456789abcdef")
    assert not loggers and "trackio does not start: no key; metrics.jsonl has all metrics" in warning


def _fails(*given):
    raise OSError("no key")

"""The doctor: a page that is right about this machine, and what it says of machines that lack something."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dino_ds.planning.doctor_machine as doctor_machine
import dino_ds.planning.doctor_software as doctor_software
from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.options.machine import DoctorOptions
from dino_ds.planning import doctor, doctor_speed
from dino_ds.planning.doctor_speed import measure_data
from dino_ds.planning.measure.machine import Gpu
from dino_ds.planning.measure.memory import ChildResult
from tests.launching.cluster import environment
from tests.ranks import run_on_ranks
from tests.run.harness import REPOSITORY, image_folder

QUICKSTART = load_recipe("quickstart", {})


def _resolved(name):
    path = str(REPOSITORY / "ds_configs" / name)
    return resolve_ds_config(load_ds_config(path, {}), path, 512, 1)


def _on_pool(function, ranks, bare):
    assert function == "dino_ds.planning.doctor_speed:sum_tensors"
    return [ChildResult(value, 0, 0) for value in run_on_ranks(doctor_speed.sum_tensors, world=ranks)]


def test_the_page_of_this_machine(tmp_path, capsys, monkeypatch):
    """Everything, with real ranks that sum a tensor."""
    monkeypatch.setattr(doctor_speed, "run_in_children", _on_pool)
    recipe = load_recipe(None, {"data.root": str(image_folder(tmp_path / "images")), "data.workers": "0"})
    path = str(REPOSITORY / "ds_configs/zero0_fp32.json")
    options = DoctorOptions(run_dir=str(tmp_path / "runs"), json=True)
    doctor.run(options, recipe=recipe, ds=load_ds_config(path, {}), ds_path=path)
    found = json.loads(capsys.readouterr().out)
    by_topic = {finding["topic"]: finding for finding in found["findings"]}
    assert found["trains"], found
    assert torch.__version__.split("+")[0] in by_topic["software"]["text"]
    assert by_topic["data"]["text"].startswith("20 images; ")
    assert "GB/s for 64 MiB" in by_topic["all-reduce"]["text"]
    assert "op report" in found["reports"]["deepspeed"] and "PyTorch version" in found["reports"]["torch"]
    assert all(finding["remedy"] for finding in found["findings"] if finding["level"] != "ok")
    if not torch.cuda.is_available():
        assert by_topic["gpu"]["text"].startswith("no GPU")
        assert by_topic["all-reduce"]["text"].startswith("2 processes, gloo")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has fp16")
@pytest.mark.slow
def test_a_torch_that_does_not_load_is_a_page_not_a_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "from dino_ds.cli.main import main; main()"
    command = [sys.executable, "-c", code, "doctor", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "does not load (libcudart.so.13: cannot open" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("training would stop: ")


def _texts(findings):
    return [(finding.level, finding.text) for finding in findings]


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ("8.6", ["sm_80"], True),  # code of the same major version
        ("8.0", ["sm_86"], False),
        ("7.0", ["sm_75", "sm_80"], False),
        ("9.0", ["sm_80", "compute_80"], True),  # PTX, compiled by the driver
        ("10.0", ["sm_90a", "sm_100a"], True),
        ("7.0", ["sm_80", "compute_80"], False),
    ],
)
def test_a_gpu_that_torch_has_no_code_for_stops(capability, built, runs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    found = list(doctor_machine._architectures([Gpu("GPU", capability, 40.0, 40.0)]))
    assert [finding.level for finding in found] == ([] if runs else ["FAIL"])


def test_busy_and_unequal_gpus_are_warned_of(monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    gpus = [Gpu("A", "8.0", 40.0, 39.5), Gpu("B", "8.6", 24.0, 10.0)]
    assert _texts(doctor_machine._each(gpus)) == [
        ("ok", "0: A, capability 8.0, 39.5 of 40.0 GiB free"),
        ("warn", "1: B, capability 8.6, 10.0 of 24.0 GiB free"),
        ("warn", "the GPUs differ"),
    ]
    assert _texts(doctor_machine._peers(2)) == [("warn", "0 of 2 pairs reach each other's memory directly")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_driver_without_a_gpu_for_torch_stops(monkeypatch, tmp_path):
    assert doctor_machine._none("").level == "warn"
    monkeypatch.setattr(doctor_machine, "_DRIVER", str(tmp_path))
    found = doctor_machine._none("the driver is too old (found version 11040)")
    assert found.level == "FAIL" and ("too old" in found.text or torch.version.cuda is None)


def test_a_ds_config_that_the_device_can_t_compute_stops(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False, raising=False)
    cpu = torch.device("cpu")
    found = doctor_machine._precision(_resolved("zero2_fp16.json"), QUICKSTART, cpu)
    assert found.level == "FAIL" and "no fp16" in found.text and "wants fp16" in found.remedy
    found = doctor_machine._precision(_resolved("zero2_bf16.json"), QUICKSTART, cpu)
    assert found.level == "ok"


@pytest.mark.slow
def test_processes_that_sum_load_no_more_than_torch():
    """DeepSpeed and training's code, loaded twice, took most of the doctor's time on a busy machine."""
    code = (
        "import sys, dino_ds.planning.doctor_speed as d\n"
        "loaded = {'deepspeed', 'timm', 'torchvision'} & set(sys.modules)\n"
        "if __name__ == '__main__': print(loaded, next(d.measure_sums()).level)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout == "set() ok\n"


def test_versions_that_do_not_fit_are_named(monkeypatch):
    asked = ["torch>=99", "a_package_that_is_absent", "numpy>=1", 'pyarrow>=999; extra == "parquet"']
    monkeypatch.setattr(doctor_software, "requires", lambda name: asked)
    found = list(doctor_software._versions())
    assert [finding.level for finding in found] == ["FAIL", "FAIL"]
    assert "torch>=99 is needed" in found[0].text and found[0].remedy == "pip install 'torch>=99'"
    assert found[1].text == "a_package_that_is_absent is not installed"


def test_small_shared_memory_and_limits_are_named(monkeypatch, tmp_path):
    import resource

    small = os.statvfs_result((4096, 4096, 16384, 16384, 100, 0, 0, 0, 0, 255))
    workers = importlib.import_module("dino_ds.data.workers")
    monkeypatch.setattr(workers.os, "statvfs", lambda path: small)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    recipe = load_recipe("vits16", {"data.workers": "8"})
    by_topic = {finding.topic: finding for finding in doctor_machine.look_at_system(recipe, Path(tmp_path))}
    assert by_topic["shm"].level == "FAIL" and "--shm-size" in by_topic["shm"].remedy


def test_data_that_is_missing_or_broken_is_named(tmp_path):
    (found,) = measure_data(load_recipe(None, {"data.root": str(tmp_path / "none")}))
    assert found.level == "FAIL" and "none" in found.remedy
    (tmp_path / "images").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / "images" / name).write_bytes(b"not an image")
    (tmp_path / "signed").mkdir()
    Image.fromarray(np.full((4, 4), -5, np.int32)).save(tmp_path / "signed" / "1.tif")
    (found,) = measure_data(load_recipe(None, {"data.root": str(tmp_path / "signed")}))
    assert found.level == "FAIL" and "give --data.value_range" in found.remedy
    (found,) = measure_data(load_recipe(None, {"data.root": str(tmp_path / "images")}))
    assert found.level == "FAIL" and "none of the images looked at can be read" in found.remedy
    (tmp_path / "images/c.jpg").write_bytes(b"not looked at before a run")
    found = measure_data(load_recipe(None, {"data.root": str(tmp_path / "images")}))
    assert ("warn", "3 of 3 images can't be read") in _texts(found)


def test_a_name_that_others_can_t_reach_is_warned_of(monkeypatch):
    monkeypatch.setattr(doctor_machine.socket, "gethostbyname", lambda name: "127.0.1.1")
    found = doctor_machine._own_name()
    assert found.level == "warn" and "/etc/hosts" in found.remedy

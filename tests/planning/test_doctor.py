"""The doctor: a page that is right about this machine, and what it says of machines that lack something."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import types

import pytest
import torch

from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.options.commands import DoctorOptions
from dino_ds.planning import doctor, doctor_machine
from dino_ds.planning.measure.machine import VisibleGpu
from tests.launching.cluster import environment
from tests.run.harness import REPOSITORY, image_folder

no_gpu_here = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")


def _resolved(name):
    path = str(REPOSITORY / "ds_configs" / name)
    return resolve_ds_config(load_ds_config(path, {}), path, 512, 1)


def _levels(findings):
    return [finding.level for finding in findings]


def test_the_page_of_this_machine(tmp_path, capsys):
    recipe = load_recipe(None, {"data.root": str(image_folder(tmp_path / "images")), "data.workers": "0"})
    path = str(REPOSITORY / "ds_configs/zero0_fp32.json")
    files = {"recipe": recipe, "ds": load_ds_config(path, {}), "ds_path": path}
    result = doctor.run(DoctorOptions(run_dir=str(tmp_path / "runs"), json=True), **files).data
    assert not capsys.readouterr().out
    by_topic = {finding["topic"]: finding for finding in result["findings"]}
    assert result["trains"], result
    assert torch.__version__.split("+")[0] in by_topic["software"]["text"]
    assert by_topic["network"]["text"].startswith(socket.gethostname())
    assert all(finding["remedy"] for finding in result["findings"] if finding["level"] != "ok")
    assert torch.cuda.is_available() or by_topic["gpu"]["text"].startswith("no GPU")
    doctor.run(DoctorOptions(run_dir=str(tmp_path / "runs")), **files).show(as_json=False)
    page = capsys.readouterr().out.splitlines()
    assert "loading torch" in page[0] and page[-1].startswith("training can start: 0 problems, ")


@no_gpu_here
@pytest.mark.slow
def test_a_torch_that_does_not_load_is_a_page_not_a_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "from dino_ds.cli.main import main; main()"
    command = [sys.executable, "-c", code, "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "does not load (libcudart.so.13: cannot open" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("training would stop: ")


def test_gpus_that_others_use_and_a_precision_that_the_device_lacks(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False, raising=False)
    monkeypatch.setattr(doctor_machine, "no_gpu", lambda _: doctor_machine.judge("gpu", "none"))
    if not torch.cuda.is_available():
        *_, stops = doctor_machine.look_at_gpus(_resolved("zero2_fp16.json"))
        assert stops.level == "FAIL" and "no fp16" in stops.text and "wants fp16" in stops.remedy
        assert _levels(doctor_machine.look_at_gpus(_resolved("zero2_bf16.json"))) == ["ok", "ok"]
    gpus = [VisibleGpu("A", "8.0", 40.0, 39.5), VisibleGpu("A", "8.0", 40.0, 10.0)]
    monkeypatch.setattr(doctor_machine, "find_gpus", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    found = list(doctor_machine.look_at_gpus(_resolved("zero2_bf16.json")))
    assert _levels(found) == ["ok", "warn", "FAIL"]
    assert found[1].text == "1: A, capability 8.0, 10.0 of 40.0 GiB free" and "no bf16" in found[2].text


@no_gpu_here
def test_a_driver_without_a_gpu_for_torch_stops(monkeypatch, tmp_path):
    assert doctor_machine.no_gpu("").level == "warn"
    monkeypatch.setattr(doctor_machine, "_DRIVER", str(tmp_path))
    found = doctor_machine.no_gpu("the driver is too old (found version 11040)")
    assert found.level == "FAIL" and ("too old" in found.text or torch.version.cuda is None)


def test_a_compiler_that_is_absent_is_named(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    compiled = types.SimpleNamespace(
        performance=types.SimpleNamespace(compile="default"), raw={"zero_optimization": {}}
    )
    assert _levels(doctor.look_at_compiler(compiled)) == ["FAIL"]
    assert _levels(doctor.look_at_compiler(_resolved("zero0_fp32.json"))) == []


def test_small_shared_memory_limits_and_a_closed_folder_are_named(monkeypatch, tmp_path):
    small = os.statvfs_result((4096, 4096, 16384, 16384, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    found = doctor_machine.look_at_shared_memory(load_recipe("vits16", {"data.workers": "8"}))
    assert found.level == "FAIL" and "--shm-size" in found.remedy
    assert (doctor_machine.look_at_limits().level, doctor_machine.look_at_limits().text) == ("warn", "256 open files")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert doctor_machine._disk("runs", tmp_path / "a/b", 1).level == "FAIL"


def test_a_name_that_others_can_t_reach_is_named(monkeypatch):
    monkeypatch.setattr(doctor_machine.socket, "gethostbyname", lambda name: "127.0.1.1")
    _, name = doctor_machine.look_at_network()
    assert name.level == "warn" and "/etc/hosts" in name.remedy

"""The doctor: a page that is right about this machine, and what it says of machines that lack something."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch

from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.config.stages import Request
from dino_ds.options.commands import DoctorOptions
from dino_ds.planning import doctor
from dino_ds.planning.measure import VisibleGpu
from tests.launching.hosts import environment
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
    files = {"recipe": recipe, "request": Request(), "ds": load_ds_config(path, {}), "ds_path": path}
    result = doctor.run(DoctorOptions(run_dir=str(tmp_path / "runs"), json=True), **files).data
    assert not capsys.readouterr().out
    by_topic = {finding["topic"]: finding for finding in result["findings"]}
    assert result["trains"], result
    assert torch.__version__.split("+")[0] in by_topic["software"]["text"]
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
    if not torch.cuda.is_available():
        *_, stops = doctor.look_at_gpus(_resolved("zero2_fp16.json"))
        assert stops.level == "FAIL" and "no fp16" in stops.text and "wants fp16" in stops.remedy
        assert _levels(doctor.look_at_gpus(_resolved("zero2_bf16.json")))[-1] == "ok"
    gpus = [VisibleGpu("A", "8.0", 40.0, 39.5), VisibleGpu("A", "8.0", 40.0, 10.0)]
    monkeypatch.setattr("dino_ds.planning.measure.find_gpus", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    found = list(doctor.look_at_gpus(_resolved("zero2_bf16.json")))
    assert _levels(found) == ["ok", "warn", "warn", "FAIL"] and "NCCL" in found[2].text
    assert found[1].text == "1: A, capability 8.0, 10.0 of 40.0 GiB free" and "no bf16" in found[3].text


@no_gpu_here
def test_a_driver_without_a_gpu_for_torch_stops(monkeypatch, tmp_path):
    assert doctor.look_for_driver().level == "warn"
    monkeypatch.setattr(doctor, "_DRIVER", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: warnings.warn("the driver is too old", stacklevel=1))
    found = doctor.look_for_driver()
    assert found.level == "FAIL" and "the driver is too old" in found.text


def test_a_compiler_small_shared_memory_and_a_closed_folder_are_named(monkeypatch, tmp_path):
    small = os.statvfs_result((4096, 4096, 16384, 16384, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    path, recipe = str(REPOSITORY / "ds_configs/zero0_fp32.json"), load_recipe("vits16", {"data.workers": "8"})
    files = {
        "recipe": recipe,
        "request": Request(),
        "ds": load_ds_config(path, {"dino_ds.compile": "default"}),
        "ds_path": path,
    }
    result = doctor.run(DoctorOptions(run_dir=str(tmp_path / "a/b"), json=True), **files).data
    stops = {found["topic"]: found["remedy"] for found in result["findings"] if found["level"] == "FAIL"}
    assert stops.keys() == {"compilers", "shm", "disk"} and not result["trains"]
    assert "--shm-size" in stops["shm"] and "apt-get install g++" in stops["compilers"]

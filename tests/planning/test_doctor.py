"""The doctor: a page that is right about this machine, and what it says of machines that lack something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from dino_ds.config.ds_config import load_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.config.stages import Request
from dino_ds.errors import ConfigError
from dino_ds.options.commands import DoctorOptions
from dino_ds.planning import doctor
from dino_ds.planning.doctor import read_hostfile
from dino_ds.planning.measure import VisibleGpu
from tests.launching.hosts import environment
from tests.run.harness import REPOSITORY, image_folder

no_gpu_here = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")


def _files(recipe, **changes):
    path = str(REPOSITORY / "ds_configs/zero0_fp32.json")
    return {"recipe": recipe, "request": Request(), "ds": load_ds_config(path, changes), "ds_path": path}


def _levels(findings):
    return [finding.level for finding in findings]


def test_the_page_of_this_machine(tmp_path, capsys):
    recipe = load_recipe(None, {"data.root": str(image_folder(tmp_path / "images")), "data.workers": "0"})
    files = _files(recipe)
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
        *_, stops = doctor.look_at_gpus("fp16")
        assert stops.level == "FAIL" and "no fp16" in stops.text and "wants fp16" in stops.remedy
        assert _levels(doctor.look_at_gpus("bf16"))[-1] == "ok"
    gpus = [VisibleGpu("A", "8.0", 40.0, 39.5), VisibleGpu("A", "8.0", 40.0, 10.0)]
    monkeypatch.setattr("dino_ds.planning.measure.find_gpus", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    found = list(doctor.look_at_gpus("bf16"))
    assert _levels(found) == ["ok", "warn", "warn", "FAIL"] and "NCCL" in found[2].text
    assert found[1].text == "1: A, capability 8.0, 10.0 of 40.0 GiB free" and "no bf16" in found[3].text


@no_gpu_here
def test_a_driver_without_a_gpu_for_torch_stops(monkeypatch, tmp_path):
    assert next(doctor.look_at_gpus("fp32")).level == "warn"
    monkeypatch.setattr(doctor, "_DRIVER", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: warnings.warn("the driver is too old", stacklevel=1))
    found = next(doctor.look_at_gpus("fp32"))
    assert found.level == "FAIL" and "the driver is too old" in found.text


def test_a_compiler_small_shared_memory_and_a_closed_folder_are_named(monkeypatch, tmp_path):
    small = os.statvfs_result((4096, 4096, 16384, 16384, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    files = _files(load_recipe("vits16", {"data.workers": "8"}), **{"dino_ds.compile": "default"})
    result = doctor.run(DoctorOptions(run_dir=str(tmp_path / "a/b"), json=True), **files).data
    stops = {found["topic"]: found["remedy"] for found in result["findings"] if found["level"] == "FAIL"}
    assert stops.keys() == {"compilers", "shm", "disk"} and not result["trains"]
    assert "--shm-size" in stops["shm"] and "apt-get install g++" in stops["compilers"]


SAME = {"python": "3.11.7", "torch": "2.15.0", "the code in /here": "c0de", "a.json": "CRC 1"}
ANSWER = {"same": SAME, "gpus": ["A100", "A100"], "images": "", "sees": True}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([{}, {}], []),
        ([{}, {"same": {**SAME, "torch": "2.14.0"}}], ["w2: torch is 2.14.0, and 2.15.0 on w1"]),
        ([{"sees": False}], ["w1: does not see /runs/a of this machine -> put --run_dir on a disk that all share"]),
        ([{}, {"images": "/a does not exist"}], ["w2: /a does not exist -> mount the images there"]),
        ([{}, {"gpus": ["A100"]}], ["w2: 1 GPUs are found for 2 slots"]),
    ],
)
def test_every_problem_of_a_machine_is_named_with_its_remedy(changes, says, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    answers = {f"w{n}": more if isinstance(more, str) else ANSWER | more for n, more in enumerate(changes, 1)}
    findings = list(doctor.judge_answers(dict.fromkeys(answers, 2), answers, Path("/runs/a")))
    problems = [f"{finding.text} -> {finding.remedy}" for finding in findings if finding.level == "FAIL"]
    assert all(text.startswith(part) for text, part in zip(problems, says, strict=True))
    assert len({finding.text.partition(":")[0] for finding in findings}) == len(changes)


def test_why_a_machine_is_silent():
    for script, says in (
        ("exit 255", "not reachable by ssh"),
        ("no_such_program", "no_such_program: not found"),
        ("true", "no answer (code 0): this checkout"),
        ('echo welcome; echo \'{"torch": "2.11"}\'', "no answer (code 0)"),
    ):
        assert says in doctor._ask(["sh", "-c", script], "{}")
    assert doctor._ask(["sh", "-c", f"echo welcome; echo '{json.dumps(ANSWER)}'; echo bye"], "{}") == ANSWER


def test_machines_come_in_the_order_of_the_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# cluster\n\nw1 slots=4\r\n  gpu_node-2.example.org\tslots=2  # new\n10.0.0.3 slots=1")
    assert list(read_hostfile(str(path)).items()) == [("w1", 4), ("gpu_node-2.example.org", 2), ("10.0.0.3", 1)]


BROKEN = [
    "root@w1 slots=1",
    "w1,w2 slots=1",
    "w1",
    "w1 slots=0",
    "w1 slots=1025",
    "w1 slots=1 extra",
    "w1 slots=\u00b2",
]
# Options and commands for ssh and for a shell.
BROKEN += ["w1 slots=1;touch canary", "w" * 300 + " slots=1", "w1\x0bslots=1", "w1\u202e slots=1", "../../etc slots=1"]
BROKEN += ["-oProxyCommand=touch${IFS}canary slots=1", "$(touch${IFS}canary) slots=1"]


def test_every_other_line_is_named_with_what_to_write(tmp_path):
    path = tmp_path / "hosts"
    for line in BROKEN:
        path.write_text(f"w0 slots=1\n{line}\n")
        with pytest.raises(ConfigError, match=r'is not "name slots=N": .* as in node1') as error:
            read_hostfile(str(path))
        assert str(error.value).startswith(f"hostfile {path}:2: '") and "\n" not in str(error.value)
        assert len(str(error.value)) < 350 + len(str(path))


def test_files_that_name_no_machine_or_one_twice(tmp_path):
    path = tmp_path / "hosts"
    for content, says in (("w1 slots=1\nw1 slots=2\n", ":2: w1 is named twice"), ("# none\n\n", "names no machine")):
        path.write_text(content)
        with pytest.raises(ConfigError, match=says):
            read_hostfile(str(path))

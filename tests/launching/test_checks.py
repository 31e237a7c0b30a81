"""The problems that `dino-ds launch` finds with machines. Over real ssh: test_launches."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import dino_ds.launching.checks as checks
from dino_ds.cli.main import main
from dino_ds.config.ds_config import load_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.errors import ConfigError
from dino_ds.launching.hostfile import Host
from dino_ds.launching.launch import _check_batches
from dino_ds.launching.plan import LaunchPlan
from dino_ds.options.machine import LaunchOptions
from tests.launching.cluster import REPOSITORY
from tests.run.harness import image_folder

GPU = {"name": "A100", "capability": "8.0", "memory_gib": 40.0, "free_gib": 39.5}
SAME = {"python": "3.11.7", "torch": "2.15.0", "deepspeed": "0.19.8", "dino_ds": "0.1.0"}
ANSWER = checks.Answer(SAME, "c0de", [GPU, GPU], (64.0, 60.0), {"a.json": 1}, 1000, True, True)
HERE = checks.Reply(Host("this machine", (0,)), ANSWER)


def _reply(name="w2", slots=(0, 1), **changes):
    return checks.Reply(Host(name, slots), dataclasses.replace(ANSWER, **changes))


def _answers(*replies):
    return {reply.host: reply.answer for reply in replies}


def _texts(problems):
    return [problem.text for problem in problems]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, []),
        ({"versions": {**SAME, "torch": "2.14.0"}}, ["torch 2.14.0, and 2.15.0 on this machine"]),
        ({"code": "0ther"}, ["is 0ther, and c0de on this machine"]),
        ({"files": {"a.json": None}}, ["does not see a.json"]),
        ({"files": {"a.json": 2}}, ["a.json is another file"]),
        ({"sees": False}, ["does not see /runs/a of this machine: put --run_dir on a disk that all machines share"]),
        ({"port_free": False}, ["port 29500 is in use; pass --master_port with another"]),
    ],
)
def test_what_stops_a_machine_is_named(changes, says):
    found = checks._differences(_reply(**changes).answer, ANSWER, Path("/runs/a"), 29500)
    assert all(part in text for text, part in zip(found, says, strict=True))


@pytest.mark.parametrize(
    ("replies", "stops", "says"),
    [
        ([_reply(), _reply("w3")], [], []),
        ([_reply(gpus=[])], [], []),  # a run on CPUs
        ([_reply(), _reply("w3", gpus=[])], [True], ["w3: 0 GPUs are found for slot 1"]),
        ([_reply(slots=(0, 3))], [True], ["2 GPUs are found for slot 3"]),
        ([_reply(gpus=[GPU, {**GPU, "free_gib": 10.0}])], [False], ["GPU 1 has 10.0 of 40.0 GiB free"]),
        ([_reply(slots=(0,), gpus=[GPU, {**GPU, "free_gib": 10.0}])], [], []),
    ],
)
def test_gpus_are_compared_with_slots(replies, stops, says, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    found = checks._gpus(_answers(*replies))
    assert [problem.stops for problem in found] == stops
    assert all(part in text for text, part in zip(_texts(found), says, strict=True))


def test_images_that_some_machines_lack():
    found = checks._images_seen(_answers(_reply(), _reply("w3", images=0), _reply("w4", images=7)), "/images")
    assert [text.split(":")[0] for text in _texts(found)] == ["w3", "w4"] and "mount it" in found[0].text
    assert checks._images_seen(_answers(_reply(images=0)), None) == []


def test_images_of_every_form_are_counted(tmp_path):
    image_folder(tmp_path / "images", 7)
    for number in range(3):
        (tmp_path / f"train-{number:03d}.tar").touch()
    roots = {"images": 7, "train-{000..002}.tar": 3, "train-*.tar": 3, "train-{000..005}.tar": 0, "none": 0}
    assert {root: checks._count_images(str(tmp_path / root)) for root in roots} == roots


def test_why_a_machine_is_silent():
    def silent(code, said):
        done = subprocess.CompletedProcess([], code, "", f"warning: x\n{said}\n")
        return checks._why_silent(done, Host("w1", (0,)))

    assert "must work without a password" in silent(255, "Permission denied (publickey).")
    assert f"has no {sys.executable}" in silent(127, "sh: 1: not found")
    assert "same paths" in silent(1, "ModuleNotFoundError: No module named 'dino_ds'")
    assert "dino-ds doctor" in silent(1, "OSError: libcudart.so.13")


@pytest.mark.parametrize(("nodes", "fits"), [((1, 2), True), ((1, 4), False)])
def test_an_elastic_run_divides_its_batch_between_every_number_of_machines(nodes, fits):
    path = str(REPOSITORY / "ds_configs/zero2_fp32.json")
    train = {"ds": load_ds_config(path, {}), "ds_path": path, "recipe": load_recipe("vits16", {})}
    plan = LaunchPlan(LaunchOptions(launcher="torchrun"), (), 8, 29500, "w1", nodes=nodes)
    if fits:
        _check_batches(plan, train)
        return
    with pytest.raises(ConfigError) as error:
        _check_batches(plan, train)
    assert "or use 16 or 32 ranks" in str(error.value) and "may train on 3 machines" in str(error.value)


def test_all_problems_of_all_machines_come_together_before_anything_starts(tmp_path, monkeypatch, capsys):
    """A machine that does not answer, images that are nowhere, a port in use; no run folder is left. Over real ssh:
    test_launches."""

    def ask(host, command, question):
        silent = host.name == "w2"
        assert command[0] == (sys.executable if host.name == "this machine" else "ssh")
        return checks.Reply(host, None if silent else checks.answer(question), "not reachable" * silent)

    monkeypatch.setattr(checks, "_ask", ask)
    monkeypatch.setattr(checks.shutil, "which", lambda name: name)
    (tmp_path / "hosts").write_text("w1 slots=1\nw2 slots=1\n")
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        words = ["launch", "--hostfile", tmp_path / "hosts", "--master_port", listener.getsockname()[1], "--"]
        words += ["--data.root", tmp_path / "none", "--run_dir", tmp_path / "run"]
        with pytest.raises(SystemExit) as end:
            main([*map(str, words)])
    out, err = capsys.readouterr()
    lines = [line.removeprefix("dino_ds: error: ") for line in err.splitlines()]
    assert end.value.code == 2 and "command  " not in out and os.listdir(tmp_path) == ["hosts"]
    assert lines[0] == "w2: not reachable" and lines[1].startswith("w1: port ") and "is in use" in lines[1]
    assert lines[2].startswith("w1: nothing is at data.root") and len(lines) == 3

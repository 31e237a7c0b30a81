"""The problems that `dino-ds launch` finds with machines. Over real ssh: test_launches."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from pathlib import Path

import pytest

import dino_ds.launching.checks as checks
from dino_ds.cli.main import main
from dino_ds.launching.plan import Host
from tests.run.harness import image_folder

GPU = {"name": "A100", "capability": "8.0", "memory_gib": 40.0, "free_gib": 39.5}
SAME = {"python": "3.11.7", "torch": "2.15.0", "the code in /here": "c0de", "a.json": "CRC 1"}
ANSWER = checks.Answer(SAME, [GPU, GPU], 1000, True, True)


def _answers(*changes, slots=(0, 1)):
    return {Host(f"w{n}", slots): dataclasses.replace(ANSWER, **more) for n, more in enumerate(changes, 1)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, []),
        ({"same": {**SAME, "torch": "2.14.0"}}, ["torch is 2.14.0, and 2.15.0 on this machine"]),
        ({"same": {**SAME, "the code in /here": "0ther"}}, ["/here is 0ther, and c0de on this machine"]),
        ({"same": {**SAME, "a.json": "not readable"}}, ["a.json is not readable, and CRC 1 on this machine"]),
        ({"sees": False}, ["does not see /runs/a of this machine: put --run_dir on a disk that all machines share"]),
        ({"port_free": False}, ["port 29500 is in use; pass --master_port with another"]),
    ],
)
def test_what_stops_a_machine_is_named(changes, says):
    found = checks._differences(dataclasses.replace(ANSWER, **changes), ANSWER, Path("/runs/a"), 29500)
    assert all(part in text for text, part in zip(found, says, strict=True))


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        (_answers({}, {}), []),
        (_answers({"gpus": []}, {"gpus": []}), []),  # a run on CPUs
        (_answers({}, {"gpus": []}), ["w2: 0 GPUs are found for slot 1"]),
        (_answers({}, slots=(0, 3)), ["w1: 2 GPUs are found for slot 3"]),
        (_answers({}, {"images": 0}, {"images": 7}), ["w2: nothing is at data.root /images", "w3: 7 entries at"]),
    ],
)
def test_gpus_and_images_that_a_machine_lacks(answers, says, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    found = checks._lacking(answers, "/images")
    assert all(part in text for text, part in zip(found, says, strict=True))
    assert checks._lacking(_answers({"images": 0}), None) == []


def test_images_of_every_form_are_counted(tmp_path, monkeypatch):
    image_folder(tmp_path / "images", 7)
    for number in range(3):
        (tmp_path / f"train-{number:03d}.tar").touch()
    roots = {"images": 7, "train-{000..002}.tar": 3, "train-*.tar": 3, "train-{000..005}.tar": 0, "none": 0}
    assert {root: checks._count_images(str(tmp_path / root)) for root in roots} == roots
    monkeypatch.setattr(checks, "_MOST_ENTRIES", 5)
    monkeypatch.delattr(os, "listdir")  # which would read millions of entries first
    assert checks._count_images(str(tmp_path / "images")) == 5


def test_why_a_machine_is_silent():
    question = checks.Question((), None, "x", 0)
    for script, says in (
        ("exit 255", "not reachable by ssh"),
        ("no_such_program", "no_such_program: not found: this"),
        ("true", "its dino_ds is of another version, which does not answer: this checkout"),
        ('echo welcome; echo \'{"torch": "2.11"}\'', "of another version"),
    ):
        assert says in checks._ask(["sh", "-c", script], question)
    answer = json.dumps(dataclasses.asdict(ANSWER))
    assert checks._ask(["sh", "-c", f"echo welcome; echo '{answer}'; echo bye"], question) == ANSWER


def test_all_problems_of_all_machines_come_together_before_anything_starts(tmp_path, monkeypatch, capsys):
    """A machine that does not answer, images that are nowhere, a port in use; no run folder is left. Over real ssh:
    test_launches."""

    def ask(command, question):
        assert command[0] in (sys.executable, "ssh")
        return "not reachable" if "w2" in command else checks.answer(question)

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

"""The problems that `dino-ds launch` finds with machines. Over real ssh: test_launches."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

import dino_ds.launching.checks as checks
from dino_ds.cli.main import main
from dino_ds.launching.plan import Host

SAME = {"python": "3.11.7", "torch": "2.15.0", "the code in /here": "c0de", "a.json": "CRC 1"}
ANSWER = checks.Answer(SAME, ["A100", "A100"], "", True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([{}, {}], []),
        ([{}, {"same": {**SAME, "torch": "2.14.0"}}], ["w2: torch is 2.14.0, and 2.15.0 on w1"]),
        ([{}, {"same": {**SAME, "the code in /here": "0ther"}}], ["w2: the code in /here is 0ther, and c0de on w1"]),
        ([{}, {"same": {**SAME, "a.json": "not readable"}}], ["w2: a.json is not readable, and CRC 1 on w1"]),
        ([{"sees": False}], ["w1: does not see /runs/a of this machine: put --run_dir on a disk that all share"]),
        ([{}, {"images": "/a does not exist"}], ["w2: /a does not exist: mount the images there"]),
        ([{"gpus": []}, {"gpus": []}], []),  # a run on CPUs
        ([{}, {"gpus": ["A100"]}], ["w2: 1 GPUs are found for 2 slots"]),
    ],
)
def test_what_stops_a_machine_is_named(changes, says, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    answers = {Host(f"w{n}", 2): dataclasses.replace(ANSWER, **more) for n, more in enumerate(changes, 1)}
    problems = checks.find_problems(answers, Path("/runs/a"))
    assert all(part in text for text, part in zip(problems, says, strict=True))


def test_why_a_machine_is_silent():
    question = {"files": [], "images": None, "seen": "x"}
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
    """A machine that does not answer, images that are nowhere; no run folder is left. Over real ssh: test_launches."""

    def ask(command, question):
        return "not reachable" if "w2" in command else checks.answer(**question)

    monkeypatch.setattr(checks, "_ask", ask)
    monkeypatch.setattr(checks.shutil, "which", lambda name: name)
    (tmp_path / "hosts").write_text("w1 slots=1\nw2 slots=1\n")
    words = ["launch", "--hostfile", tmp_path / "hosts", "--", "--data.root", tmp_path / "none"]
    with pytest.raises(SystemExit) as end:
        main([*map(str, words), "--run_dir", str(tmp_path / "run")])
    out, err = capsys.readouterr()
    lines = [line.removeprefix("dino_ds: error: ") for line in err.splitlines()]
    assert end.value.code == 2 and "command  " not in out and os.listdir(tmp_path) == ["hosts"]
    assert lines[0] == "w2: not reachable" and len(lines) == 2
    assert lines[1].startswith(f"w1: {tmp_path}/none does not exist") and "mount the images there" in lines[1]

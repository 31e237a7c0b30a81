"""`dino-ds doctor --hostfile`: hostfiles that are refused, problems that are found. Real ssh: tests/launching."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dino_ds.errors import ConfigError
from dino_ds.planning import machines
from dino_ds.planning.machines import read_hostfile

SAME = {"python": "3.11.7", "torch": "2.15.0", "the code in /here": "c0de", "a.json": "CRC 1"}
ANSWER = {"same": SAME, "gpus": ["A100", "A100"], "images": "", "sees": True}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([{}, {}], []),
        ([{}, {"same": {**SAME, "torch": "2.14.0"}}], ["w2: torch is 2.14.0, and 2.15.0 on w1"]),
        ([{}, {"same": {**SAME, "the code in /here": "0ther"}}], ["w2: the code in /here is 0ther, and c0de on w1"]),
        ([{}, {"same": {**SAME, "a.json": "not readable"}}], ["w2: a.json is not readable, and CRC 1 on w1"]),
        ([{"sees": False}], ["w1: does not see /runs/a of this machine -> put --run_dir on a disk that all share"]),
        ([{}, {"images": "/a does not exist"}], ["w2: /a does not exist -> mount the images there"]),
        ([{"gpus": []}, {"gpus": []}], []),  # a run on CPUs
        ([{}, {"gpus": ["A100"]}], ["w2: 1 GPUs are found for 2 slots"]),
        ([{"sees": False}, "not reachable: log in"], ["w1: does not see", "w2: not reachable -> log in"]),
    ],
)
def test_every_problem_of_a_machine_is_named_with_its_remedy(changes, says, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    answers = {f"w{n}": more if isinstance(more, str) else ANSWER | more for n, more in enumerate(changes, 1)}
    findings = list(machines.judge_answers(dict.fromkeys(answers, 2), answers, Path("/runs/a")))
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
        assert says in machines._ask(["sh", "-c", script], "{}")
    assert machines._ask(["sh", "-c", f"echo welcome; echo '{json.dumps(ANSWER)}'; echo bye"], "{}") == ANSWER


def test_machines_come_in_the_order_of_the_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# cluster\n\nw1 slots=4\r\n  gpu_node-2.example.org\tslots=2  # new\n10.0.0.3 slots=1")
    assert list(read_hostfile(str(path)).items()) == [("w1", 4), ("gpu_node-2.example.org", 2), ("10.0.0.3", 1)]


BROKEN = ["root@w1 slots=1", "w[1-4] slots=1", "w1,w2 slots=1", "w1:22 slots=1", "fe80::1 slots=1", "w1", "slots=1 w1"]
BROKEN += ["w1 slots=0", "w1 slots=1025", "w1 slots=99999999999999", "w1 slots=2x", "w1 slots=-1", "w1 slots=1 extra"]
BROKEN += ["w1 slots = 1", "w1 slots=\u00b2", "w1 slots=1;touch canary", "w1 slots=0x7fffffff", "w" * 300 + " slots=1"]
# Options and commands for ssh and for a shell.
BROKEN += ["w1\x0bslots=1", "-oProxyCommand=touch${IFS}canary slots=1", "--help slots=1", "w1\u202e slots=1"]
BROKEN += ["w1;touch$IFS/canary slots=1", "$(touch${IFS}canary) slots=1", "`touch${IFS}canary` slots=1"]
BROKEN += ["w1|touch${IFS}canary slots=1", "w1&&touch slots=1", "../../etc slots=1", "w\u00e9 slots=1"]


def test_every_other_line_is_named_with_what_to_write(tmp_path):
    path = tmp_path / "hosts"
    for line in BROKEN:
        path.write_text(f"w0 slots=1\n{line}\n")
        with pytest.raises(ConfigError, match=r'is not "name slots=N": .* as in node1') as error:
            read_hostfile(str(path))
        assert str(error.value).startswith(f"hostfile {path}:2: '") and "\n" not in str(error.value)
        assert len(str(error.value)) < 350 + len(str(path))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"w1 slots=1\nw1 slots=2\n", ":2: w1 is named twice"),
        (b"# none\n\n", "names no machine"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"w1 slots=1\n" * 100_001, "bytes, 262144 are allowed"),
        (None, "No such file"),
    ],
)
def test_files_that_are_no_hostfile(content, says, tmp_path):
    path = tmp_path / "hosts"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read_hostfile(str(path))

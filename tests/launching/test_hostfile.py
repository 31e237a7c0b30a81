"""Hostfiles: what is read, and that nothing else reaches ssh or a shell."""

from __future__ import annotations

import pytest

from dino_ds.errors import ConfigError
from dino_ds.launching.hostfile import Host, choose_slots, read_hostfile

TWO = (Host("w1", (0, 1, 2, 3)), Host("w2", (0, 1)))


def test_machines_come_in_the_order_of_the_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# cluster\n\nw1 slots=4\r\n  w2.example.org\tslots=2  # new\n10.0.0.3 slots=1")
    assert [(host.name, len(host.slots)) for host in read_hostfile(path)] == [
        ("w1", 4),
        ("w2.example.org", 2),
        ("10.0.0.3", 1),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "w[1-4] slots=1",
        "w1,w2 slots=1",
        "root@w1 slots=1",
        "w1 slots=0",
        "w1 slots=2x",
        "w1 slots=-1",
        "w1 slots=1025",
        "w1 slots=1 extra",
        "w1 slot=1",
        "w1 slots = 1",
        "w1",
        "slots=1",
        "w1 slots=²",
        "w1\x0bslots=1",
        "w" * 300 + " slots=1",
        # Options and commands for ssh and for a shell.
        "-oProxyCommand=touch${IFS}canary slots=1",
        "--help slots=1",
        "w1;touch$IFS/canary slots=1",
        "$(touch${IFS}canary) slots=1",
        "`touch${IFS}canary` slots=1",
        "w1|touch${IFS}canary slots=1",
        "w1&&touch slots=1",
        "w1 slots=1;touch canary",
        "w1 slots=0x7fffffff",
        "w1 slots=99999999999999",
        "../../etc slots=1",
        "w1\u202e slots=1",
        "w\u00e9 slots=1",
    ],
)
def test_every_other_line_is_named(line, tmp_path):
    path = tmp_path / "hosts"
    path.write_text(f"w0 slots=1\n{line}\n")
    with pytest.raises(ConfigError, match='is not "name slots=N"') as error:
        read_hostfile(path)
    assert str(error.value).startswith(f"hostfile {path}:2: '") and "\n" not in str(error.value)
    assert len(str(error.value)) < 300 + len(str(path))


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
        read_hostfile(path)


def test_include_and_exclude_choose_as_deepspeed_does():
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    pool = {host.name: len(host.slots) for host in TWO}
    for include, exclude in [("w2", ""), ("w2@w1:3,1", ""), ("w1:0", ""), ("", "w1"), ("", "w1:0,2@w2:1"), ("", "")]:
        ours = {host.name: list(host.slots) for host in choose_slots(TWO, include or None, exclude or None)}
        theirs = {name: sorted(slots) for name, slots in parse_inclusion_exclusion(pool, include, exclude).items()}
        assert ours == theirs and list(ours) == list(theirs)


@pytest.mark.parametrize(
    ("include", "exclude", "says"),
    [
        ("w1", "w2", "given together"),
        ("w3", None, "'w3' is not in the hostfile"),
        ("w1:4", None, "w1 has slots 0 to 3, not '4'"),
        ("w1:0;id", None, "not '0;id'"),
        ("w1:", None, "not ''"),
        ("w1:0@w1:1", None, "named twice"),
        (None, "w1@w2", "leaves no slot"),
        ("$(id)", None, "is not in the hostfile"),
    ],
)
def test_wrong_choices_are_named(include, exclude, says):
    with pytest.raises(ConfigError) as error:
        choose_slots(TWO, include, exclude)
    assert says in str(error.value)

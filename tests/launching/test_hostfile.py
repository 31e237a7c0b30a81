"""Hostfiles: what is read, and that nothing else reaches ssh or a shell."""

from __future__ import annotations

import pytest

from dino_ds.errors import ConfigError
from dino_ds.launching.plan import read_hostfile


def test_machines_come_in_the_order_of_the_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# cluster\n\nw1 slots=4\r\n  gpu_node-2.example.org\tslots=2  # new\n10.0.0.3 slots=1")
    assert [(host.name, len(host.slots)) for host in read_hostfile(path)] == [
        ("w1", 4),
        ("gpu_node-2.example.org", 2),
        ("10.0.0.3", 1),
    ]


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
            read_hostfile(path)
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
        read_hostfile(path)

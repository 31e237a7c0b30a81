"""Malformed hostfiles and what may be forwarded to other machines: read strictly, or refused in one line."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dino_ds.errors import ConfigError
from dino_ds.launching.plan import read_hostfile
from tests.hostile.guard import examples, raised_by
from tests.hostile.mutate import broken_bytes, broken_text, nasty

pytestmark = pytest.mark.faults

HOSTS = "worker-1 slots=4\nworker-2.cluster slots=4  # the new one\n10.0.0.3 slots=2\n"


@examples(40)
@given(
    text=st.one_of(
        broken_text(HOSTS),
        nasty,
        st.builds("{} slots={}".format, nasty, nasty),
        broken_bytes(HOSTS.encode()),
        st.binary(),
    )
)
def test_broken_hostfiles(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "hosts"
    path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)

    def work() -> None:
        for host in read_hostfile(path):
            assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}", host.name)
            assert host.slots == tuple(range(len(host.slots))) and 1 <= len(host.slots) <= 1024

    raised_by(work, ConfigError)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/stdin", "/proc/self/mem", "/", "\0", "a" * 300, "pipe"])
def test_hostfiles_that_are_no_files(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    assert raised_by(lambda: read_hostfile(path), ConfigError)

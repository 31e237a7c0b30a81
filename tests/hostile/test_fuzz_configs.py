"""Malformed recipes, ds JSONs, command lines and hostfiles: accepted, or refused in a line a problem, exit code 2."""

from __future__ import annotations

import itertools
import os
import re
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dino_ds.config.ds_config import CHECKOUT
from dino_ds.config.loading import RECIPES, recipe_options
from dino_ds.errors import ConfigError
from dino_ds.options.commands import COMMANDS
from dino_ds.planning.machines import read_hostfile
from tests.hostile.guard import command, examples, raised_by
from tests.hostile.mutate import NASTY, broken_bytes, broken_text, nasty
from tests.sample import sampled

pytestmark = pytest.mark.faults

RECIPE = (RECIPES / "quickstart.yaml").read_text()
DS = (CHECKOUT / "ds_configs/zero2_fp16.json").read_text()
OPTIONS = [option.name for option in recipe_options()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, before = tmp_path_factory.mktemp("fuzz"), Path.cwd()
    (folder / "empty").mkdir()
    os.chdir(folder / "empty")
    yield folder
    os.chdir(before)
    assert not list((folder / "empty").iterdir())


def _read(folder: Path, name: str, text: str | bytes) -> None:
    """Start with this text as the recipe, or with the shipped recipe and this ds JSON."""
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    command("train", "--config", *([str(path)] if name == "recipe.yaml" else ["quickstart", "--ds_config", str(path)]))


@pytest.mark.parametrize(("name", "whole"), [("recipe.yaml", RECIPE), ("ds.json", DS)])
def test_broken_files(folder, name, whole):
    @examples(12)
    @given(text=broken_text(whole))
    def check(text):
        _read(folder, name, text)

    check()


@examples(12)
@given(
    words=st.lists(
        st.one_of(
            nasty,
            st.sampled_from(
                ["--", "-", "--config", "--ds_config", "--ds", "--ds.", "--resume", "--debug=no", "--run_dir"]
            ),
            st.builds("--{}={}".format, st.sampled_from(OPTIONS), nasty),
            st.builds("--ds.{}={}".format, st.sampled_from(["fp16.enabled", "zero_optimization.stage", "x.y"]), nasty),
            st.builds("--{}".format, st.text(string.ascii_lowercase + "._-", max_size=12)),
        ),
        max_size=4,
    ),
    name=st.one_of(st.sampled_from([*COMMANDS]), nasty),
)
def test_command_lines(folder, name, words):
    command(*name.split(), *words)


HAND_MADE = {
    "empty": b"",
    "UTF-16": "length: 5 steps".encode("utf-16"),
    "ELF": b"\x7fELF" + bytes(range(256)) * 8,
    "20,000 unknown keys": b"".join(b"k%d: 1\n" % i for i in range(20_000)),
    "a flow list 100,000 deep": b"[" * 100_000,
    "a flow mapping 20,000 deep": b"{a: " * 20_000,
    "a number of 5,000 digits": b"seed: " + b"9" * 5_000,
    "a number of 5,000 digits in JSON": b'{"train_batch_size": ' + b"9" * 5_000 + b"}",
    "1 MB in one string": b'{"bf16": "' + b"x" * 1_000_000 + b'"}',
    "a JSON object 100,000 deep": b'{"a":' * 100_000,
    "closed JSON objects 900 deep": b'{"a":' * 900 + b"1" + b"}" * 900,
    "5,000 times the same key": b"{" + b'"bf16": 1,' * 5_000 + b"}",
    "anchors that multiply": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(9)),
    "an anchor that holds itself": b"data: &a {root: *a}",
    "a YAML directive": b"%YAML 9.9\n---\nlength: 5 steps",
    "binary": b"seed: !!binary aGVsbG8=",
    "NaN": b'{"gradient_clipping": NaN}',
    "a control character": b"\x1b]0;title\x07: 1",
}


@pytest.mark.parametrize(("content", "name"), sampled(itertools.product(HAND_MADE, ("recipe.yaml", "ds.json"))))
def test_hand_made_files(folder, name, content):
    _read(folder, name, HAND_MADE[content])


@pytest.mark.parametrize(("flag", "first"), [("--config", 0), ("--ds_config", 1), ("--run_dir", 2)])
def test_strange_paths(folder, flag, first):
    for word in NASTY[first::3]:
        if "\0" not in word:
            command("train", "--data.root", word, flag, word)
            command("train", "--data.root", "x", flag, f"{word}.yaml")


@pytest.mark.parametrize(
    "path", ["/dev/zero", "/dev/stdin", "/proc/self/mem", "/", "\0", "a" * 300 + ".yaml", "/dev/full"]
)
def test_paths_that_are_no_files(folder, path):
    for flag in ("--config", "--ds_config"):
        assert command("train", "--data.root", "x", flag, path)[0] == 2


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
        for name, slots in read_hostfile(str(path)).items():
            assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}", name)
            assert 1 <= slots <= 1024

    raised_by(work, ConfigError)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/stdin", "/proc/self/mem", "/", "\0", "a" * 300, "pipe"])
def test_hostfiles_that_are_no_files(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    assert raised_by(lambda: read_hostfile(path), ConfigError)

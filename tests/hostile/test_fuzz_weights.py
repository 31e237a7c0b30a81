"""Broken weights and descriptions of them: loaded, or a CheckpointError; pickles are data."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dino_ds
from dino_ds.errors import CheckpointError
from dino_ds.weights.sidecar import read_sidecar
from tests.hostile.guard import examples, raised_by
from tests.hostile.mutate import broken_bytes, broken_text
from tests.hostile.test_payloads import CANARY, PICKLES
from tests.sample import sampled

pytestmark = pytest.mark.faults


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained / "run", tmp_path / "run"))


@examples(12)
@given(data=st.data())
def test_broken_teachers(run, data):
    path = run / "teacher.safetensors"
    whole = path.read_bytes()
    path.write_bytes(data.draw(broken_bytes(whole)))
    raised_by(lambda: dino_ds.load(run), CheckpointError)
    path.write_bytes(whole)


@examples(12)
@given(data=st.data())
def test_broken_heads(run, data):
    """They lie in the checkpoint: what is broken in it is named, and never used."""
    path = data.draw(st.sampled_from(sorted((run / "checkpoints/step_00000001").glob("[mw]*"))))
    whole = path.read_bytes()
    broken = data.draw(broken_bytes(whole))
    path.write_bytes(broken)
    message = raised_by(lambda: dino_ds.load(run), CheckpointError)
    path.write_bytes(whole)
    assert (message is None) == (broken == whole)


@examples(12)
@given(data=st.data())
def test_broken_descriptions(run, data):
    path = run / "teacher.json"
    whole = path.read_text()
    path.write_bytes(data.draw(broken_text(whole)).encode("utf-8", "surrogatepass"))
    raised_by(lambda: dino_ds.load(run), CheckpointError)
    path.write_text(whole)


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": {"depth": 10**9}},
        {"architecture": {"width": 2**40}},
        {"architecture": {"heads": 0}},
        {"architecture": {"heads": "2"}},
        {"architecture": {"mlp_ratio": 1e30}},
        {"architecture": {"registers": 10**12}},
        {"architecture": {"surprise": 1}},
        {"timm_arguments": {"img_size": 10**9}},
        {"timm_arguments": {"img_size": "__import__('os').system('touch canary')"}},
        {"architecture": 5},
        {"pos_embed_interpolation": "../x"},
    ],
    ids=lambda change: json.dumps(change)[:40],
)
def test_descriptions_of_other_networks_are_refused(run, change):
    path = run / "teacher.json"
    whole = path.read_text()
    body = read_sidecar(run / "teacher.safetensors")
    for key, value in change.items():
        body[key] = {**body[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(body))
    message = raised_by(lambda: dino_ds.load(run), CheckpointError)
    path.write_text(whole)
    assert message


NAMES = ("x.pth", "x.bin", "x.safetensors", "folder/model.safetensors")


@pytest.mark.parametrize(("kind", "name"), sampled(itertools.product(PICKLES, NAMES)))
def test_pickles_in_place_of_weights(tmp_path, kind, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(PICKLES[kind]())
    assert raised_by(lambda: dino_ds.load(path.parent if path.parent != tmp_path else path), CheckpointError)
    assert not list(tmp_path.rglob(CANARY))

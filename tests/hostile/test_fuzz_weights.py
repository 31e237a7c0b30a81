"""Broken weights and what is said beside them: loaded, or a CheckpointError; pickles are data."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dino_ds
from dino_ds.errors import CheckpointError
from tests.hostile.guard import examples, raised_by
from tests.hostile.mutate import broken_bytes, broken_text
from tests.hostile.test_payloads import CANARY, PICKLES
from tests.ranks import run_on_ranks
from tests.training.harness import image_folder, train_tiny

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with its teacher."""
    folder = tmp_path_factory.mktemp("weights")
    changes = {"head.prototypes": "4", "model.depth": "1"}
    images = image_folder(folder / "images")
    assert run_on_ranks(train_tiny, images, folder / "run", max_steps=1, changes=changes, world=1) == [None]
    return folder / "run"


@examples(30)
@given(data=st.data())
def test_broken_teachers(run, data):
    path = run / "teacher.safetensors"
    whole = path.read_bytes()
    path.write_bytes(data.draw(broken_bytes(whole)))
    raised_by(lambda: dino_ds.load(run), CheckpointError)
    path.write_bytes(whole)


@examples(30)
@given(data=st.data())
def test_broken_heads(run, data):
    """They lie in the checkpoint: the backbone is there without them, and what is wrong is said."""
    path = data.draw(st.sampled_from(sorted((run / "checkpoints/step_00000001").glob("[mw]*"))))
    whole = path.read_bytes()
    path.write_bytes(data.draw(broken_bytes(whole)))
    model = dino_ds.load(run)
    path.write_bytes(whole)
    assert model.heads or "its head is not available" in model.notes[0]


@examples(40)
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
    body = json.loads(whole)
    for key, value in change.items():
        body[key] = {**body[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(body))
    message = raised_by(lambda: dino_ds.load(run), CheckpointError)
    path.write_text(whole)
    assert message


@pytest.mark.parametrize("name", ["x.pth", "x.bin", "x.safetensors", "folder/model.safetensors"])
@pytest.mark.parametrize("kind", PICKLES)
def test_pickles_in_place_of_weights(tmp_path, kind, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(PICKLES[kind]())
    assert raised_by(lambda: dino_ds.load(path.parent if path.parent != tmp_path else path), CheckpointError)
    assert not list(tmp_path.rglob(CANARY))

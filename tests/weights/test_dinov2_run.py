"""A run with masks, an own iBOT head and learned lengths: its teacher out, its checkpoints in."""

from __future__ import annotations

import pytest
import timm
import torch
from safetensors.torch import load_file

from dino_ds.commands.export import run as dino_ds_export
from dino_ds.config.ds_values import PerformanceOptions
from dino_ds.config.loading import load_recipe
from dino_ds.method.build import build_network
from dino_ds.options.model import ExportOptions
from dino_ds.weights.load import load
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, train_tiny, whole_tensors

RUN = {
    "model.backbone": "vit_small_patch14_reg4_dinov2",
    "model.pos_embed_interpolation": "antialias",
    "crops.mask": "dinov2",
    "objective.ibot_weight": "1",
    "objective.koleo_weight": "0.1",
    "objective.freeze_prototypes": "0 steps",
    "head.learned_lengths": "true",
    "ibot_head.learned_lengths": "true",
    "ibot_head.prototypes": "40",
    "ibot_head.hidden": "24",
    "ibot_head.bottleneck": "8",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Images, and a run of three steps."""
    place = tmp_path_factory.mktemp("dinov2")
    image_folder(place / "images")
    assert run_on_ranks(train_tiny, place / "images", place / "run", max_steps=3, changes=RUN, world=1) == [None]
    return place


def test_heads_and_mask_token_of_a_run_by_name(place):
    """They lie in the checkpoint: teacher.safetensors has what timm has. Both centers are there by their names."""
    model, whole = load(place / "run"), whole_tensors(place / "run", 3)
    assert model.heads.keys() == {"head", "ibot_head"} and not model.notes
    for head, tensors in model.heads.items():
        prefix = f"teacher.{head}."
        assert {f"{prefix}{name}" for name in tensors} == {name for name in whole if name.startswith(prefix)}
        assert all(torch.equal(t, whole[f"{prefix}{name}"]) for name, t in tensors.items())
        assert not torch.all(tensors["prototypes.lengths"] == 1)
    assert torch.equal(model.mask_token, whole["teacher.backbone.mask_token"]) and model.mask_token.any()
    assert model.vit.mask_token is None and "mask_token" not in load_file(place / "run/teacher.safetensors")
    assert {name for name in whole if name.endswith("center")} == {"center", "ibot_center"}


def test_heads_with_numbers_that_are_none_are_left_out(place, monkeypatch):
    bad = whole_tensors(place / "run", 3) | {"teacher.head.mlp.0.bias": torch.full((48,), torch.nan)}
    monkeypatch.setattr("dino_ds.weights.find.SavedCheckpoint.whole", lambda _: bad)
    model = load(place / "run")
    assert not model.heads and model.notes[0].startswith("its head is not available") and "NaN" in model.notes[0]


@pytest.mark.parametrize("format", ["timm", "hf"])
def test_exports_of_it_are_read_by_those_they_are_for(place, tmp_path, format):
    """Strictly, with the same features: 1e-5."""
    out = tmp_path / "a"
    dino_ds_export(ExportOptions(model=str(place / "run"), format=format, out=str(out), heads=None, json=True))
    model = load(place / "run")
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    if format == "timm":
        theirs = timm.create_model(f"local-dir:{out}", pretrained=True)
        assert "trained with DINO and iBOT by dino_ds" in (out / "README.md").read_text()
    else:
        transformers = pytest.importorskip("transformers")
        theirs, info = transformers.AutoModel.from_pretrained(out, output_loading_info=True)
        assert not info["unexpected_keys"] and not info["missing_keys"]
        assert torch.equal(theirs.embeddings.mask_token, model.mask_token)
    with torch.no_grad():
        found = theirs.eval()(images)
    features = found.last_hidden_state[:, 0] if format == "hf" else found
    torch.testing.assert_close(features, model.features(images), rtol=1e-5, atol=1e-5)


def test_a_run_starts_from_it_with_everything(place):
    recipe = load_recipe(str(place / "run/config.yaml"), {"model.init_from": str(place / "run")})
    network, whole = build_network(recipe, PerformanceOptions()), whole_tensors(place / "run", 3)
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, whole[f"teacher.{name}"]), name
    assert "the head too (8 tensors); the ibot_head too (8 tensors)" in network.started_from


def test_it_is_the_start_on_two_ranks_too(place, tmp_path):
    """With learning rate 0 at step 0 the first checkpoint is the start itself: heads, mask token, in partitions."""
    changes = RUN | {"model.init_from": str(place / "run")}
    assert run_on_ranks(train_tiny, place / "images", tmp_path / "run", "zero3_fp32.json", 1, changes=changes) == [
        None,
        None,
    ]
    ours, theirs = whole_tensors(tmp_path / "run", 1), whole_tensors(place / "run", 3)
    names = [name for name in theirs if name.startswith("teacher.")]
    assert len(names) > 16 and all(torch.equal(ours[name], theirs[name]) for name in names)

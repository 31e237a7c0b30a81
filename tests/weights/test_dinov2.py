"""dinov2's checkpoints in: recorded tensors as its training saves them, taken by ours."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.errors import CheckpointError
from dino_ds.method.build import build_network
from dino_ds.models.network import Network
from dino_ds.weights.export import export_timm
from dino_ds.weights.load import load
from dino_ds.weights.read import read_weights
from dino_ds.weights.start import as_source, flags_for
from tests.reference_v2 import from_reference_v2, golden_v2
from tests.run.harness import TINY, image_folder, train_alone, whole_tensors
from tests.weights.originals import Original

MASKED = {"crops.mask": "dinov2", "objective.ibot_weight": "1"}
HEADS = {
    f"{head}.{key}": value
    for head in ("head", "ibot_head")
    for key, value in {"prototypes": "96", "hidden": "64", "bottleneck": "32", "learned_lengths": "true"}.items()
}
TOY = {"model.backbone": "vit_small_patch14_dinov2", "model.patch_size": "4", "model.width": "48", "model.heads": "3"}
"""The network of the recorded trajectories; native images of 32 pixels, two blocks."""


def _toy(source: object, **changes: str) -> Recipe:
    return load_recipe(None, {**TINY, **TOY, **MASKED, **HEADS, "model.init_from": str(source), **changes})


def _start(source: object, **changes: str) -> Network:
    return build_network(_toy(source, **changes), PerformanceOptions())


def _recorded() -> dict[str, Tensor]:
    return {name.removeprefix("init."): t for name, t in golden_v2("trajectory_dinov2").items() if name[:5] == "init."}


def _in_chunks(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names under student.block_chunks 2, blocks.CHUNK.BLOCK: one of two blocks in each."""
    return {re.sub(r"blocks\.(\d+)\.", r"blocks.\1.\1.", name): t for name, t in theirs.items()}


@pytest.fixture(params=["teacher_checkpoint", "training"])
def saved(request, tmp_path):
    theirs = _recorded()
    content: dict[str, object] = {"teacher": theirs}
    if request.param == "training":
        theirs = _in_chunks(theirs)
        whole = {f"teacher.{name}": t for name, t in theirs.items()}
        whole |= {f"student.{name}": t + 1 for name, t in theirs.items()}
        content = {"model": whole | {"dino_loss.center": torch.zeros(1, 96)}, "optimizer": {}, "iteration": 3}
    torch.save(content, tmp_path / "a.pth")
    return tmp_path / "a.pth"


def test_a_run_starts_from_its_teacher_heads_and_mask_token_included(saved):
    network, expected = _start(saved), from_reference_v2(_recorded(), learned_lengths=True)
    assert expected.keys() == dict(network.named_parameters()).keys()
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    said = network.started_from
    assert "(dinov2): 35 tensors of the backbone; the head too (8 tensors); the ibot_head too (8 tensors)" in said


@pytest.mark.parametrize("head", ["head", "ibot_head"])
def test_heads_that_one_of_the_two_lacks(tmp_path, head):
    theirs = _recorded()
    torch.save({"teacher": {n: t for n, t in theirs.items() if n[:9] != "ibot_head"}}, tmp_path / "tied.pth")
    assert "the head too (8 tensors); it has no ibot_head: our own" in _start(tmp_path / "tied.pth").started_from
    torch.save({"teacher": theirs}, tmp_path / "own.pth")
    shared = {key: value for key, value in HEADS.items() if not key.startswith("ibot_head")}
    recipe = {**TINY, **TOY, **MASKED, **shared, "objective.ibot_head": "shared"}
    recipe["model.init_from"] = str(tmp_path / "own.pth")
    network = build_network(load_recipe(None, recipe), PerformanceOptions())
    assert "the head too (8 tensors); its ibot_head is not used" in network.started_from
    network = _start(tmp_path / "own.pth", **{f"{head}.learned_lengths": "false"})
    said = r"its prototypes' lengths \(0\.9\d+ to 1\.\d+\) are left out: they are 1 here \(--(\w+)\.learned_lengths\)"
    assert re.search(said, network.started_from)[1] == head


def test_a_head_without_lengths_starts_with_1(tmp_path):
    theirs = _recorded()
    theirs["dino_head.last_layer.weight_g"] = torch.ones(96, 1)
    torch.save({"teacher": theirs}, tmp_path / "a.pth")
    assert "prototypes.lengths" not in read_weights(tmp_path / "a.pth").heads["head"]
    assert torch.equal(_start(tmp_path / "a.pth").head.prototypes.lengths, torch.ones(96, 1))


def _released(tmp_path, registers: int, size: int = 32) -> tuple[Original, dict[str, str]]:
    """A file such as dinov2_vits14_pretrain.pth, at another native size than the run's if asked; what builds it."""
    original = Original(size, 4, 48, 2, 3, v2=True, registers=registers)
    torch.save(original.state_dict(), tmp_path / "a.pth")
    way = "antialias" if registers else "dino"
    kind = "reg4_" if registers else ""
    return original, {"model.backbone": f"vit_small_patch14_{kind}dinov2", "model.pos_embed_interpolation": way}


@pytest.mark.parametrize("size", [32, 48])
@pytest.mark.parametrize("registers", [0, 4])
def test_a_released_backbone_continues_with_its_mask_token_and_registers(tmp_path, registers, size):
    original, flags = _released(tmp_path, registers, size)
    network = _start(tmp_path / "a.pth", **flags)
    assert torch.equal(network.backbone.mask_token, original.mask_token)
    assert not registers or torch.equal(network.backbone.reg_token, original.register_tokens)
    assert "it has no head: our own starts anew; it has no ibot_head: our own starts anew" in network.started_from
    assert ("resized" in network.started_from) == (size != 32)
    if size == 32:
        images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        ours = network.backbone.eval().features(images).detach()
        torch.testing.assert_close(ours, original(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("registers", [0, 4])
def test_a_mask_token_that_only_one_of_the_two_has(tmp_path, registers):
    """Said in a few words: left out where nothing is hidden; zero where the file has none, as timm's."""
    _, flags = _released(tmp_path, registers)
    plain = load_recipe(None, {**TINY, **TOY, **flags, "model.init_from": str(tmp_path / "a.pth")})
    network = build_network(plain, PerformanceOptions())
    assert network.backbone.mask_token is None
    assert "its mask token is left out: this run hides no patches; " in network.started_from
    model = load(tmp_path / "a.pth", heads=3)
    export_timm(model, tmp_path / "timm")
    network = _start(tmp_path / "timm", **flags)
    assert torch.equal(network.backbone.mask_token, torch.zeros(1, 48))
    assert "it has no mask token: our own starts at zero; " in network.started_from


def test_a_recipe_s_layer_scale_counts_where_an_architecture_is_looked_for(tmp_path):
    """It makes a plain ViT DINOv2's; weights without it take it away."""
    for name, v2 in (("plain", False), ("scaled", True)):
        torch.save(Original(32, 8, 64, 2, 2, v2=v2).state_dict(), tmp_path / f"{name}.pth")
    given = {key: value for key, value in TINY.items() if not key.startswith("model.")}
    given |= {"model.layer_scale": "1e-5", "model.heads": "2"}
    scaled = load_recipe(None, {**given, "model.patch_size": "8"}).model
    arch = load(tmp_path / "scaled.pth", heads=2).vit.arch
    assert flags_for(arch, scaled) == {"model.width": "64", "model.depth": "2"}
    source = {"model.backbone": "from_source", "model.init_from": str(tmp_path / "plain.pth")}
    recipe = as_source(load_recipe(None, given | source), None)
    assert recipe.model.layer_scale is None
    assert "30 tensors of the backbone" in build_network(recipe, PerformanceOptions()).started_from


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
    place = tmp_path_factory.mktemp("dinov2")
    image_folder(place / "images")
    assert train_alone(place / "images", place / "run", max_steps=3, changes=RUN) is None
    return place


def test_heads_and_mask_token_of_a_run_by_name(place):
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


def test_a_head_with_numbers_that_are_none_is_refused(place, monkeypatch):
    bad = whole_tensors(place / "run", 3) | {"teacher.head.mlp.0.bias": torch.full((48,), torch.nan)}
    monkeypatch.setattr("dino_ds.weights.read.SavedCheckpoint.whole", lambda _: bad)
    with pytest.raises(CheckpointError, match=r"NaN.*; the backbone alone, without heads, is .*teacher\.safetensors"):
        load(place / "run")


def test_a_run_starts_from_it_with_everything(place):
    recipe = load_recipe(str(place / "run/config.yaml"), {"model.init_from": str(place / "run")})
    network, whole = build_network(recipe, PerformanceOptions()), whole_tensors(place / "run", 3)
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, whole[f"teacher.{name}"]), name
    assert "the head too (8 tensors); the ibot_head too (8 tensors)" in network.started_from

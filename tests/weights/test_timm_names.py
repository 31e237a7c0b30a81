"""Weights by timm's name: from the hub's cache, without a network."""

from __future__ import annotations

import re

import pytest
import safetensors.torch
import timm
import torch

from dino_ds.basics.hubs import weights_elsewhere
from dino_ds.errors import CheckpointError
from dino_ds.models.specs.backbones import BACKBONES
from dino_ds.models.vit import VisionTransformer
from dino_ds.weights.load import load
from tests.sample import sampled
from tests.weights.originals import assert_same, images, randomised

NAME = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Empty, and nothing can be downloaded."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.file_download.constants", constants)
    return tmp_path / "hub"


@pytest.mark.slow
def test_from_the_cache(cache):
    """The real ViT-Ti/16 with its classifier, as the hub keeps it, and the same features as timm's."""
    theirs = randomised(timm.create_model(NAME, depth=12))
    snapshot = cache / f"models--timm--{NAME}/snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    safetensors.torch.save_file(theirs.state_dict(), snapshot / "model.safetensors")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs/main").write_text("0123abcd")
    ours = load(NAME)
    image = images(224, 224, 1)
    with torch.no_grad():
        assert_same(ours.features(image), theirs.forward_head(theirs.forward_features(image), pre_logits=True))
    assert (ours.vit.arch.heads, ours.image_size) == (3, 224)


def test_without_a_network(cache):
    with pytest.raises(CheckpointError, match=f"the weights of {NAME} are neither in the cache") as caught:
        load(NAME)
    assert str(caught.value).endswith("give a file of weights") and "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"Invalid pretrained tag \(dnio\)"):
        load("vit_small_patch16_224.dnio")


@pytest.mark.slow
def test_other_networks_of_timm(monkeypatch):
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained, **how: create(name, **how))
    for name in ("vit_tiny_r_s16_p8_224",):
        torch.manual_seed(0)
        theirs = create(name, num_classes=0).eval()
        torch.manual_seed(0)
        ours, image = load(name), images(224, 224, 1)
        assert ours.network.spec.name == name.partition(".")[0] and ours.image_size == 224
        stated = theirs.default_cfg
        assert (ours.normalization.mean, ours.normalization.std) == (stated["mean"], stated["std"])
        with torch.no_grad():
            torch.testing.assert_close(ours.features(image), theirs(image), rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointError, match="Did you mean vit_small_patch16_224"):
        load("vit_smal_patch16_224")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dinov2_vitl14_reg", "torch.hub's name: timm has these weights as vit_large_patch14_reg4_dinov2.lvd142m"),
        ("dino_vits8", "timm has these weights as vit_small_patch8_224.dino"),
        ("facebook/dinov2-small", "hf download facebook/dinov2-small --local-dir DIR, then give DIR"),
    ],
)
def test_names_of_other_hubs_are_answered(name: str, says: str):
    with pytest.raises(CheckpointError, match=says):
        load(name)


def _kind(name: str) -> tuple[object, ...]:
    spec = BACKBONES[name]
    return spec.swiglu, spec.layer_scale is not None, spec.registers, spec.rope, spec.qkv_bias


@pytest.mark.parametrize("name", sampled(BACKBONES, _kind))
@pytest.mark.slow
def test_every_architecture_has_timm_s_parameters(name):
    """Names and shapes, without memory, at full depth and 224 pixels."""
    with torch.device("meta"):
        timm_name, arguments = BACKBONES[name].timm_model(name)
        theirs = timm.create_model(timm_name, img_size=224, num_classes=0, **({} if timm_name == name else arguments))
        ours = VisionTransformer(BACKBONES[name], 224)
    shapes = {n: p.shape for n, p in theirs.named_parameters()}
    assert {n: p.shape for n, p in ours.named_parameters()} == shapes


def test_timm_has_the_weights_that_answers_name():
    released = {
        *(f"dinov2_vit{size}14{kind}" for size in "sblg" for kind in ("", "_reg", "_lc")),
        *(f"facebook/dinov2{kind}-{size}" for size in ("small", "giant") for kind in ("", "-with-registers")),
        *(
            f"facebook/dinov3-vit{size}-pretrain-lvd1689m"
            for size in ("s16", "s16plus", "b16", "l16", "h16plus", "7b16")
        ),
        *(f"facebook/dinov3-{name}" for name in ("vitl16-pretrain-sat493m", "convnext-tiny-pretrain-lvd1689m")),
        *(f"facebook/dino-vit{size}{patch}" for size in "sb" for patch in (8, 16)),
        *("dinov3_vitb16", "dinov3_convnext_large", "hf-hub:timm/vit_small_patch14_dinov2.lvd142m"),
    }
    for name in released:
        answer = weights_elsewhere(name)
        assert answer is not None and re.findall(r" as ([\w.]+)", answer)[0] in timm.list_pretrained(), name

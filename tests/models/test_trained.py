"""Parts of a backbone that are trained: which weights, and adapters that are the same added to the weights."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from dino_ds.errors import ConfigError
from dino_ds.models.foreign import build_backbone
from dino_ds.models.specs.backbones import TrainedPart, ViTSpec, backbone_spec, parse_trained
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.specs.foreign import ForeignSpec
from dino_ds.models.trained import TrainedPlacer, adapters_in, keep_trained, linear_layers, merged
from tests.engine.harness import crops

SWIGLU = ViTSpec(8, 32, 2, 2, swiglu=True, layer_scale=0.5, registers=2)
ROTARY = ViTSpec(8, 32, 2, 2, mlp_ratio=8.0, swiglu=True, rope="separate", qkv_bias=True, registers=1)
TIMM = ForeignSpec(
    "deit_tiny_patch16_224", arguments=json.dumps({"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 8})
)
LORA = TrainedPart("lora", rank=4, alpha=6.0)


def _adapted(spec, part=LORA, side=32):
    """A backbone with adapters that change something, after one of the same weights without any."""
    torch.manual_seed(0)
    plain = build_backbone(spec, side, BackboneOptions())
    adapted = copy.deepcopy(plain) if isinstance(spec, ViTSpec) else build_backbone(spec, side, BackboneOptions())
    adapted.load_state_dict(plain.state_dict())
    keep_trained(adapted, part)
    place = TrainedPlacer(adapted, 0, lambda _: None)
    for module in adapted.modules():
        place(module)
    with torch.no_grad():
        for name, tensor in adapters_in(dict(adapted.named_parameters())).items():
            if name.endswith("lora_b"):
                tensor.normal_(std=0.1)
    return plain, adapted


@pytest.mark.parametrize("spec", [SWIGLU, ROTARY, TIMM], ids=["swiglu", "rotary", "timm"])
@pytest.mark.parametrize("layers", [(), ("qkv",), ("fc2", "proj")], ids=["all", "qkv", "some"])
def test_adapters_are_the_same_added_to_the_weights(spec, layers):
    """Features of crops of two sizes, CLS and patches, to 1e-5, and the gradients of the adapters by the chain rule:
    that of B is scale * dL/dW A^T, that of A scale * B^T dL/dW, to 1e-4 of the largest; frozen weights get none."""
    plain, adapted = _adapted(spec, TrainedPart("lora", 4, 6.0, layers), 32)
    plain.load_state_dict(merged(adapted.state_dict(), LORA.alpha))
    images = crops(torch.arange(2), (32, 32, 16))
    features = [one.train()(images, patches=("global",)) for one in (plain, adapted)]
    for name in features[0]:
        torch.testing.assert_close(features[1][name], features[0][name], rtol=1e-5, atol=1e-5)
    for found in features:
        sum(feature.sin().square().sum() for feature in found.values()).backward()
    weights = dict(plain.named_parameters())
    for name, p in adapted.named_parameters():
        layer, _, leaf = name.rpartition(".")
        assert (p.grad is not None) == p.requires_grad == (leaf in ("lora_a", "lora_b")), name
        if leaf == "lora_a":
            a, b = p, adapted.get_parameter(f"{layer}.lora_b")
            grad, scale = weights[f"{layer}.weight"].grad, LORA.alpha / 4
            for mine, wanted in ((b.grad, scale * grad @ a.T), (a.grad, scale * b.T @ grad)):
                torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4 * float(wanted.detach().abs().max()))


@pytest.mark.parametrize(("what", "trained"), [("last 1 block", {"blocks.1", "norm"}), ("norms_and_biases", None)])
def test_which_weights_are_trained(what, trained):
    """The last blocks with all that follows them; or what has one dimension, and what no features depend on."""
    backbone = build_backbone(SWIGLU, 32, BackboneOptions(mask_token=True))
    keep_trained(backbone, TrainedPart(parse_trained(what)))
    for name, p in backbone.named_parameters():
        if trained is not None:
            assert p.requires_grad == any(name.startswith(f"{part}.") for part in trained), name
        else:
            assert p.requires_grad == (p.ndim == 1 or name == "mask_token"), name


def test_adapters_draw_nothing_from_the_random_numbers_of_others():
    _, one = _adapted(SWIGLU)
    place, before = TrainedPlacer(one, 0, lambda _: None), torch.random.get_rng_state()
    for module in one.modules():
        place(module)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not any(tensor.any() for name, tensor in one.state_dict().items() if name.endswith("lora_b"))


@pytest.mark.parametrize(
    ("backbone", "part", "words"),
    [
        ("vit_tiny_patch16_224", TrainedPart("last 99 blocks"), "has 12 blocks: give 1 to 12"),
        ("vit_tiny_patch16_224", TrainedPart("lora", rank=193), "model.lora_rank 193 is above 192"),
        ("vit_tiny_patch16_224", TrainedPart("lora", layers=("out",)), "are fc1, fc2, proj, qkv: give some"),
        ("resnet18", TrainedPart("lora"), "has BatchNorm, .* set model.train all"),
        ("resnet50_gn", TrainedPart("lora"), "has no linear layers in its blocks"),
    ],
)
def test_what_a_network_can_t_train_is_refused(backbone, part, words):
    with torch.device("meta"), pytest.raises(ConfigError, match=words):
        keep_trained(build_backbone(backbone_spec(backbone), 224), part)


def test_layers_whose_weights_are_used_directly_get_no_adapters():
    """timm's Eva adds biases to queries and values by its own call: an adapter there would change nothing."""
    with torch.device("meta"):
        backbone = build_backbone(backbone_spec("eva02_tiny_patch14_224"), 224)
        layers = {name.rpartition(".")[2] for name in linear_layers(backbone)}
    assert layers == {"proj", "fc1", "fc2"}


@pytest.mark.parametrize("text", ["last", "last 0 blocks", "last two blocks", "adapters", ""])
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match="is not all"):
        parse_trained(text)

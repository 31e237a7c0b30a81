"""Our ViT against the numbers recorded from facebookresearch/dinov2's and dinov3's, masked and not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from dino_ds.models.attention import QueryKeyValue
from dino_ds.models.base import CLS, patches_of
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.vit import VisionTransformer
from dino_ds.weights.load import architecture_of
from tests.reference_v2 import from_reference_v2, golden_v2, golden_v2_meta, our_name

pytestmark = pytest.mark.numerical

_NARROW = ViTSpec(4, 48, 1, 3, layer_scale=1e-5, rope="separate")
_GATED = replace(_NARROW, swiglu=True, norm_eps=1e-5)
ROTARY = {
    "plain": replace(_NARROW, depth=2, norm_eps=1e-6),
    "storage": replace(_GATED, registers=4, mlp_ratio=256 / 48, rope="max", cls_norm=True, local_cls_norm=True),
    "rms": replace(
        _GATED, registers=2, mlp_ratio=4.0, rms_norm=True, qkv_bias=False, rope="min", rope_min_period=0.8,
        rope_max_period=40.0,
    ),
}  # fmt: skip
KINDS = [*(("dinov2", kind) for kind in ("plain", "registers_swiglu", "patch14")), *(("dinov3", k) for k in ROTARY)]
# FP32 sums of other kernels in another order, through at most two blocks; features are of the size of 1.
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


class _KeyBias(QueryKeyValue):
    """Ours has no bias of the keys, and in what is recorded of dinov3's "plain" they have one."""

    def __init__(self, qkv: QueryKeyValue, k_bias: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.weight, self.bias = qkv.in_features, qkv.weight, None
        self.k_bias = nn.Parameter(k_bias)

    def forward(self, x, query_rows=None, bias=None):
        none = torch.zeros_like(self.k_bias)
        return super().forward(x, query_rows, bias + torch.cat((none, self.k_bias, none)))


def _recorded(project, kind):
    """Recorded numbers of `kind`, facts about it, and our network with its weights."""
    meta, prefix = golden_v2_meta()["vit"][project][kind], f"{kind}."
    whole = golden_v2(f"vit_{project}")
    numbers = {name.removeprefix(prefix): t for name, t in whole.items() if name.startswith(prefix)}
    weights = from_reference_v2(numbers, "weights.", dinov3=project == "dinov3")
    if project == "dinov3":
        vit = VisionTransformer(ROTARY[kind], 32, BackboneOptions(mask_token=True))
    else:
        asked = meta["settings"]
        arch, size = architecture_of(weights, asked["num_heads"])
        stated = (asked["layer_norm_eps"], asked["init_values"], asked["img_size"])
        assert (arch.norm_eps, arch.layer_scale, size) == stated
        way = "antialias" if asked.get("interpolate_antialias") else "dino"
        vit = VisionTransformer(arch, size, BackboneOptions(pos_embed_interpolation=way, mask_token=True))
    for name in [name for name in weights if name.endswith("k_bias")]:
        attention = vit.get_submodule(name.removesuffix(".k_bias"))
        attention.qkv = _KeyBias(attention.qkv, weights.pop(name))
        weights[name.replace("k_bias", "qkv.k_bias")] = attention.qkv.k_bias.detach()
    vit.load_state_dict(weights)
    return numbers, meta, vit


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("project", "kind"), KINDS)
@torch.no_grad()  # with a gradient the CLS tokens of local crops may have a norm of their own
def test_features_are_the_reference_s(project, kind, masked):
    """CLS, patches and registers of each size, one by one and all sizes in one pass."""
    numbers, meta, vit = _recorded(project, kind)
    registers = "x_norm_regtokens" if project == "dinov2" else "x_storage_tokens"
    crops = {size: [numbers[f"{size}.input"]] for size in meta["sizes"]}
    masks = {size: numbers[f"{size}.masks"] for size in crops} if masked else {}
    together = vit(crops, patches=list(crops), masks=masks)
    for row, (size, (images,)) in enumerate(crops.items()):
        prefix = f"{size}.masked" if masked else size
        own = {name: mask for name, mask in masks.items() if name == size}
        alone = vit({size: [images]}, patches=[size], masks=own)
        cls, patches = numbers[f"{prefix}.x_norm_clstoken"], numbers.get(f"{prefix}.x_norm_patchtokens")
        for found, rows in ((alone, slice(0, 2)), (together, slice(2 * row, 2 * row + 2))):
            torch.testing.assert_close(found[CLS][rows], cls, **CLOSE)
            if patches is not None:
                torch.testing.assert_close(found[patches_of(size)][:1], patches, **CLOSE)
        if not masked and vit.arch.registers:
            ours = vit.tokens(images)[:, 1 : 1 + vit.arch.registers]
            torch.testing.assert_close(ours, numbers[f"{size}.{registers}"], **CLOSE)


def test_local_crops_have_a_norm_of_their_own_in_training():
    """Only their CLS tokens, where a gradient is wanted: those of global crops and all patches have the others."""
    numbers, _, vit = _recorded("dinov3", "storage")
    crops = {size: [numbers[f"{size}.input"]] for size in ("global", "local")}
    found = vit(crops, patches=["local"])
    recorded = numbers["train_list.local.x_norm_clstoken"]
    torch.testing.assert_close(found[CLS][2:], recorded, **CLOSE)
    torch.testing.assert_close(found[CLS][:2], numbers["global.x_norm_clstoken"], **CLOSE)
    torch.testing.assert_close(found[patches_of("local")][:1], numbers["local.x_norm_patchtokens"], **CLOSE)


@pytest.mark.parametrize(("project", "kind"), KINDS)
def test_gradients_of_a_masked_pass_are_the_reference_s(project, kind):
    """The value of a probe, two tensors in full and the norms of all, the mask token's among them; relative to the
    largest entry: 1e-4."""
    numbers, meta, vit = _recorded(project, kind)
    features = vit({"global": [numbers["global.input"]]}, patches=["global"], masks={"global": numbers["global.masks"]})
    probe = (features[CLS].square() * torch.linspace(0, 1, vit.arch.width)).sum()
    probe = probe + (features[patches_of("global")] * torch.linspace(-1, 1, vit.arch.width)).sin().mean()
    torch.testing.assert_close(probe, numbers["global.probe"].squeeze(), rtol=1e-5, atol=0)
    probe.backward()
    ours = _as_theirs({n: p.grad for n, p in vit.named_parameters() if not n.startswith("local_cls_norm")})
    recorded = {name.removeprefix("global.grad."): t for name, t in numbers.items() if name.startswith("global.grad.")}
    assert len(recorded) == 2
    for name, theirs in recorded.items():
        own = ours[our_name(name, dinov3=project == "dinov3")]
        torch.testing.assert_close(own, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))
    norms = {our_name(n, dinov3=project == "dinov3"): norm for n, norm in meta["gradient_norms_of_probe"].items()}
    assert norms.keys() == ours.keys()
    for name, norm in norms.items():
        assert float(ours[name].norm()) == pytest.approx(norm, rel=1e-4), name


def _as_theirs(gradients):
    """The three biases as one; with registers and learned positions a place for the CLS token."""
    found = dict(gradients)
    for name in [name for name in found if name.endswith(".q_bias")]:
        q, v = found.pop(name), found.pop(name.replace("q_bias", "v_bias"))
        k = found.pop(name.replace("q_bias", "qkv.k_bias"), torch.zeros_like(q))
        found[name.replace("q_bias", "qkv.bias")] = torch.cat((q, k, v))
    if "pos_embed" in found and "reg_token" in found:
        found["pos_embed"] = torch.cat((found["cls_token"], found["pos_embed"]), dim=1)
    return found

"""Our ViT against timm's and the recorded numbers of dinov2 and dinov3, and its fast paths against its plain ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from dino_ds.basics.seeds import sample_keys
from dino_ds.models import positions
from dino_ds.models.attention import QueryKeyValue
from dino_ds.models.base import CLS, patches_of
from dino_ds.models.drop_path import drop_path_draws, drop_path_scales, kept_sequences, step_key
from dino_ds.models.packing import Packing
from dino_ds.models.positions import RopeTables, resize_positions
from dino_ds.models.specs.backbones import VITS, ViTSpec
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.vit import VisionTransformer
from dino_ds.weights.load import architecture_of
from tests.reference import from_reference_v2, golden_v2, golden_v2_meta, our_name

pytestmark = pytest.mark.numerical


NAMES = [
    *(f"vit_{size}_patch16_224" for size in ("tiny", "small", "base", "large", "huge")),
    *(f"vit_{kind}_dinov2" for kind in ("small_patch14", "small_patch14_reg4", "giant_patch14_reg4")),
    *("vit_7b_patch16_reg4", "vit_tiny_patch16_dinov3_qkvb", "vit_7b_patch16_dinov3"),
    *(f"vit_{size}_patch16_dinov3" for size in ("small", "small_plus", "base", "large", "huge_plus")),
    *(f"vit_{size}_patch16_dinov3_qkvb" for size in ("small", "small_plus", "base", "large", "huge_plus")),
]


CHANGED = [
    ("vit_tiny_patch16_224", {"in_chans": 5}),
    ("vit_small_patch16_224", {"registers": 4, "layer_scale": 1e-5}),
    ("vit_small_patch14_reg4_dinov2", {"registers": 0}),
    ("vit_giant_patch14_dinov2", {"registers": 1, "layer_scale": 0.1}),
    ("vit_small_patch16_dinov3", {"registers": 0, "layer_scale": 0.1}),
    ("vit_small_plus_patch16_dinov3_qkvb", {"width": 40, "heads": 2, "registers": 2, "patch_size": 8}),
    ("vit_huge_plus_patch16_dinov3", {"rope_base": 50.0}),
    ("a_name_of_ours", {"swiglu": True, "mlp_ratio": 6.0, "qkv_bias": True}),
]
CELLS = [
    *(pytest.param(name, {}, marks=pytest.mark.full if 700 <= VITS[name].width <= 2000 else ()) for name in NAMES),
    *((name, {"width": 48, "heads": 3, **changes}) for name, changes in CHANGED),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), CELLS)
def test_equals_timm_forward_and_gradient(name, changes):
    """Two blocks of each kind, or as a recipe has them: parameters, tokens, gradients; FP32, other kernels: 1e-4."""
    arch = replace(VITS.get(name, VITS["vit_small_patch16_dinov3"]), depth=2, **changes)
    if arch.width > 2000:
        arch = replace(arch, width=256, heads=4)
    size = 4 * arch.patch_size
    torch.manual_seed(0)
    timm_name, arguments = arch.timm_model(name)
    sized = {} if arch.rope else {"img_size": size}
    theirs = timm.create_model(timm_name, num_classes=0, **sized, **arguments).train()
    ours = VisionTransformer(arch, size).train()
    for parameter_name, parameter in theirs.named_parameters():
        assert "gamma" not in parameter_name or torch.all(parameter == arch.layer_scale)
        torch.nn.init.normal_(parameter, std=0.05)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(2, arch.in_chans, size, size)
    expected = theirs.forward_features(images)
    torch.testing.assert_close(ours.tokens(images), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.features(images), expected[:, 0], rtol=1e-4, atol=1e-4)
    expected[:, 0].square().sum().backward()
    ours.features(images).square().sum().backward()
    gradients = dict(theirs.named_parameters())
    for parameter_name, parameter in ours.named_parameters():
        reference = gradients[parameter_name].grad
        error = (parameter.grad - reference).norm() / (reference.norm() + 1e-6)
        assert error < 1e-3, parameter_name


def test_initial_weights():
    """Tokens deviate by 0.02 (to 1 %), mask token and biases are zeros, LayerScale as given."""
    arch = replace(VITS["vit_small_plus_patch16_dinov3_qkvb"], width=4096, depth=0, heads=64, patch_size=1)
    vit = VisionTransformer(arch, 2, BackboneOptions(mask_token=True))
    for tokens in (vit.cls_token, vit.reg_token):
        assert float(tokens.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert not vit.mask_token.any()
    narrow = replace(arch, width=48, depth=2, heads=3, patch_size=4)
    block = VisionTransformer(narrow, 8, BackboneOptions(mask_token=True)).blocks[0]
    assert not block.attn.q_bias.any() and not block.attn.v_bias.any() and not block.mlp.fc1_g.bias.any()
    assert torch.all(block.gamma_1 == 1e-5)
    assert float(block.mlp.fc1_g.weight.detach().std()) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("side, height, width", [(14, 6, 6), (37, 16, 24), (4, 7, 2)])
@pytest.mark.parametrize("interpolation", ["dino", "antialias"])
def test_resized_positions_are_torch_s_bicubic_ones(interpolation, side, height, width):
    """Values and gradients are equal. Standard normal entries in FP32, sums in another order: 2e-6 of the largest."""
    patches = torch.randn(1, side**2, 8, requires_grad=True)
    grid = patches.unflatten(1, (side, side)).permute(0, 3, 1, 2)
    if interpolation == "dino":
        scale = ((height + 0.1) / side, (width + 0.1) / side)
        theirs = F.interpolate(grid, scale_factor=scale, mode="bicubic")
    else:
        theirs = F.interpolate(grid, size=(height, width), mode="bicubic", antialias=True)
    theirs = theirs.flatten(2).transpose(1, 2)
    ours = resize_positions(patches, height, width, interpolation)
    weights = torch.randn_like(ours)
    gradients = [torch.autograd.grad((out * weights).sum(), patches)[0] for out in (ours, theirs)]
    for a, b in ((ours, theirs), gradients):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6 * float(b.detach().abs().max()))


class TestStochasticDepth:
    @pytest.mark.parametrize("first", [0.0, 0.45])
    def test_rates_grow_linearly_or_are_one_and_keep_the_mean(self, first):
        scales = drop_path_scales(drop_path_draws(sample_keys(0, 0, torch.arange(4000)), 4, 4), (first, 0.45))
        dropped = (scales == 0).double().mean(dim=(1, 2))
        # 32,000 decisions a block: three standard errors are below 0.009.
        torch.testing.assert_close(dropped, torch.linspace(first, 0.45, 4).double(), atol=0.009, rtol=0)
        torch.testing.assert_close(scales.mean(dim=(1, 2)), torch.ones(4), atol=0.03, rtol=0)

    def test_blocks_branches_views_epochs_and_seeds_differ(self):
        def dropped(keys):
            return drop_path_scales(drop_path_draws(keys, 2, 3), (0.0, 0.5))[1:] != 0

        base = dropped(sample_keys(0, 0, torch.arange(256)))
        flat = base.view(2 * 2 * 2, 256)[4:]
        for i in range(4):
            for j in range(i):
                assert 0.3 < (flat[i] == flat[j]).double().mean() < 0.7
        for keys in (sample_keys(1, 0, torch.arange(256)), sample_keys(0, 1, torch.arange(256))):
            other = dropped(keys)
            assert 0.4 < (other[1] == base[1]).double().mean() < 0.6

    def test_a_batched_rate_is_kept_exactly(self):
        draws = drop_path_draws(sample_keys(0, 0, torch.arange(4000)), 4, 3)
        kept = kept_sequences(draws, (0.25, 0.25), Packing.of([(8000, 1), (8000, 2)], CPU))
        assert {branch.packing.groups for block in kept for branch in block} == {((6000, 1), (6000, 2))}


CPU, _CHANGED = torch.device("cpu"), {"rope_rescale": 2.0}


def test_factors_of_stretched_coordinates():
    """4,000 draws against the reference's as many: four standard errors are 4.5 % of the range at the median."""
    recorded, levels = golden_v2_meta()["rope"]["rescale_coords=2"]["log_quantiles"], (0.05, 0.25, 0.5, 0.75, 0.95)
    logarithms = positions.stretches(positions._draws(step_key(0, 7), 1, 4000, CPU)[0], 2.0).log()
    assert logarithms.shape == (4000, 1) and logarithms.abs().max() <= math.log(2) + 1e-6
    found = torch.quantile(logarithms[:, 0].double(), torch.tensor(levels, dtype=torch.float64)).tolist()
    assert found == pytest.approx(recorded[1:-1], abs=0.045 * 2 * math.log(2))


def test_each_block_and_size_has_its_own_table_in_each_step():
    tables = RopeTables(ViTSpec(4, 48, 2, 3, rope="separate"), BackboneOptions(**_CHANGED))
    made = [tables.of([(8, 8), (8, 8)], CPU, step_key(seed, step)) for seed, step in ((0, 0), (0, 1), (1, 0))]
    flat = [table for sizes in made for blocks in sizes for table in blocks]
    assert len(flat) == 12
    assert not any(torch.equal(flat[i], flat[j]) for i in range(12) for j in range(i))
    again = tables.of([(8, 8), (8, 8)], CPU, step_key(0, 0))
    assert all(torch.equal(a, b) for x, y in zip(again, made[0], strict=True) for a, b in zip(x, y, strict=True))


_ARCH = ViTSpec(
    4, 32, 3, 2, layer_scale=0.5, registers=2, swiglu=True, mlp_ratio=5.0, norm_eps=1e-5, rope="separate",
    local_cls_norm=True,
)  # fmt: skip


def _model(**options):
    torch.manual_seed(1)
    vit = VisionTransformer(_ARCH, 24, BackboneOptions(**options))
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # so much that attention is far from uniform
    return vit


def test_stretched_coordinates_change_the_features_of_training_alone():
    changed, plain, images = _model(**_CHANGED), _model(), {"global": [torch.randn(2, 3, 24, 24)]}
    moved, still = (vit(images, step_key=step_key(0, 3))[CLS] for vit in (changed, plain))
    assert (moved - still).abs().max() > 1e-3
    assert torch.equal(changed(images)[CLS], plain(images)[CLS])


@pytest.mark.parametrize("size", [(24, 24), (12, 20), (36, 8)])
def test_attention_and_tokens_of_any_size(size):
    """Attention is the softmax of rotated queries and keys: its product with the values gives the block's output."""
    vit = _model()
    images = torch.randn(2, 3, *size)
    patches = size[0] * size[1] // 16
    weights = vit.last_attention(images)
    assert weights.shape == (2, 2, 3 + patches, 3 + patches)
    torch.testing.assert_close(vit.last_attention(images, cls_only=True), weights[:, :, :1])
    torch.testing.assert_close(vit.tokens(images)[:, 0], vit.features(images), rtol=1e-5, atol=1e-5)
    inputs, outputs = [], []
    attention = vit.blocks[-1].attn
    attention.qkv.register_forward_hook(lambda module, x, out: inputs.append(out[0].detach().clone()))
    attention.proj.register_forward_hook(lambda module, x, out: outputs.append(x[0].detach()))
    vit.tokens(images)
    values = inputs[0].view(2, 3 + patches, 3, 2, 16)[:, :, 2].transpose(1, 2)
    mixed = (weights @ values).transpose(1, 2).flatten(2).flatten(0, 1)
    torch.testing.assert_close(mixed, outputs[0], rtol=1e-4, atol=1e-5)


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
    """The probe, two tensors in full and the norms of all, the mask token's among them: 1e-4 of the largest."""
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

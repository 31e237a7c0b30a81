"""Our ViT against timm's, and its fast paths against its plain ones."""

from __future__ import annotations

import dataclasses

import pytest
import timm
import torch
import torch.nn.functional as F

from dino_ds.models.base import CLS, init_weights_in_pieces
from dino_ds.models.blocks import PatchEmbed
from dino_ds.models.drop_path import drop_path_draws, drop_path_scales, sample_keys
from dino_ds.models.positions import resize_positions
from dino_ds.models.specs.backbones import VITS
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.vit import VisionTransformer
from tests.reference import by_group

pytestmark = pytest.mark.numerical

NAMES = [
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "vit_large_patch16_224",
    "vit_small_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "vit_giant_patch14_reg4_dinov2",
    "vit_huge_patch16_224",
    "vit_7b_patch16_reg4",
    "vit_tiny_patch16_dinov3_qkvb",
    *(
        f"vit_{size}_patch16_dinov3{kind}"
        for size in ("small", "small_plus", "base", "large", "huge_plus")
        for kind in ("", "_qkvb")
    ),
    "vit_7b_patch16_dinov3",
]


CHANGED = [
    ("vit_tiny_patch16_224", {"in_chans": 5}),
    ("vit_small_patch16_224", {"registers": 4, "layer_scale": 1e-5}),
    ("vit_small_patch16_224", {"layer_scale": 0.1}),
    ("vit_small_patch14_reg4_dinov2", {"registers": 0}),
    ("vit_small_patch14_dinov2", {"registers": 2}),
    ("vit_giant_patch14_dinov2", {"registers": 1, "layer_scale": 0.1}),
    ("vit_small_patch16_dinov3", {"registers": 0, "layer_scale": 0.1}),
    ("vit_small_plus_patch16_dinov3_qkvb", {"width": 40, "heads": 2, "registers": 2, "patch_size": 8}),
    ("vit_7b_patch16_dinov3", {"width": 24, "heads": 3, "in_chans": 5}),
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
    """Two blocks of each kind, at full width up to 2000, or as a recipe changes them: same parameters, start of
    LayerScale, tokens, gradients; FP32, other kernels: 1e-4."""
    arch = dataclasses.replace(VITS.get(name, VITS["vit_small_patch16_dinov3"]), depth=2, **changes)
    if arch.width > 2000:
        arch = dataclasses.replace(arch, width=256, heads=4)
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
    """Tokens of a deviation of 0.02 (4 x 4096 numbers: 1 % is the standard error), a mask token and biases of zeros,
    LayerScale as given; piece by piece the same as whole."""
    arch = dataclasses.replace(VITS["vit_small_plus_patch16_dinov3_qkvb"], width=4096, depth=0, heads=64, patch_size=1)
    vit = VisionTransformer(arch, 2, BackboneOptions(mask_token=True))
    for tokens in (vit.cls_token, vit.reg_token):
        assert float(tokens.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert not vit.mask_token.any()
    narrow = dataclasses.replace(arch, width=48, depth=2, heads=3, patch_size=4, local_cls_norm=True)
    torch.manual_seed(0)
    whole = VisionTransformer(narrow, 8, BackboneOptions(mask_token=True))
    with torch.device("meta"):
        pieces = VisionTransformer(narrow, 8, BackboneOptions(mask_token=True))
    torch.manual_seed(0)
    init_weights_in_pieces(pieces, lambda module: None)
    assert all(torch.equal(t, pieces.state_dict()[name]) for name, t in whole.state_dict().items())
    block = whole.blocks[0]
    assert not block.attn.q_bias.any() and not block.attn.v_bias.any() and not block.mlp.fc1_g.bias.any()
    assert torch.all(block.gamma_1 == 1e-5)
    assert float(block.mlp.fc1_g.weight.detach().std()) == pytest.approx(0.02, rel=0.05)


def _model(**changes):
    torch.manual_seed(1)
    arch = dataclasses.replace(VITS["vit_small_patch14_reg4_dinov2"], width=48, heads=3, depth=3, patch_size=4)
    model = VisionTransformer(arch, 24, BackboneOptions(drop_path=0.3, **changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def _views():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(5, 3, s, s, generator=generator) for s in (24, 24, 12, 12, 12)]


def test_views_come_out_in_order():
    """Row v * b + i is view v of image i, as if each view went alone."""
    model, views = _model().eval(), _views()
    alone = torch.cat([model.features(view) for view in views])
    torch.testing.assert_close(model(by_group(views))[CLS], alone, rtol=1e-5, atol=1e-5)


def test_position_interpolation_is_a_choice():
    """The reference's + 0.1 samples other places than an antialiased resize; both keep the native grid as it is."""
    views = _views()
    dino, antialias = _model(), _model(pos_embed_interpolation="antialias")
    torch.testing.assert_close(dino.features(views[0]), antialias.features(views[0]))
    assert (dino.features(views[2]) - antialias.features(views[2])).abs().max() > 1e-4


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


@pytest.mark.parametrize("channels, side, size", [(3, 16, (96, 80)), (5, 14, (70, 60))])
def test_patches_are_embedded_as_by_a_convolution(channels, side, size):
    """Values and gradients are equal in double precision; 60 pixels are 4 patches of 14, and the rest is left out."""
    torch.manual_seed(0)
    embed, images = PatchEmbed(channels, side, 32).double(), torch.randn(2, channels, *size, dtype=torch.float64)
    conv = embed.proj
    theirs = F.conv2d(images, conv.weight, conv.bias, stride=side).flatten(2).transpose(1, 2)
    ours = embed(images)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(out.square().sum(), tuple(conv.parameters())) for out in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def _scales(keys, views, blocks, last_rate):
    return drop_path_scales(drop_path_draws(keys, views, blocks), (0.0, last_rate))


class TestStochasticDepth:
    def test_rates_grow_linearly_and_keep_the_mean(self):
        rates = [0.0, 0.15, 0.3, 0.45]
        scales = _scales(sample_keys(0, 0, torch.arange(4000)), 4, 4, 0.45)
        dropped = (scales == 0).double().mean(dim=(1, 2))
        # 32,000 decisions a block: three standard errors are below 0.009.
        torch.testing.assert_close(dropped, torch.tensor(rates).double(), atol=0.009, rtol=0)
        torch.testing.assert_close(scales.mean(dim=(1, 2)), torch.ones(4), atol=0.03, rtol=0)

    def test_decisions_follow_the_image_not_the_batch(self):
        whole = _scales(sample_keys(5, 2, torch.arange(8)), 3, 2, 0.4).view(2, 2, 3, 8)
        part = _scales(sample_keys(5, 2, torch.arange(3, 6)), 3, 2, 0.4).view(2, 2, 3, 3)
        assert torch.equal(whole[..., 3:6], part)

    def test_blocks_branches_views_epochs_and_seeds_differ(self):
        base = _scales(sample_keys(0, 0, torch.arange(256)), 2, 3, 0.5)[1:] != 0
        flat = base.view(2 * 2 * 2, 256)[4:]
        for i in range(4):
            for j in range(i):
                assert 0.3 < (flat[i] == flat[j]).double().mean() < 0.7
        for keys in (sample_keys(1, 0, torch.arange(256)), sample_keys(0, 1, torch.arange(256))):
            other = _scales(keys, 2, 3, 0.5)[1:] != 0
            assert 0.4 < (other[1] == base[1]).double().mean() < 0.6

    def test_none_in_evaluation(self):
        model, views = _model(), by_group(_views())
        assert torch.equal(model(views)[CLS], model(views)[CLS])
        keys = sample_keys(0, 0, torch.arange(5))
        assert not torch.equal(model(views)[CLS], model(views, keys)[CLS])

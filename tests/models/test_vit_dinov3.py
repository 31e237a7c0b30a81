"""Our ViT with rotary positions against the numbers recorded from facebookresearch/dinov3's, masked and not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

from dino_ds.backbones import VITS, BackboneOptions, ViTSpec
from dino_ds.models.attention import QueryKeyValue
from dino_ds.models.base import CLS, patches_of
from dino_ds.models.vit import VisionTransformer
from dino_ds.models.weights import init_weights_in_pieces
from tests.models.recorded import compare_features, run_probe
from tests.reference_v2 import from_reference_v2, golden_v2, golden_v2_meta, our_name

pytestmark = pytest.mark.numerical

_NARROW = ViTSpec(4, 48, 1, 3, layer_scale=1e-5, rope="separate")
KINDS = {
    "plain": {"depth": 2, "norm_eps": 1e-6},
    "storage": {
        "registers": 4,
        "swiglu": True,
        "mlp_ratio": 256 / 48,
        "norm_eps": 1e-5,
        "rope": "max",
        "cls_norm": True,
        "local_cls_norm": True,
    },
    "rms": {
        "registers": 2,
        "swiglu": True,
        "mlp_ratio": 4.0,
        "norm_eps": 1e-5,
        "rms_norm": True,
        "qkv_bias": False,
        "rope": "min",
        "rope_min_period": 0.8,
        "rope_max_period": 40.0,
    },
}
# FP32 sums of other kernels in another order, through at most two blocks; features are of the size of 1.
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


class _KeyBias(QueryKeyValue):
    """Ours has no bias of the keys, and in what is recorded of "plain" they have one."""

    def __init__(self, qkv: QueryKeyValue, k_bias: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.weight, self.bias = qkv.in_features, qkv.weight, None
        self.k_bias = nn.Parameter(k_bias)

    def forward(self, x, query_rows=None, bias=None):
        none = torch.zeros_like(self.k_bias)
        return super().forward(x, query_rows, bias + torch.cat((none, self.k_bias, none)))


def _recorded(kind):
    """What was recorded of `kind`, its settings, and our network with its weights."""
    meta, prefix = golden_v2_meta()["vit"]["dinov3"][kind], f"{kind}."
    numbers = {name.removeprefix(prefix): t for name, t in golden_v2("vit_dinov3").items() if name.startswith(prefix)}
    weights = from_reference_v2(numbers, "weights.", dinov3=True)
    vit = VisionTransformer(replace(_NARROW, **KINDS[kind]), 32, BackboneOptions(mask_token=True))
    for name in [name for name in weights if name.endswith("k_bias")]:
        attention = vit.get_submodule(name.removesuffix(".k_bias"))
        attention.qkv = _KeyBias(attention.qkv, weights.pop(name))
        weights[name.replace("k_bias", "qkv.k_bias")] = attention.qkv.k_bias.detach()
    vit.load_state_dict(weights)
    return numbers, meta, vit


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_features_are_the_reference_s(kind, masked):
    """CLS, patches and storage tokens of each size, one by one and all sizes in one pass."""
    numbers, meta, vit = _recorded(kind)
    with torch.no_grad():  # with a gradient the CLS tokens of local crops have a norm of their own
        compare_features(numbers, meta["sizes"], vit, None if masked else "x_storage_tokens", **CLOSE)


def test_local_crops_have_a_norm_of_their_own_in_training():
    """With a gradient, that is; and only their CLS tokens: those of global crops and all patches have the others."""
    numbers, _, vit = _recorded("storage")
    crops = {size: [numbers[f"{size}.input"]] for size in ("global", "local")}
    found = vit(crops, patches=["local"])
    recorded = numbers["train_list.local.x_norm_clstoken"]
    torch.testing.assert_close(found[CLS][2:], recorded, **CLOSE)
    torch.testing.assert_close(found[CLS][:2], numbers["global.x_norm_clstoken"], **CLOSE)
    torch.testing.assert_close(found[patches_of("local")][:1], numbers["local.x_norm_patchtokens"], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_masked_pass_are_the_reference_s(kind):
    """Two tensors in full and the norms of all, the mask token's among them; relative to the largest entry: 1e-4."""
    numbers, meta, vit = _recorded(kind)
    recorded = run_probe(numbers, vit)
    ours = _in_one({name: p.grad for name, p in vit.named_parameters() if not name.startswith("local_cls_norm")})
    for name, theirs in recorded.items():
        own = ours[our_name(name, dinov3=True)]
        torch.testing.assert_close(own, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))
    norms = {our_name(name, dinov3=True): norm for name, norm in meta["gradient_norms_of_probe"].items()}
    assert norms.keys() == ours.keys()
    for name, norm in norms.items():
        assert float(ours[name].norm()) == pytest.approx(norm, rel=1e-4), name


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vit_small_patch16_dinov3", {"registers": 0, "layer_scale": 0.1}),
        ("vit_small_plus_patch16_dinov3_qkvb", {"width": 40, "heads": 2, "registers": 2, "patch_size": 8}),
        ("vit_7b_patch16_dinov3", {"width": 24, "heads": 3, "in_chans": 5, "local_cls_norm": True}),
        ("vit_huge_plus_patch16_dinov3", {"rope_base": 50.0}),
        ("a_name_of_ours", {"swiglu": True, "mlp_ratio": 6.0, "qkv_bias": True}),
    ],
)
def test_timm_builds_what_a_recipe_changed(name, changes):
    """Same parameters, same start of LayerScale, same features. Other kernels: 1e-4."""
    known = VITS.get(name, VITS["vit_small_patch16_dinov3"])
    arch = replace(known, **{"width": 48, "heads": 3, "depth": 2, **changes})
    timm_name, arguments = arch.timm_model(name)
    side = 4 * arch.patch_size
    theirs = timm.create_model(timm_name, num_classes=0, **arguments).eval()
    ours = VisionTransformer(arch, side)
    assert torch.all(theirs.blocks[1].gamma_2 == torch.tensor(arch.layer_scale))
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    theirs.load_state_dict({n: t for n, t in ours.state_dict().items() if n not in ours.training_only})
    images = torch.randn(2, arch.in_chans, side, side + arch.patch_size)
    torch.testing.assert_close(ours.features(images), theirs(images), rtol=1e-4, atol=1e-4)


def test_timm_has_no_network_of_another_kind():
    arch = VITS["vit_small_patch16_dinov3"]
    others = [{"rope": "max"}, {"rms_norm": True}, {"cls_norm": True}, {"norm_eps": 1e-6}]
    others += [{"rope_min_period": 1.0, "rope_max_period": 9.0}]
    for changes in others:
        assert replace(arch, **changes).timm_model("vit_small_patch16_dinov3") is None, changes


def test_initial_weights():
    """Tokens of a deviation of 0.02 (4 x 4096 numbers: 1 % is the standard error), a mask token and biases of zeros,
    LayerScale as given; piece by piece the same as whole."""
    arch = replace(VITS["vit_small_plus_patch16_dinov3_qkvb"], width=4096, depth=0, heads=64, patch_size=1)
    vit = VisionTransformer(arch, 2, BackboneOptions(mask_token=True))
    for tokens in (vit.cls_token, vit.reg_token):
        assert float(tokens.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert not vit.mask_token.any()
    narrow = replace(arch, width=48, depth=2, heads=3, patch_size=4, local_cls_norm=True)
    torch.manual_seed(0)
    whole = VisionTransformer(narrow, 8, BackboneOptions(mask_token=True))
    with torch.device("meta"):
        pieces = VisionTransformer(narrow, 8, BackboneOptions(mask_token=True))
    torch.manual_seed(0)
    init_weights_in_pieces(pieces, lambda module: None)
    assert all(torch.equal(t, pieces.state_dict()[name]) for name, t in whole.state_dict().items())
    block = whole.blocks[0]
    assert not block.attn.q_bias.any() and not block.attn.v_bias.any() and not block.mlp.fc1_g.bias.any()
    assert torch.all(block.gamma_1 == 1e-5) and float(block.mlp.fc1_g.weight.detach().std()) == pytest.approx(
        0.02, rel=0.05
    )


def _in_one(gradients):
    """The three biases as one, under the reference's name."""
    found = dict(gradients)
    for name in [name for name in found if name.endswith(".q_bias")]:
        q, v = found.pop(name), found.pop(name.replace("q_bias", "v_bias"))
        k = found.pop(name.replace("q_bias", "qkv.k_bias"), torch.zeros_like(q))
        found[name.replace("q_bias", "qkv.bias")] = torch.cat((q, k, v))
    return found

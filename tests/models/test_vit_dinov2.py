"""Our ViT against the numbers recorded from facebookresearch/dinov2's, masked and not."""

from __future__ import annotations

import pytest
import torch

from dino_ds.backbones import BackboneOptions
from dino_ds.models.vit import VisionTransformer
from dino_ds.weights.fit import architecture_of
from tests.models.recorded import compare_features, run_probe
from tests.reference_v2 import from_reference_v2, golden_v2, golden_v2_meta, our_name

pytestmark = pytest.mark.numerical

KINDS = ["plain", "registers_swiglu", "patch14"]
# FP32 sums of other kernels in another order, through at most two blocks; features are of the size of 1.
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


def _recorded(kind):
    """What was recorded of `kind`, its settings, and our network with its weights."""
    meta, prefix = golden_v2_meta()["vit"]["dinov2"][kind], f"{kind}."
    numbers = {name.removeprefix(prefix): t for name, t in golden_v2("vit_dinov2").items() if name.startswith(prefix)}
    weights, asked = from_reference_v2(numbers, "weights."), meta["settings"]
    arch, size = architecture_of(weights, asked["num_heads"])
    assert (arch.norm_eps, arch.layer_scale, size) == (asked["layer_norm_eps"], asked["init_values"], asked["img_size"])
    way = "antialias" if asked.get("interpolate_antialias") else "dino"
    vit = VisionTransformer(arch, size, BackboneOptions(pos_embed_interpolation=way, mask_token=True))
    vit.load_state_dict(weights)
    return numbers, meta, vit


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_features_are_the_reference_s(kind, masked):
    """CLS, patches and registers of each size, one by one and all sizes in one pass."""
    numbers, meta, vit = _recorded(kind)
    compare_features(numbers, meta["sizes"], vit, None if masked else "x_norm_regtokens", **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_position_embeddings_are_the_reference_s(kind):
    """FP32, sums in another order, entries below 1: 1e-6. With registers the CLS token's is in the token itself."""
    numbers, _, vit = _recorded(kind)
    found = {name: t for name, t in numbers.items() if name.startswith("pos_embed.")}
    assert found
    for name, theirs in found.items():
        height, width = (int(side) // vit.arch.patch_size for side in name.removeprefix("pos_embed.").split("x"))
        ours = vit._positions(height, width)
        torch.testing.assert_close(ours, theirs[:, 1:] if vit.arch.registers else theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_masked_pass_are_the_reference_s(kind):
    """Two tensors in full and the norms of all, the mask token's among them; relative to the largest entry: 1e-4."""
    numbers, meta, vit = _recorded(kind)
    recorded = run_probe(numbers, vit)
    ours = {name: parameter.grad for name, parameter in vit.named_parameters()}
    for name, theirs in recorded.items():
        torch.testing.assert_close(ours[our_name(name)], theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))
    norms = {our_name(name): norm for name, norm in meta["gradient_norms_of_probe"].items()}
    assert norms.keys() == ours.keys()
    for name, norm in norms.items():
        own = ours[name]
        if name == "pos_embed" and vit.arch.registers:  # theirs has a place for the CLS token
            own = torch.cat((ours["cls_token"], own), dim=1)
        assert float(own.norm()) == pytest.approx(norm, rel=1e-4), name

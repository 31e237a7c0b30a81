"""Patch features where they are asked for, hidden patches, and networks that a recipe changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dino_ds.models.base import CLS, init_weights_in_pieces
from dino_ds.models.drop_path import drop_path_draws, drop_path_scales, kept_sequences, sample_keys
from dino_ds.models.packing import Packing
from dino_ds.models.specs.backbones import BACKBONES, ViTSpec
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.vit import VisionTransformer

_PLAIN = ViTSpec(8, 32, 4, 2)
_OTHER = dataclasses.replace(_PLAIN, layer_scale=0.5, registers=3)


def _model(arch=_PLAIN, **options):
    torch.manual_seed(0)
    model = VisionTransformer(arch, 32, BackboneOptions(mask_token=True, **options))
    torch.nn.init.normal_(model.mask_token)
    return model.double()


def _crops(**sizes):
    generator = torch.Generator().manual_seed(1)
    sizes = sizes or {"global": (2, 32), "local": (3, 16)}
    return {
        name: [torch.randn(5, 3, s, s, generator=generator).double() for _ in range(v)]
        for name, (v, s) in sizes.items()
    }


def _masks(share=0.4):
    return {"global": torch.rand(10, 16, generator=torch.Generator().manual_seed(2)) < share}


def _outputs_and_gradients(model, crops=None, patches=("global",), masks=None):
    found = model(crops or _crops(), sample_keys(0, 0, torch.arange(5)), patches, _masks() if masks is None else masks)
    sum((t * torch.linspace(-1, 1, t.numel()).double().view_as(t)).sum() for t in found.values()).backward()
    return {name: t.detach() for name, t in found.items()} | {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.numerical
@pytest.mark.parametrize("patches", [("global",), ("large",), ("global", "local", "large")])
def test_features_by_name_are_those_of_each_group_alone(patches):
    """This holds where two groups of one size lie side by side, of which one is masked or asked for."""
    crops = _crops(local=(3, 16), large=(1, 32), **{"global": (2, 32)})
    model = _model(_OTHER)
    together = model(crops, None, patches, _masks())
    assert together.keys() == {CLS, *(f"patches/{name}" for name in patches)}
    cls = dict(zip(crops, together[CLS].split([15, 5, 10]), strict=True))
    for name, group in crops.items():
        alone = model({name: group}, None, (name,), {n: m for n, m in _masks().items() if n == name})
        torch.testing.assert_close(cls[name], alone[CLS], rtol=0, atol=1e-10)
        if name in patches:
            torch.testing.assert_close(together[f"patches/{name}"], alone[f"patches/{name}"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("masks", [{}, _masks(share=0.0)], ids=["no masks", "nothing hidden"])
def test_the_mask_token_always_has_a_gradient(masks):
    """Exactly zero where nothing is hidden: weight decay reaches it, and no ZeRO stage repeats an old one."""
    found = _outputs_and_gradients(_model(), masks=masks)
    assert torch.equal(found["mask_token"], torch.zeros(1, 32).double())


def test_a_mask_token_changes_no_other_weights():
    """It starts at zero and draws no random numbers, also where weights are made in pieces."""
    torch.manual_seed(3)
    plain = VisionTransformer(_OTHER, 32)
    torch.manual_seed(3)
    ours = VisionTransformer(_OTHER, 32, BackboneOptions(mask_token=True))
    torch.manual_seed(3)
    with torch.device("meta"):
        pieces = VisionTransformer(_OTHER, 32, BackboneOptions(mask_token=True))
    init_weights_in_pieces(pieces, lambda module: None)
    for state in (ours.state_dict(), pieces.state_dict()):
        assert torch.equal(state.pop("mask_token"), torch.zeros(1, 32))
        assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())
        assert len(state) == len(plain.state_dict())


def test_uniform_drop_path_has_one_rate_in_all_blocks():
    draws = drop_path_draws(sample_keys(0, 0, torch.arange(4000)), 4, 3)
    dropped = (drop_path_scales(draws, (0.3, 0.3)) == 0).double().mean(dim=(1, 2))
    # 32,000 decisions a block: three standard errors are below 0.009.
    torch.testing.assert_close(dropped, torch.full((3,), 0.3).double(), atol=0.009, rtol=0)
    kept = kept_sequences(draws, (0.25, 0.25), Packing.of([(8000, 1), (8000, 2)], draws.device))
    assert {branch.packing.groups for block in kept for branch in block} == {((6000, 1), (6000, 2))}


def test_timm_s_own_networks_need_no_more_arguments():
    for name, arch in BACKBONES.items():
        assert not {"init_values", "reg_tokens", "no_embed_class"} & arch.timm_model(name)[1].keys(), name

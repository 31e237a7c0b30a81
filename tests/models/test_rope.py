"""Rotary positions and patch features: the laws of their change in training, any size, hidden patches."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from dino_ds.basics.seeds import sample_keys
from dino_ds.models import positions
from dino_ds.models.base import CLS
from dino_ds.models.drop_path import drop_path_draws, drop_path_scales, kept_sequences, step_key
from dino_ds.models.packing import Packing
from dino_ds.models.positions import RopeTables
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.vit import VisionTransformer
from tests.reference_v2 import golden_v2_meta

CPU = torch.device("cpu")
_HEAD16 = ViTSpec(4, 48, 2, 3, rope="separate")
_LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
_CHANGED = {"rope_rescale": 2.0}


class TestLaws:
    """Of 4,000 draws against the reference's of as many: four standard errors are 4.5 % of the range at the median."""

    def test_factors(self):
        recorded = golden_v2_meta()["rope"]["rescale_coords=2"]["log_quantiles"]
        logarithms = positions.stretches(positions._draws(step_key(0, 7), 1, 4000, CPU)[0], 2.0).log()
        assert logarithms.shape == (4000, 1) and logarithms.abs().max() <= math.log(2) + 1e-6
        found = torch.quantile(logarithms[:, 0].double(), torch.tensor(_LEVELS, dtype=torch.float64)).tolist()
        assert found == pytest.approx(recorded[1:-1], abs=0.045 * 2 * math.log(2))

    def test_each_block_and_size_has_its_own_table_in_each_step(self):
        tables = RopeTables(_HEAD16, BackboneOptions(**_CHANGED))
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


_PLAIN = ViTSpec(8, 32, 4, 2)
_OTHER = dataclasses.replace(_PLAIN, layer_scale=0.5, registers=3)


def _masked_model(arch=_PLAIN, **options):
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


@pytest.mark.numerical
@pytest.mark.parametrize("patches", [("global",), ("large",), ("global", "local", "large")])
def test_features_by_name_are_those_of_each_group_alone(patches):
    """This holds where two groups of one size lie side by side, of which one is masked or asked for."""
    crops = _crops(local=(3, 16), large=(1, 32), **{"global": (2, 32)})
    model = _masked_model(_OTHER)
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
    model = _masked_model()
    found = model(_crops(), sample_keys(0, 0, torch.arange(5)), ("global",), masks)
    sum(t.square().sum() for t in found.values()).backward()
    assert torch.equal(model.mask_token.grad, torch.zeros(1, 32).double())


def test_uniform_drop_path_has_one_rate_in_all_blocks():
    draws = drop_path_draws(sample_keys(0, 0, torch.arange(4000)), 4, 3)
    dropped = (drop_path_scales(draws, (0.3, 0.3)) == 0).double().mean(dim=(1, 2))
    # 32,000 decisions a block: three standard errors are below 0.009.
    torch.testing.assert_close(dropped, torch.full((3,), 0.3).double(), atol=0.009, rtol=0)
    kept = kept_sequences(draws, (0.25, 0.25), Packing.of([(8000, 1), (8000, 2)], draws.device))
    assert {branch.packing.groups for block in kept for branch in block} == {((6000, 1), (6000, 2))}

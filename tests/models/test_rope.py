"""Rotary positions: the laws of their change in training, and attention with them at any size."""

from __future__ import annotations

import math

import pytest
import torch
import torch._dynamo

from dino_ds.models import positions
from dino_ds.models.base import CLS
from dino_ds.models.drop_path import step_key
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
    """Quantiles of 4,000 draws against the reference's of as many: four standard errors of a difference are 4.5 % of
    the range at the median."""

    def test_factors(self):
        recorded = golden_v2_meta()["rope"]["rescale_coords=2"]["log_quantiles"]
        logarithms = positions.stretches(positions._draws(step_key(0, 7), 1, 4000, CPU)[0], 2.0).log()
        assert logarithms.shape == (4000, 1) and logarithms.abs().max() <= math.log(2) + 1e-6
        assert _quantiles(logarithms[:, 0]) == pytest.approx(recorded[1:-1], abs=0.045 * 2 * math.log(2))

    def test_each_block_and_size_has_its_own_table_in_each_step(self):
        tables = RopeTables(_HEAD16, BackboneOptions(**_CHANGED))
        made = [tables.of([(8, 8), (8, 8)], CPU, step_key(seed, step)) for seed, step in ((0, 0), (0, 1), (1, 0))]
        flat = [table for sizes in made for blocks in sizes for table in blocks]
        assert len(flat) == 12
        assert not any(torch.equal(flat[i], flat[j]) for i in range(12) for j in range(i))
        again = tables.of([(8, 8), (8, 8)], CPU, step_key(0, 0))
        assert all(torch.equal(a, b) for x, y in zip(again, made[0], strict=True) for a, b in zip(x, y, strict=True))

    def test_none_without_a_key_or_an_option(self):
        changed, plain = (RopeTables(_HEAD16, BackboneOptions(**options)) for options in (_CHANGED, {}))
        ((first, second),) = changed.of([(8, 8)], CPU)
        assert first is second and first is changed.of([(8, 8)], CPU)[0][0], "made once"
        assert torch.equal(first, plain.of([(8, 8)], CPU, step_key(0, 0))[0][0])


def _quantiles(values):
    return torch.quantile(values.double(), torch.tensor(_LEVELS, dtype=torch.float64)).tolist()


class TestRotation:
    groups, heads, width = ((3, 5), (2, 7)), 2, 8

    def _case(self, parts, dtype=torch.float64):
        torch.manual_seed(0)
        projected = torch.randn(3 * 5 + 2 * 7, parts * self.heads * self.width, dtype=dtype)
        angles = [torch.randn(4, 4), torch.randn(6, 4)]  # one token, or one, before the patches
        return projected, angles, [torch.stack((a.cos(), a.sin())) for a in angles]

    def test_fp32_inside(self):
        projected, _, tables = self._case(3, torch.bfloat16)
        exact = positions.rotate(projected.float(), self.groups, tables, (2, 3), self.heads).bfloat16()
        assert torch.equal(positions.rotate(projected.clone(), self.groups, tables, (2, 3), self.heads), exact)

    def test_a_lone_cls_token_is_not_turned(self):
        x = torch.randn(3, 16)
        assert torch.equal(positions.rotate(x.clone(), ((3, 1),), [torch.randn(2, 4, 4)], (1, 1), 2), x)


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

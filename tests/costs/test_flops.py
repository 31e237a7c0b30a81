"""The FLOP model against torch's count of the operators that really run."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dino_ds.backbones import BACKBONES, BackboneOptions, ViTSpec
from dino_ds.config.crops import crop_sizes, dino_groups
from dino_ds.config.recipe import Recipe
from dino_ds.costs.flops import HeadSizes, step_flops, vit_of
from dino_ds.engine.process import init_distributed
from dino_ds.measure.trial import build_trial, resolve
from dino_ds.models.head import DinoHead
from dino_ds.models.vit import VisionTransformer
from dino_ds.objectives.dino import HEAD as HEAD_NAME
from tests.measure.tiny import tiny_ds, tiny_recipe
from tests.reference import by_group, dino_network

HEAD = HeadSizes(prototypes=64, hidden=48, bottleneck=16, layers=3)
ARCHS = {
    "plain": ViTSpec(8, 32, 3, 2),
    "swiglu": ViTSpec(8, 48, 2, 3, mlp_ratio=2.66667 * 2, swiglu=True, layer_scale=1e-5),
    "registers": ViTSpec(8, 32, 2, 2, registers=4, in_chans=1),
}


@pytest.fixture(autouse=True)
def _positions_as_they_are(monkeypatch):
    """Resizing them is a small product, once a step whatever the batch, that the model leaves out."""

    def resized(patches, rows, columns):
        return patches.new_zeros(1, len(rows) * len(columns), patches.shape[-1])

    monkeypatch.setattr("dino_ds.models.vit.resized", resized)


def _count_flops():
    """torch's counter, and the in-place product that it overlooks."""

    def addmm(accumulator, a, b, **_):
        return 2 * a[0] * a[1] * b[1]

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm})


@pytest.mark.parametrize("cls_only", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
@pytest.mark.slow
def test_student_and_teacher_cost_what_the_model_says(arch, packed, cls_only):
    """Exactly. Attention by the plain formula: FlopCounterMode adds what fused attention computes twice."""
    backbone = VisionTransformer(
        arch, 32, BackboneOptions(attention="naive", packed=packed, cls_only_last_block=cls_only)
    )
    network = dino_network(backbone, DinoHead(arch.width, HEAD.hidden, HEAD.bottleneck, HEAD.prototypes, HEAD.layers))
    groups = dino_groups(32, (0.4, 1), 16, (0.1, 0.4), 3)
    crops = by_group([torch.randn(2, arch.in_chans, size, size) for size in crop_sizes(groups)])
    with _count_flops() as counted:
        with torch.no_grad():
            network({"global": crops["global"]})
        network(crops)[HEAD_NAME].sum().backward()
    assert counted.get_total_flops() == 2 * sum(step_flops(arch, HEAD, groups, cls_only).values())


def test_a_whole_training_step_costs_what_the_model_says():
    """Engine, loss, optimizer and teacher add no matrix product."""
    init_distributed()
    recipe = tiny_recipe(head__layers="2")
    ds = tiny_ds(0, dino_ds={"attention": "naive"})
    trial = build_trial(*resolve(recipe, ds, "test.json", 4))
    with _count_flops() as counted:
        trial.run()
    head = HeadSizes(**recipe.head.model_dump())
    expected = step_flops(vit_of(recipe), head, recipe.crops.groups, cls_only_last_block=True)
    assert counted.get_total_flops() == 4 * sum(expected.values())


def test_known_models():
    """ViT-S/16 and ViT-L/16 with DINO's head and 2x224 + 8x96: 113.4 and 1526 GFLOP an image."""
    head = HeadSizes(65536, 2048, 256, 3)
    for name, expected in (("vit_small_patch16_224", 113.4e9), ("vit_large_patch16_224", 1526.2e9)):
        total = sum(step_flops(BACKBONES[name], head, Recipe().crops.groups).values())
        assert total == pytest.approx(expected, rel=1e-3)

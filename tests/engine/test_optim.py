"""Groups, rates by layer, schedules and states of the optimizer; Muon against a slow reference and torch."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from dino_ds.basics.own_code import allow_code
from dino_ds.engine.muon import Muon, matrices_of, orthogonalized
from dino_ds.engine.optim import NAMES, PROTOTYPES, OptimizerOptions, parameter_groups, set_groups
from dino_ds.engine.schedules import WeightSchedule
from dino_ds.errors import ConfigError
from dino_ds.method.build import build_schedules
from dino_ds.models.blocks import Mlp
from dino_ds.models.foreign import ForeignBackbone
from dino_ds.models.network import Network
from dino_ds.models.prototypes import DinoHead
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.specs.foreign import ForeignSpec
from dino_ds.models.vit import VisionTransformer
from tests.engine.harness import build_step, ds_config, tiny_network
from tests.ranks import run_on_ranks
from tests.reference import dino_network, golden_v2_meta, our_name
from tests.test_golden_v2 import dinov2_recipe

BATCH = 8


def test_groups_are_dinov2_s():
    """Groups agree in parameters, in multipliers of the learning rate, in decay, and in which are last layers."""
    backbone = VisionTransformer(ViTSpec(4, 48, 2, 3, layer_scale=1e-5), 32, BackboneOptions(mask_token=True))
    heads = {name: DinoHead(48, 64, 32, 96, 3, learned_lengths=True) for name in ("head", "ibot_head")}
    network = Network(backbone, heads, {})
    names, ours, expected = {id(p): name for name, p in network.named_parameters()}, {}, {}
    for group in parameter_groups(network, OptimizerOptions(layer_decay=0.8, patch_embed_lr=0.2, clip_by="part")):
        rate, kind = pytest.approx(group["lr_multiplier"], rel=1e-12), group["name"]
        ours[frozenset(names[id(p)] for p in group["params"])] = rate, float(kind != "no_decay"), kind == PROTOTYPES
    for group in golden_v2_meta()["trajectory_dinov2"]["runs"]["sinkhorn_untied"]["parameter_groups"]:
        members = frozenset(map(our_name, group["parameters"]))
        expected[members] = (group["lr_multiplier"], group["wd_multiplier"], group["is_last_layer"])
    assert expected == ours


def test_a_backbone_without_a_patch_embedding_has_no_learning_rate_for_it():
    allow_code(["tests.narrow_resnet:NarrowResNet"])
    backbone = ForeignBackbone(ForeignSpec("tests.narrow_resnet:NarrowResNet"), 32, BackboneOptions())
    network = dino_network(backbone, DinoHead(48, 64, 32, 96, 3))
    with pytest.raises(ConfigError, match=r"^optimizer.patch_embed_lr 0.2 .* this one has none: leave it out$"):
        parameter_groups(network, OptimizerOptions(patch_embed_lr=0.2))
    multipliers = {group["lr_multiplier"] for group in parameter_groups(network, OptimizerOptions(layer_decay=0.5))}
    assert len(multipliers) == 7  # two parts of the stem, four stages, and the head


def _offloaded(kind, instead):
    zero = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    refused = rf"^optimizer.kind {kind} does not go with .*offload_optimizer: .*kind {instead}$"
    with pytest.raises(ConfigError, match=refused):
        build_step(ds_config(2, "fp32", BATCH, zero=zero), options=OptimizerOptions(kind=kind))


@pytest.mark.parametrize(("kind", "instead"), [("lars", "sgd"), ("muon", "adamw")])
def test_optimizers_that_communicate_are_refused_on_the_host(kind, instead):
    run_on_ranks(_offloaded, kind, instead, world=1)


def test_weights_ramp_as_the_reference_s():
    """meta.json of tests/golden_v2: DINOv3's schedule after its own warm-up, in which it differs from a Ramp."""
    recorded = golden_v2_meta()["schedules"]["dinov3.linear_warmup_cosine_decay"]
    for run, (start, end) in zip(recorded[1:], ((0.0, 2.0), (0.07, 0.01)), strict=True):
        weight = WeightSchedule(start, end, run["cosine_iterations"])
        expected = run["values"][run["warmup_iterations"] :]
        assert [weight.at(i) for i in range(len(expected))] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_recipe_s_schedules_are_those_of_dinov2():
    """Recorded by its own training loop (tests/golden_v2); FP64 on both sides: 1e-9."""
    recorded = golden_v2_meta()["trajectory_dinov2"]["runs"]["sinkhorn_untied"]["schedules"]
    schedules = build_schedules(dinov2_recipe("sinkhorn_untied"), epoch_steps=2)
    values = [schedules.at(i) for i in range(6)]
    for name in ("lr", "weight_decay", "teacher_momentum", "teacher_temp"):
        assert [getattr(v, name) for v in values] == pytest.approx(recorded[name], rel=1e-9, abs=1e-12), name
    assert all(v.prototypes_gradient for v in values)
    groups = [{"name": name, "lr_multiplier": 1.0} for name in NAMES]
    for value, expected in zip(values, recorded["last_layer_lr"], strict=True):
        set_groups(groups, value)
        (rate,) = (group["lr"] for group in groups if group["name"] == PROTOTYPES)
        assert rate == pytest.approx(expected, rel=1e-9, abs=1e-12)


LR, MUON_DECAY, MOMENTUM = 0.02, 0.1, 0.95


def _muon(weights, blocks, scale=1.0):
    group = {"params": weights, "kind": "muon", "lr": LR, "weight_decay": MUON_DECAY}
    optimizer = Muon([group], dict(zip(weights, blocks, strict=True)), MOMENTUM, scale)
    optimizer.param_groups[0].update(lr=LR, weight_decay=MUON_DECAY)
    return optimizer


def _weights(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def _gradients(weights, step):
    generator = torch.Generator().manual_seed(step + 1)
    return [torch.randn(w.shape, generator=generator) for w in weights]


def _slow_update(momentum):
    """Each singular value by itself through five iterations of the polynomial, in FP64."""
    left, values, right = torch.linalg.svd(momentum, full_matrices=False)
    values = values / momentum.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left * values @ right * 0.2 * max(momentum.shape) ** 0.5


def test_equals_a_slow_reference():
    """Wide, tall and three projections in one weight, and a convolution: four steps in FP32, to 1e-5 of a weight."""
    shapes, blocks = [(8, 24), (24, 8), (36, 12), (8, 4, 3, 3)], [1, 1, 3, 1]
    weights = _weights(*shapes)
    slow = [w.detach().double() for w in weights]
    momenta = [torch.zeros_like(w) for w in slow]
    optimizer = _muon(weights, blocks, scale=2.0)
    for step in range(4):
        for i, (w, gradient) in enumerate(zip(weights, _gradients(weights, step), strict=True)):
            w.grad = gradient.clone()
            momenta[i].lerp_(gradient.double(), 1 - MOMENTUM)
            ahead = gradient.double().lerp(momenta[i], MOMENTUM).view(len(w), -1).chunk(blocks[i])
            update = torch.cat([_slow_update(block) for block in ahead]).view_as(w)
            slow[i] = slow[i] * (1 - LR * MUON_DECAY) - LR * 2.0 * update
        optimizer.step()
    for w, expected in zip(weights, slow, strict=True):
        torch.testing.assert_close(w.detach().double(), expected, rtol=0, atol=1e-5)


def test_a_matrix_of_zeros_stays_one():
    assert not orthogonalized(torch.zeros(1, 3, 40)).any()


@pytest.mark.gpu
def test_a_gpu_s_products_are_close_enough():
    """TF32's 11 bits leave less than 1 % of an update (BF16's 8 bits leave 2 %)."""
    matrices = torch.stack(_weights((384, 1536), (384, 1536)))
    found = orthogonalized(matrices.cuda()).cpu()
    assert (found - orthogonalized(matrices)).norm() < 0.01 * found.norm()


def test_matrices_of_backbone_and_head_alone():
    of_block = {f"attn.{part}.weight" for part in ("qkv", "proj")} | {"mlp.fc1.weight", "mlp.fc2.weight"}
    expected = {f"backbone.blocks.{i}.{name}" for i in (0, 1) for name in of_block}
    network = tiny_network()
    groups = parameter_groups(network, OptimizerOptions(kind="muon"))
    found = {id(p) for group in groups if group["kind"] == "muon" for p in group["params"]}
    names = {name for name, p in network.named_parameters() if id(p) in found}
    assert names == expected | {f"head.mlp.{i}.weight" for i in (0, 2, 4)}


def test_projections_in_one_weight_are_apart_and_convolutions_matrices():
    """But for the first convolution, which reads pixels, and those that go by channel."""
    gated = matrices_of(nn.ModuleDict({"mlp": Mlp(8, 32, swiglu=True), "plain": Mlp(8, 32, swiglu=False)}))
    assert gated == {"mlp.fc1.weight": 2, "mlp.fc2.weight": 1, "plain.fc1.weight": 1, "plain.fc2.weight": 1}
    swin = matrices_of(timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1)))
    assert {name.rpartition(".blocks.0.")[2] for name, n in swin.items() if n > 1} == {"attn.qkv.weight"}
    dinov2 = matrices_of(timm.create_model("vit_giant_patch14_dinov2", embed_dim=32, num_heads=2, depth=1))
    several = {name: n for name, n in dinov2.items() if n > 1}
    assert several == {"blocks.0.attn.qkv.weight": 3, "blocks.0.mlp.fc1.weight": 2}
    convnext = matrices_of(timm.create_model("convnext_atto", num_classes=0, depths=(1, 0, 0, 0)))
    layers = {f"stages.0.blocks.0.mlp.fc{i}.weight" for i in (1, 2)}
    assert convnext.keys() == layers | {f"stages.{i}.downsample.1.weight" for i in (1, 2, 3)}


def test_nothing_to_orthogonalize():
    network = tiny_network()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(parameter.ndim == 1 or "prototypes" in name)
    with pytest.raises(ConfigError, match=r"^optimizer.kind muon .* trains none: set .* adamw$"):
        parameter_groups(network, OptimizerOptions(kind="muon"))

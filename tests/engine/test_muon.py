"""Muon against torch's own and a slow reference in FP64; which weights it moves; what ranks exchange."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from dino_ds.engine.muon import Matrix, Muon, matrices_of, orthogonalized, share_out
from dino_ds.engine.optim import parameter_groups
from dino_ds.errors import ConfigError
from dino_ds.models.blocks import Mlp
from tests.engine.harness import OPTIMIZERS, tiny_network
from tests.fake_cuda import CUDA, fake_cuda, needs_fake_cuda

LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95


def _muon(weights, blocks, scale=1.0):
    group = {"params": weights, "kind": "muon", "lr": LR, "weight_decay": DECAY}
    optimizer = Muon([group], dict(zip(weights, blocks, strict=True)), MOMENTUM, scale)
    optimizer.param_groups[0].update(lr=LR, weight_decay=DECAY)
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
            slow[i] = slow[i] * (1 - LR * DECAY) - LR * 2.0 * update
        optimizer.step()
    for w, expected in zip(weights, slow, strict=True):
        torch.testing.assert_close(w.detach().double(), expected, rtol=0, atol=1e-5)


def test_equals_torch_s_muon():
    """torch's iterates in BF16, whose 8 bits leave 2 % of an update; four updates of 0.2 times the rate: 4e-4."""
    ours, theirs = _weights((16, 48), (48, 16)), _weights((16, 48), (48, 16))
    optimizer = _muon(ours, [1, 1])
    reference = torch.optim.Muon(theirs, LR, DECAY, MOMENTUM, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for pair in (ours, theirs):
            for w, gradient in zip(pair, _gradients(pair, step), strict=True):
                w.grad = gradient.clone()
        optimizer.step()
        reference.step()
    for w, expected in zip(ours, theirs, strict=True):
        assert (w - expected).norm() < 0.03 * 4 * LR * 0.2 * w.numel() ** 0.5


@pytest.mark.parametrize("shape", [(5, 5), (3, 40), (1, 7)])
def test_singular_values_come_near_one(shape):
    """Those above a hundredth of the norm end between 0.68 and 1.21, and a matrix of zeros stays one."""
    matrices = torch.stack([_weights(shape)[0].detach(), torch.zeros(shape)])
    found, zero = orthogonalized(matrices * 1e-12)
    before, after = torch.linalg.svdvals(matrices[0]), torch.linalg.svdvals(found)
    strong = after[before / before.norm() > 0.01]
    assert len(strong) and float(strong.min()) > 0.68 and float(strong.max()) < 1.21
    assert not zero.any()


@pytest.mark.gpu
def test_a_gpu_s_products_are_close_enough():
    """TF32's 11 bits leave less than 1 % of an update (BF16's 8 bits leave 2 %)."""
    matrices = torch.stack(_weights((384, 1536), (384, 1536)))
    found = orthogonalized(matrices.cuda()).cpu()
    assert (found - orthogonalized(matrices)).norm() < 0.01 * found.norm()


def _names_of_muon(network):
    names = {id(p): name for name, p in network.named_parameters()}
    groups = parameter_groups(network, OPTIMIZERS["muon"])
    return {names[id(p)] for group in groups if group["kind"] == "muon" for p in group["params"]}


def test_matrices_of_backbone_and_head_alone():
    of_block = {f"attn.{part}.weight" for part in ("qkv", "proj")} | {"mlp.fc1.weight", "mlp.fc2.weight"}
    expected = {f"backbone.blocks.{i}.{name}" for i in (0, 1) for name in of_block}
    assert _names_of_muon(tiny_network()) == expected | {f"head.mlp.{i}.weight" for i in (0, 2, 4)}


def test_projections_in_one_weight_are_apart():
    gated = matrices_of(nn.ModuleDict({"mlp": Mlp(8, 32, swiglu=True), "plain": Mlp(8, 32, swiglu=False)}))
    assert gated == {"mlp.fc1.weight": 2, "mlp.fc2.weight": 1, "plain.fc1.weight": 1, "plain.fc2.weight": 1}
    swin = matrices_of(timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1)))
    assert {name.rpartition(".blocks.0.")[2] for name, n in swin.items() if n > 1} == {"attn.qkv.weight"}
    dinov2 = matrices_of(timm.create_model("vit_giant_patch14_dinov2", embed_dim=32, num_heads=2, depth=1))
    assert {name: n for name, n in dinov2.items() if n > 1} == {
        "blocks.0.attn.qkv.weight": 3,
        "blocks.0.mlp.fc1.weight": 2,
    }


def test_convolutions():
    """Not the first, which reads pixels, nor those that go by channel."""
    assert set(matrices_of(timm.create_model("convnext_atto", num_classes=0, depths=(1, 0, 0, 0)))) == {
        "stages.0.blocks.0.mlp.fc1.weight",
        "stages.0.blocks.0.mlp.fc2.weight",
    } | {f"stages.{i}.downsample.1.weight" for i in (1, 2, 3)}


def test_nothing_to_orthogonalize():
    network = tiny_network()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(parameter.ndim == 1 or "prototypes" in name)
    with pytest.raises(ConfigError, match=r"^optimizer.kind muon .* trains none: set .* adamw$"):
        parameter_groups(network, OPTIMIZERS["muon"])


@needs_fake_cuda
def test_launches_are_few():
    """Of ViT-S with DINO's head: 63 weights of 5 shapes, by 15 products and 6 other kernels a shape and 6 for all; its
    blocks alone, of 2 shapes, by fewer than 60."""
    blocks, head = [(1152, 384), (384, 384), (1536, 384), (384, 1536)] * 12, [(2048, 384), (2048, 2048), (256, 2048)]
    counts = []
    with fake_cuda() as gpu:
        for shapes in (blocks, blocks + head):
            weights = [nn.Parameter(torch.empty(shape, device=CUDA)) for shape in shapes]
            optimizer = _muon(weights, [3 if shape[0] == 1152 else 1 for shape in shapes])
            for w in weights:
                w.grad = torch.empty_like(w)
            optimizer.step()
            with gpu.part(f"{len(shapes)} weights"):
                optimizer.step()
            counts.append(sum(gpu.parts[f"{len(shapes)} weights"].kernels.values()))
    assert counts[0] < 60 and counts[1] <= 5 * 21 + 6


def test_ranks_share_the_work():
    """ViT-L's matrices on 8 ranks: the busiest has at most 5 % more than an eighth."""
    block = [Matrix(3072, 1024, 3), Matrix(1024, 1024), Matrix(4096, 1024), Matrix(1024, 4096)]
    matrices = block * 24
    owners = share_out(matrices, 8)
    loads = [sum(m.cost for m, owner in zip(matrices, owners, strict=True) if owner == rank) for rank in range(8)]
    assert max(loads) < 1.05 * sum(loads) / 8

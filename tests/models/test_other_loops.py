"""Our networks in other people's training loops: whole ones, and losses against plain operators.

Tolerances, relative to the largest value: FP32 sums in another order 1e-5; values rounded to bf16 or fp16, at other
places than plain operators round them, a few units of 2^-8 or 2^-11.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dino_ds.basics.seeds import sample_keys
from dino_ds.method.gram import tiled_gram_loss
from dino_ds.models import batch_norm
from dino_ds.models.base import CLS
from dino_ds.models.prototypes import Comparison, Logits, Prototypes
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.vit import VisionTransformer
from tests.ranks import run_on_ranks
from tests.sample import sampled


def _tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _compared(rows: Tensor, weight: Tensor) -> Tensor:
    """The cross-entropy of the prototypes with targets that are given, by plain operators, in FP32 as ours."""
    with torch.autocast("cpu", enabled=False):
        teacher = _teacher().float()
        logits = F.normalize(rows.float(), dim=-1) @ F.normalize(weight.float(), dim=-1).t() / 0.1
        return -(teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


def _teacher() -> Tensor:
    return _tokens(6, 10, seed=7)


def _tiled(rows: Tensor, weight: Tensor) -> Tensor:
    prototypes: Any = Prototypes(4, 10)
    del prototypes.weight
    prototypes.weight = weight  # not a parameter: its gradient is asked for
    identity = Logits(_teacher(), torch.eye(10), torch.ones(10))
    found: Any = prototypes(rows, Comparison(identity, torch.zeros(10), 1.0, 0.1))
    return found.loss


def _gram(x: Tensor, y: Tensor) -> Tensor:
    a, b = (F.normalize(rows.float(), dim=-1) for rows in (x, y.detach()))
    return (a @ a.mT - b @ b.mT).square().mean()


Function = Callable[..., Any]
FUNCTIONS: dict[str, tuple[Function, Function, tuple[tuple[int, ...], ...]]] = {
    "prototypes": (_tiled, _compared, ((6, 4), (10, 4))),
    "Gram": (tiled_gram_loss, _gram, ((2, 5, 8), (2, 5, 4))),
}
LOW = {"autocast": 2e-2, "autocast of the forward alone": 2e-2, "bf16": 4e-2, "fp16": 5e-3}
MODES = ("plain", "autocast", "autocast of the forward alone", "bf16", "fp16", "recomputed", "recomputed in autocast")


def _run(function: Function, given: Sequence[Tensor], mode: str, *of: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and the gradients of what is given, or of the tensors `of`, as a loop of that kind has them."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode, torch.float32)
    given = [tensor.to(dtype, copy=True).requires_grad_() for tensor in given]
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in mode):
        out = checkpoint(function, *given, use_reentrant=False) if "recomputed" in mode else function(*given)
        outs = [out] if isinstance(out, Tensor) else list(out)
        loss = sum((o.float() * _tokens(*o.shape, seed=3)).sum() for o in outs)
        assert isinstance(loss, Tensor)
        if mode == "autocast":
            loss.backward()
    if mode != "autocast":
        loss.backward()
    gradients = [torch.zeros(()) if t.grad is None else t.grad.float() for t in of or given]
    return [o.detach().float() for o in outs], gradients


def _close(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize(
    ("name", "mode"),
    sampled(itertools.product(FUNCTIONS, MODES), lambda cell: (cell[1], (cell[0], "autocast" in cell[1]))),
)
def test_our_functions_are_plain_operators(name, mode):
    ours, plain, shapes = FUNCTIONS[name]
    given = [_tokens(*shape, seed=i) for i, shape in enumerate(shapes)]
    for found, wanted in zip(_run(ours, given, mode), _run(plain, given, mode), strict=True):
        _close(found, wanted, LOW.get(mode, 2e-2 if "autocast" in mode else 1e-5))
    with torch.no_grad():
        _close(*([o] if isinstance(o := f(*given), Tensor) else list(o) for f in (ours, plain)), 1e-5)


ARCHS = {
    "plain": ViTSpec(8, 32, 2, 2),
    "registers, LayerScale, SwiGLU": ViTSpec(8, 32, 2, 2, layer_scale=0.5, registers=3, swiglu=True, mlp_ratio=5.0),
    "rotary": ViTSpec(8, 32, 2, 2, layer_scale=0.5, registers=2, rope="separate", swiglu=True, mlp_ratio=5.0),
}
IMAGES = _tokens(4, 3, 32, 32)


def _vit(name: str, drop_path: float = 0.0) -> VisionTransformer:
    torch.manual_seed(0)
    vit = VisionTransformer(ARCHS[name], 32, BackboneOptions(drop_path=drop_path))
    for parameter in vit.parameters():
        nn.init.normal_(parameter, std=0.2)
    return vit


def _gradients(vit: nn.Module, mode: str) -> list[Tensor]:
    """Features and the gradients of all parameters, as a loop of that kind has them."""
    keys = sample_keys(0, 0, torch.arange(len(IMAGES)))
    outputs, gradients = _run(lambda x: vit({"a": [x]}, keys)[CLS], [IMAGES], mode, *vit.parameters())
    return [*outputs, *gradients]


LOOPS = [*MODES, "deepcopy", "compiled"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), sampled(itertools.product(ARCHS, LOOPS)))
def test_a_network_of_ours_in_any_loop(name, mode):
    """Features and gradients are those of FP32, stochastic depth included; so are features without gradients."""
    wanted, vit = _gradients(_vit(name, 0.5), "plain"), _vit(name, 0.5)
    vit = copy.deepcopy(vit) if mode == "deepcopy" else vit.to({"bf16": torch.bfloat16, "fp16": torch.half}.get(mode))
    called: Any = torch.compile(vit, backend="aot_eager") if "compiled" in mode else vit
    _close(_gradients(called, mode), wanted, LOW.get(mode, 0.1 if "autocast" in mode else 1e-5) * 4)
    with torch.no_grad():
        _close([vit.float().features(IMAGES)], [_vit(name).features(IMAGES)], 0.05 if mode in LOW else 1e-5)


def _on_rank(rank_mode: str) -> list[Tensor]:
    """The gradients that DDP gives a rank of its half of the images, a BatchNorm of ours behind the network."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    norm = batch_norm.BatchNorm(6)
    norm.synced = True
    model = DistributedDataParallel(nn.Sequential(nn.Conv2d(3, 6, 8, 8), norm))
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in rank_mode):
        out = model(IMAGES[2 * rank : 2 * rank + 2])
    (out.float() * _tokens(4, 6, 4, 4, seed=5)[2 * rank : 2 * rank + 2]).sum().backward()
    vit = DistributedDataParallel(_vit("rotary"))
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in rank_mode):
        features = vit({"a": [IMAGES[2 * rank : 2 * rank + 2]]})[CLS]
    (features.float() * _tokens(4, 32, seed=3)[2 * rank : 2 * rank + 2]).sum().backward()
    return [p.grad for part in (model, vit) for p in part.parameters() if p.grad is not None]


@pytest.mark.parametrize("mode", ["plain", "autocast of the forward alone"])
def test_in_ddp(mode):
    """Half the sum over all images, as torch's DDP gives the mean over ranks; BatchNorm's statistics are of both."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Conv2d(3, 6, 8, 8), nn.BatchNorm2d(6))
    (alone(IMAGES) * _tokens(4, 6, 4, 4, seed=5)).sum().backward()
    wanted = [p.grad / 2 for p in alone.parameters() if p.grad is not None]
    wanted += [gradient / 2 for gradient in _gradients(_vit("rotary"), "plain")[1:]]
    for found in run_on_ranks(_on_rank, mode):
        _close(found, wanted, 0.1 if "autocast" in mode else 1e-5)

"""The projection head: MLP, L2 normalisation, prototypes of unit length.

Source: facebookresearch/dino `DINOHead`; its `weight_norm` layer with g = 1 is `Prototypes` here, because torch's
weight_norm can't be deep-copied and sees no weights under ZeRO 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dino_ds.models.base import CLS
from dino_ds.models.weights import init_weights

# Prototypes whose gradient is made at a time: 16 MiB at a bottleneck of 256.
_BLOCK = 16384


class Prototypes(nn.Module):
    """Cosines between bottleneck features and k prototypes, in FP32 whatever the engine's precision.

    While `frozen`, the weight takes part with a gradient of exactly zero: ZeRO 3 would repeat an old gradient for a
    parameter that gets none, and the frozen gradient must not enter the clipping norm.
    """

    def __init__(self, bottleneck: int, prototypes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(prototypes, bottleneck))
        self.frozen = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # The reference leaves this layer to torch's default for Linear. Only directions count, but the length of the
        # rows sets how far one step of Adam turns them.
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, z: Tensor) -> Tensor:
        """z (b, bottleneck) of any length -> cosines (b, k), FP32."""
        low = self.weight.dtype != torch.float32 or torch.is_autocast_enabled(z.device.type)
        with torch.autocast(z.device.type, enabled=False):
            return _Cosines.apply(F.normalize(z.float(), dim=-1), self.weight, self.frozen, low)


class _Cosines(torch.autograd.Function):
    """Unit rows z (b, c) and prototypes of any length (k, c) -> cosines (b, k).

    The lengths divide the product, not the weights: no normalised copy of (k, c) is made, kept or differentiated
    through. With g' = g / |w|:  dz = g' w,  dw = g'^T z - w (w . g'^T z) / |w|^2, a block of prototypes at a time, so
    that there is no second (b, k) either. `low`: that the engine computes in bf16 or fp16; see `_tf32`.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, frozen: bool, low: bool) -> Tensor:
        w = weight.float()
        inverse = torch.linalg.vector_norm(w, dim=-1).clamp_min(1e-12).reciprocal()
        ctx.save_for_backward(z, weight, inverse)
        ctx.frozen, ctx.low = frozen, low
        with _tf32(low):
            return (z @ w.t()).mul_(inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        z, weight, inverse = ctx.saved_tensors
        grad_z = torch.zeros_like(z)
        make = torch.zeros if ctx.frozen else torch.empty
        grad_weight = make(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, len(weight), _BLOCK):
            block = slice(start, start + _BLOCK)
            w = weight[block].float()
            grad = grad_outputs[0][:, block] * inverse[block]
            with _tf32(ctx.low):
                grad_z.addmm_(grad, w)
                product = None if ctx.frozen else torch.mm(grad.t(), z, out=grad_weight[block])
            if product is not None:
                along = (product * w).sum(dim=-1, keepdim=True) * inverse[block].square().unsqueeze(-1)
                product.addcmul_(w, along, value=-1)
        return grad_z, grad_weight.to(weight.dtype), None, None


@contextmanager
def _tf32(wanted: bool) -> Iterator[None]:
    """FP32 products of a GPU in TF32, which rounds them less than bf16 and fp16 do.

    Only inside: the switch is the whole process's, evaluations want FP32, and compilers of some versions of torch ask
    for it by its older name, which refuses to answer while it is switched by this one (pytorch issue 166387).
    """
    if not wanted:
        yield
        return
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


class DinoHead(nn.Module):
    """Backbone features (b, width) -> logits (b, prototypes): cosines in [-1, 1], before any temperature.

    `reads` names the feature of the backbone that is its input.
    """

    reads = CLS

    def __init__(self, width: int, hidden: int, bottleneck: int, prototypes: int, layers: int) -> None:
        super().__init__()
        sizes = [width] + [hidden] * (layers - 1) + [bottleneck]
        modules: list[nn.Module] = []
        for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
            if i:
                modules.append(nn.GELU())
            modules.append(nn.Linear(n_in, n_out))
        self.mlp = nn.Sequential(*modules)
        self.prototypes = Prototypes(bottleneck, prototypes)
        init_weights(self)

    def forward(self, features: Tensor) -> Tensor:
        """features (b, width) -> logits (b, k), FP32."""
        return self.prototypes(self.mlp(features))

"""The projection head: MLP, L2 normalisation, prototypes of unit length.

Source: facebookresearch/dino `DINOHead`; its `weight_norm` layer with g = 1 is `Prototypes` here, because torch's
weight_norm can't be deep-copied and sees no weights under ZeRO 3.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dino_ds.models.weights import draw

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
        with torch.autocast(z.device.type, enabled=False):
            return _Cosines.apply(F.normalize(z.float(), dim=-1), self.weight, self.frozen)


class _Cosines(torch.autograd.Function):
    """Unit rows z (b, c) and prototypes of any length (k, c) -> cosines (b, k).

    The lengths divide the product, not the weights: no normalised copy of (k, c) is made, kept or differentiated
    through. With g' = g / |w|:  dz = g' w,  dw = g'^T z - w (w . g'^T z) / |w|^2, a block of prototypes at a time, so
    that there is no second (b, k) either.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, frozen: bool) -> Tensor:
        w = weight.float()
        inverse = torch.linalg.vector_norm(w, dim=-1).clamp_min(1e-12).reciprocal()
        ctx.save_for_backward(z, weight, inverse)
        ctx.frozen = frozen
        return (z @ w.t()).mul_(inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        z, weight, inverse = ctx.saved_tensors
        grad_z = torch.zeros_like(z)
        make = torch.zeros if ctx.frozen else torch.empty
        grad_weight = make(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, len(weight), _BLOCK):
            block = slice(start, start + _BLOCK)
            w = weight[block].float()
            grad = grad_outputs[0][:, block] * inverse[block]
            grad_z.addmm_(grad, w)
            if not ctx.frozen:
                product = torch.mm(grad.t(), z, out=grad_weight[block])
                along = (product * w).sum(dim=-1, keepdim=True) * inverse[block].square().unsqueeze(-1)
                product.addcmul_(w, along, value=-1)
        return grad_z, grad_weight.to(weight.dtype), None


class DinoHead(nn.Module):
    """Backbone features (b, width) -> logits (b, prototypes): cosines in [-1, 1], before any temperature."""

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
        draw(self)

    def forward(self, features: Tensor) -> Tensor:
        """features (b, width) -> logits (b, k), FP32."""
        return self.prototypes(self.mlp(features))

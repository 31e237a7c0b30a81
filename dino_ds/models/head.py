"""The projection head: MLP, L2 normalisation, prototypes of unit length.

Source: facebookresearch/dino `DINOHead`; its `weight_norm` layer with g = 1 is `Prototypes` here, because torch's
weight_norm can't be deep-copied and sees no weights under ZeRO 3.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Prototypes(nn.Module):
    """Cosines between bottleneck features and k prototypes, in FP32 whatever the engine's precision.

    While `frozen`, the weight takes part with a gradient of exactly zero: ZeRO 3 would repeat an old gradient for a
    parameter that gets none, and the frozen gradient must not enter the clipping norm.
    """

    def __init__(self, bottleneck: int, prototypes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(prototypes, bottleneck))
        self.frozen = False
        # The reference leaves this layer to torch's default for Linear. Only directions count, but the length of the
        # rows sets how far one step of Adam turns them.
        bound = bottleneck**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, z: Tensor) -> Tensor:
        """z (b, bottleneck) of any length -> cosines (b, k), FP32."""
        with torch.autocast(z.device.type, enabled=False):
            weight = self.weight.float()
            if self.frozen:
                weight = weight.detach()
            out = F.linear(F.normalize(z.float(), dim=-1), F.normalize(weight, dim=-1))
            return out + 0.0 * self.weight.float().sum() if self.frozen and self.training else out


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
        for module in self.mlp:
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, features: Tensor) -> Tensor:
        """features (b, width) -> logits (b, k), FP32."""
        return self.prototypes(self.mlp(features))

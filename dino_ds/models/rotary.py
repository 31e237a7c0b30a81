"""The Transformer block of ViTs with rotary positions, with the parameter names of DINOv3 in timm's Eva."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dino_ds.models.attention import Attention
from dino_ds.models.blocks import ActivatedLinear, Block, BlockNorm, Mlp, norm_layer
from dino_ds.models.drop_path import Kept
from dino_ds.models.packing import MadeOnce, Packing, Selection
from dino_ds.models.residual import add_branch
from dino_ds.models.rope import rotate
from dino_ds.models.specs.backbones import ViTSpec


class RotaryAttention(Attention):
    """Attention that rotates queries and keys by their patch's position. Only queries and values may have a bias."""

    def __init__(self, arch: ViTSpec, implementation: str) -> None:
        super().__init__(arch.width, arch.heads, implementation, bias=False)
        width = arch.width
        self._zeros = MadeOnce()
        self.q_bias = nn.Parameter(torch.zeros(width)) if arch.qkv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(width)) if arch.qkv_bias else None

    def reset_parameters(self) -> None:
        for bias in (self.q_bias, self.v_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def qkv_bias(self) -> Tensor | None:
        if self.q_bias is None or self.v_bias is None:
            return None
        bias = self.v_bias
        zeros = self._zeros.of((bias.dtype, bias.device), lambda: torch.zeros_like(bias))
        return torch.cat((self.q_bias, zeros, bias))

    def projected(
        self, x: Tensor, packing: Packing, selection: Selection | None, tables: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        if selection is None:
            (projected,) = self.qkv(x, None, self.qkv_bias())
            return (rotate(projected, packing.groups, tables, (2, 3), self.heads),)
        queries, others = self.qkv(x, selection.rows, self.qkv_bias())
        queries = rotate(queries, selection.packing.groups, tables, (1, 1), self.heads)
        return queries, rotate(others, packing.groups, tables, (1, 2), self.heads)


class GatedMlp(nn.Module):
    """SwiGLU with gate and value from two linear layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1_g = nn.Linear(width, hidden)
        self.fc1_x = nn.Linear(width, hidden)
        self.fc2 = ActivatedLinear(hidden, width, swiglu=True)

    def forward(self, x: Tensor) -> Tensor:
        """x (tokens, d) -> (tokens, d)."""
        out: Tensor = self.fc2(self.fc1_g(x), self.fc1_x(x))
        return out


class RotaryBlock(Block):
    """A block whose LayerScale is in its own parameters: `gamma_1` of the attention, `gamma_2` of the MLP."""

    def __init__(self, arch: ViTSpec, attention: str) -> None:
        nn.Module.__init__(self)
        self._layer_scale = arch.layer_scale or 0.0
        self.gamma_1 = nn.Parameter(torch.empty(arch.width)) if arch.layer_scale is not None else None
        self.gamma_2 = nn.Parameter(torch.empty(arch.width)) if arch.layer_scale is not None else None
        self.norm1 = norm_layer(arch, BlockNorm)
        self.attn = RotaryAttention(arch, attention)
        self.norm2 = norm_layer(arch, BlockNorm)
        hidden = arch.mlp_widths[1]
        self.mlp = GatedMlp(arch.width, hidden) if arch.swiglu else Mlp(arch.width, hidden, swiglu=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for gamma in (self.gamma_1, self.gamma_2):
            if gamma is not None:
                nn.init.constant_(gamma, self._layer_scale)

    def add1(self, x: Tensor, branch: Tensor, drop: Tensor | Kept | None = None) -> Tensor:
        return add_branch(x, branch, self.gamma_1, drop)

    def add2(self, x: Tensor, branch: Tensor, drop: Tensor | Kept | None = None) -> Tensor:
        return add_branch(x, branch, self.gamma_2, drop)

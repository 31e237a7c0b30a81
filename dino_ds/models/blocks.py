"""The Transformer blocks, with learned or rotary positions, over packed tokens: sequences of several lengths in one
(tokens, width) matrix. Those with rotary positions have the parameter names of DINOv3 in timm's Eva."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_ds.models.attention import Attention
from dino_ds.models.drop_path import Kept, LayerScale, add_branch, sum_kept
from dino_ds.models.fused import fused, fuses_in_block
from dino_ds.models.packing import MadeOnce, Packing, Selection
from dino_ds.models.positions import rotate
from dino_ds.models.specs.backbones import ViTSpec


class Block(nn.Module):
    """The block of ViTs with learned positions; `RotaryBlock` has other parts."""

    def __init__(self, arch: ViTSpec, attention: str) -> None:
        super().__init__()
        width = arch.width
        self.norm1 = norm_layer(arch, BlockNorm)
        self.attn = Attention(width, arch.heads, attention)
        self.ls1 = nn.Identity() if arch.layer_scale is None else LayerScale(width, arch.layer_scale)
        self.norm2 = norm_layer(arch, BlockNorm)
        self.mlp: nn.Module = Mlp(width, arch.mlp_widths[0], arch.swiglu)
        self.ls2 = nn.Identity() if arch.layer_scale is None else LayerScale(width, arch.layer_scale)

    def forward(
        self,
        x: Tensor,
        packing: Packing,
        drop: Tensor | list[Kept] | None = None,
        selection: Selection | None = None,
        tables: Sequence[Tensor] = (),
    ) -> Tensor:
        """x (tokens, d) -> (tokens, d), or (selected rows, d) with a selection; keys and values come from all tokens.
        drop: stochastic depth of the two residual branches: scales (2, rows of the result, 1), or the sequences for
        which each branch is computed, or None. tables: RoPE's, one per crop size."""
        if isinstance(drop, list):
            of_attention, of_mlp = drop
            rows, x = _gather(x, of_attention.rows, of_attention.inverse if of_attention.selection is None else None)
            branch = self.attn(self.norm1(rows), of_attention.packing, of_attention.selection, tables)
            x = self.add(0, _selected(x, selection), branch, of_attention)
            rows, x = _gather(x, of_mlp.places, of_mlp.inverse)
            return self.add(1, x, self.mlp(self.norm2(rows)), of_mlp)
        first, second = (None, None) if drop is None else drop
        branch = self.attn(self.norm1(x), packing, selection, tables)
        x = self.add(0, _selected(x, selection), branch, first)
        return self.add(1, x, self.mlp(self.norm2(x)), second)

    @property
    def gammas(self) -> tuple[Tensor | None, ...]:
        """LayerScale's factors of the two branches, or None; not read under ZeRO 3, which partitions them."""
        return tuple(scale.gamma if isinstance(scale, LayerScale) else None for scale in (self.ls1, self.ls2))

    def add(self, i: int, x: Tensor, branch: Tensor, drop: Tensor | Kept | None) -> Tensor:
        """x plus the branch of the attention (i = 0) or of the MLP (i = 1), by `add_branch`."""
        scale = self.ls2 if i else self.ls1
        # LayerScale adds inside its own forward: only around it does ZeRO 3 gather gamma.
        return scale(x, branch, drop) if isinstance(scale, LayerScale) else add_branch(x, branch, None, drop)


def run_fused(
    blocks: Sequence[Block], x: Tensor, packing: Packing, selection: Selection | None, tables: Sequence[list[Tensor]]
) -> Tensor:
    """All blocks in turn, without gradients: each residual sum is one kernel with the norm after it, also where
    that is the next block's. selection: rows that the last block returns; tables: RoPE's, of each block."""
    normed = blocks[0].norm1(x)
    for i, block in enumerate(blocks):
        rows = selection if i == len(blocks) - 1 else None
        branch = block.attn(normed, packing, rows, tables[i])
        of_attention, of_mlp = block.gammas
        x, normed = _sum_and_norm(block.norm2, _selected(x, rows), branch, of_attention)
        branch = block.mlp(normed)
        if i + 1 < len(blocks):
            x, normed = _sum_and_norm(blocks[i + 1].norm1, x, branch, of_mlp)
    return add_branch(x, branch, of_mlp, None)


def _sum_and_norm(norm: nn.Module, x: Tensor, branch: Tensor, gamma: Tensor | None) -> tuple[Tensor, Tensor]:
    if fuses_sums(norm, branch):
        return _summed_and_normed(x, branch, gamma, norm.weight, norm.bias, norm.eps)
    x = add_branch(x, branch, gamma, None)
    return x, norm(x)


def _gather(x: Tensor, rows: Tensor, inverse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the given rows of x, and x itself for the residual path; inverse: as in `Kept`. torch.compile adds the two
    gradients in one pass by itself."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return x.index_select(0, rows), x
    return _Gather.apply(x, rows, inverse if fuses_in_block(x) else None)


class _Gather(torch.autograd.Function):
    """Its backward pass adds the gradient of the rows to that of x without a tensor of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, inverse: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, inverse)
        return x.index_select(0, rows), x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        rows, inverse = ctx.saved_tensors
        of_rows, of_x = grad_outputs
        if inverse is not None:
            return sum_kept(of_x, of_rows, None, None, inverse), None, None
        return of_x.index_add(0, rows, of_rows), None, None


def _selected(x: Tensor, selection: Selection | None) -> Tensor:
    return x if selection is None else x.index_select(0, selection.rows)


class RotaryBlock(Block):
    """A block whose LayerScale is in its own parameters: `gamma_1` of the attention, `gamma_2` of the MLP."""

    def __init__(self, arch: ViTSpec, attention: str) -> None:
        nn.Module.__init__(self)
        self._layer_scale, scaled = arch.layer_scale or 0.0, arch.layer_scale is not None
        self.gamma_1 = nn.Parameter(torch.empty(arch.width)) if scaled else None
        self.gamma_2 = nn.Parameter(torch.empty(arch.width)) if scaled else None
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

    @property
    def gammas(self) -> tuple[Tensor | None, ...]:
        return self.gamma_1, self.gamma_2

    def add(self, i: int, x: Tensor, branch: Tensor, drop: Tensor | Kept | None) -> Tensor:
        return add_branch(x, branch, self.gamma_2 if i else self.gamma_1, drop)


class RotaryAttention(Attention):
    """Attention that rotates queries and keys by their patch's position. Only queries and values may have a bias."""

    def __init__(self, arch: ViTSpec, implementation: str) -> None:
        super().__init__(arch.width, arch.heads, implementation, bias=False)
        width = arch.width
        self._zeros = MadeOnce()
        self.q_bias = nn.Parameter(torch.zeros(width)) if arch.qkv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(width)) if arch.qkv_bias else None
        self._kept_bias: Tensor | None = None

    def reset_parameters(self) -> None:
        for bias in (self.q_bias, self.v_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def _qkv_bias(self) -> Tensor | None:
        if self.q_bias is None or self.v_bias is None or self._kept_bias is not None:
            return self._kept_bias
        bias = self.v_bias
        zeros = self._zeros.of((bias.dtype, bias.device), lambda: torch.zeros_like(bias))
        return torch.cat((self.q_bias, zeros, bias))

    def keep_bias(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Use one bias of this dtype from now on; returns its parts and what the caller copies into them."""
        if self.q_bias is None or self.v_bias is None:
            return []
        self._kept_bias = self.q_bias.new_zeros(3, len(self.q_bias), dtype=dtype).flatten()
        parts = self._kept_bias.chunk(3)
        return [(parts[0], self.q_bias.data), (parts[2], self.v_bias.data)]

    def projected(
        self, x: Tensor, packing: Packing, selection: Selection | None, tables: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        if selection is None:
            (projected,) = self.qkv(x, None, self._qkv_bias())
            return (rotate(projected, packing.groups, tables, (2, 3), self.heads),)
        queries, others = self.qkv(x, selection.rows, self._qkv_bias())
        queries = rotate(queries, selection.packing.groups, tables, (1, 1), self.heads)
        return queries, rotate(others, packing.groups, tables, (1, 2), self.heads)


class PatchProjection(nn.Conv2d):
    """The convolution that embeds patches, as one matrix product: its windows do not overlap. Exact in FP32, where
    cuDNN's convolutions take TF32 unless told otherwise. A subclass, as ZeRO 3 gathers a parameter around its module's
    forward."""

    def forward(self, images: Tensor) -> Tensor:
        """Images (b, c, h, w) -> (b, patches, d); what does not fill a patch at the edges is left out."""
        side, low = self.kernel_size[0], torch.is_autocast_enabled(images.device.type)
        rows, columns = images.shape[-2] // side, images.shape[-1] // side
        windows = images[..., : rows * side, : columns * side].unflatten(3, (columns, side)).unflatten(2, (rows, side))
        dtype = torch.get_autocast_dtype(images.device.type) if low else self.weight.dtype
        # Cut and cast in one pass; without the memory format the copy would keep the order of the image.
        patches = windows.permute(0, 2, 4, 1, 3, 5).to(dtype, memory_format=torch.contiguous_format)
        # Two dimensions: with three, DeepSpeed's own linear at ZeRO 3 adds the bias after rounding.
        embedded = F.linear(patches.flatten(3).flatten(0, 2), self.weight.flatten(1), self.bias)
        return embedded.view(images.shape[0], rows * columns, -1)


def norm_layer(arch: ViTSpec, layer_norm: type[nn.LayerNorm] = nn.LayerNorm) -> nn.Module:
    return (nn.RMSNorm if arch.rms_norm else layer_norm)(arch.width, eps=arch.norm_eps)


class BlockNorm(nn.LayerNorm):
    """LayerNorm that a teacher on a GPU computes in one kernel with the cast of its FP32 result to autocast's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        if not fuses_sums(self, x):
            return super().forward(x)
        return _normed(x, self.weight, self.bias, self.eps, torch.get_autocast_dtype(x.device.type))


def fuses_sums(norm: nn.Module, x: Tensor) -> bool:
    """Whether this norm of x, and a sum before it, is one kernel: in a teacher on a GPU, under autocast."""
    low = isinstance(norm, BlockNorm) and torch.is_autocast_enabled(x.device.type)
    return low and not torch.is_grad_enabled() and fuses_in_block(x)


@fused(kernels=1, x=2)
def _normed(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(dtype)


@fused(kernels=1, x=2, branch=2)
def _summed_and_normed(
    x: Tensor, branch: Tensor, gamma: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x = x + (branch if gamma is None else branch * gamma)
    return x, F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(branch.dtype)


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, swiglu: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = ActivatedLinear(hidden // 2 if swiglu else hidden, width, swiglu)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x))


class GatedMlp(nn.Module):
    """SwiGLU with gate and value from two linear layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1_g = nn.Linear(width, hidden)
        self.fc1_x = nn.Linear(width, hidden)
        self.fc2 = ActivatedLinear(hidden, width, swiglu=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1_g(x), self.fc1_x(x))


class ActivatedLinear(nn.Linear):
    """linear(GELU(x)) or linear(SwiGLU(x)) that keeps only x for the backward pass and recomputes the activation there.
    This saves an eighth of a block's tensors, for one more pass over x. torch.compile itself decides what to keep."""

    def __init__(self, n_in: int, n_out: int, swiglu: bool) -> None:
        super().__init__(n_in, n_out)
        self.swiglu = swiglu

    def forward(self, x: Tensor, value: Tensor | None = None) -> Tensor:
        """x (tokens, n_in) -> (tokens, n_out). SwiGLU: x is the gate, or without `value` both, (tokens, 2 n_in)."""
        return self.activated_linear(x, value, self.weight, self.bias)

    def activated_linear(self, x: Tensor, value: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return F.linear(_activate(x, value, self.swiglu), weight, bias)
        return _ActivatedLinear.apply(x, weight, bias, value, self.swiglu)


class _ActivatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, value: Tensor | None, swiglu: bool) -> Tensor:
        ctx.save_for_backward(x, value, weight)
        ctx.swiglu = swiglu
        return F.linear(_activate(x, value, swiglu), weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, value, weight) = grad_outputs, ctx.saved_tensors
        # The weight gradient comes first: only it needs the activation.
        of_weight, of_bias = ctx.needs_input_grad[1:3]
        grad_weight = grad.t() @ _activate(x, value, ctx.swiglu).to(grad.dtype) if of_weight else None
        grads = grad_weight, grad.sum(dim=0) if of_bias else None
        # If autocast was on in the forward pass alone, the gradient has autocast's dtype, and the weight its own.
        inner = (grad @ weight.to(grad.dtype)).to(x.dtype)
        if not ctx.swiglu:
            return torch.ops.aten.gelu_backward(inner, x), *grads, None, None
        if value is not None:
            grad_value = inner * F.silu(x)
            return torch.ops.aten.silu_backward(inner.mul_(value), x), *grads, grad_value, None
        gate, value = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        torch.mul(inner, F.silu(gate), out=grad_x[:, inner.shape[1] :])
        grad_x[:, : inner.shape[1]] = torch.ops.aten.silu_backward(inner.mul_(value), gate)
        return grad_x, *grads, None, None


def _activate(x: Tensor, value: Tensor | None, swiglu: bool) -> Tensor:
    if not swiglu:
        return F.gelu(x)
    gate, value = x.chunk(2, dim=-1) if value is None else (x, value)
    return F.silu(gate) * value

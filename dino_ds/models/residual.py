"""Adds a residual branch, scaled by LayerScale and by stochastic depth, to all rows or to those of kept sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dino_ds.models.drop_path import Kept
from dino_ds.models.fused import fused, fuses_in_block


class LayerScale(nn.Module):
    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.gamma = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.initial)

    def forward(self, x: Tensor, branch: Tensor, drop: Tensor | Kept | None) -> Tensor:
        """See `add_branch`."""
        return add_branch(x, branch, self.gamma, drop)


def add_branch(x: Tensor, branch: Tensor, gamma: Tensor | None, drop: Tensor | Kept | None) -> Tensor:
    """Add `branch`, times gamma (d,) if given, to x (rows, d).

    drop: stochastic depth: None, or a scale for each row of the branch (rows, 1), or the sequences whose branch was
    computed, with scales that make up for the other sequences.
    """
    if (gamma is not None or drop is not None) and fuses_in_block(branch):
        scales, places = (drop.scales, (drop.places, drop.inverse)) if isinstance(drop, Kept) else (drop, (None, None))
        found: Tensor = _FusedAdd.apply(x, branch, gamma, scales, places)
        return found
    if gamma is not None:
        branch = branch * gamma
    if isinstance(drop, Kept):
        return _add_kept(x, branch, drop)
    return x + (branch if drop is None else branch * drop)


def _add_kept(x: Tensor, branch: Tensor, kept: Kept) -> Tensor:
    if torch.compiler.is_compiling():
        return x.index_add(0, kept.places, (branch * kept.scales).to(x.dtype))
    added: Tensor = _Add.apply(x, branch, kept.places, kept.scales)
    return added


class _Add(torch.autograd.Function):
    """`_add_kept` whose products with FP32 scales are rounded once, in the pass that computes them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, places: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(places, scales)
        ctx.dtype = branch.dtype
        return x.index_add(0, places, torch.mul(branch, scales, out=torch.empty_like(branch, dtype=x.dtype)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad,), (places, scales) = grad_outputs, ctx.saved_tensors
        return grad, grad.index_select(0, places).mul_(scales).to(ctx.dtype), None, None


class _FusedAdd(torch.autograd.Function):
    """`add_branch` on a GPU: all products are rounded once, with the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor,
        gamma: Tensor | None,
        scales: Tensor | None,
        kept: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        places, inverse = kept
        ctx.save_for_backward(branch if ctx.needs_input_grad[2] else None, gamma, scales, places)
        ctx.dtype = branch.dtype
        found: Tensor = (
            _sum(x, branch, gamma, scales) if inverse is None else sum_kept(x, branch, gamma, scales, inverse)
        )
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (branch, gamma, scales, places) = grad_outputs, ctx.saved_tensors
        of_branch, of_gamma = None, None
        if branch is not None:
            of_branch, of_gamma = _gradients(grad, branch, gamma, scales, places)
        elif ctx.needs_input_grad[1]:
            of_branch = _gradient(grad, gamma, scales, places, ctx.dtype)
        return grad, of_branch, of_gamma, None, None


@fused(kernels=1, x=2)
def _sum(x: Tensor, branch: Tensor, gamma: Tensor | None, scales: Tensor | None) -> Tensor:
    return x + _scaled(branch, gamma, scales)


@fused(kernels=1, x=2)
def sum_kept(x: Tensor, branch: Tensor, gamma: Tensor | None, scales: Tensor | None, inverse: Tensor) -> Tensor:
    """Add to row i of x (rows, d) the branch's row number inverse[i], or nothing if that is negative; GPU only."""
    rows = inverse.clamp(min=0)
    row_scales = None if scales is None else scales.index_select(0, rows)
    added = x + _scaled(branch.index_select(0, rows), gamma, row_scales)
    return torch.where(inverse.unsqueeze(-1) < 0, x, added.to(x.dtype))


@fused(kernels=1, grad=2)
def _gradient(
    grad: Tensor, gamma: Tensor | None, scales: Tensor | None, places: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The branch's gradient, (rows of the branch, d)."""
    return _scaled(_read(grad, places), gamma, scales).to(dtype)


@fused(kernels=3, grad=2, branch=2)
def _gradients(
    grad: Tensor, branch: Tensor, gamma: Tensor, scales: Tensor | None, places: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of the branch and of gamma."""
    rows = _scaled(_read(grad, places), None, scales)
    return (rows * gamma).to(branch.dtype), (rows * branch).sum(dim=0).to(gamma.dtype)


def _read(grad: Tensor, places: Tensor | None) -> Tensor:
    return grad if places is None else grad.index_select(0, places)


def _scaled(x: Tensor, gamma: Tensor | None, scales: Tensor | None) -> Tensor:
    x = x if gamma is None else x * gamma
    return x if scales is None else x * scales

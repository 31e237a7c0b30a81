"""Stochastic depth whose decisions follow from the image, and the residual branch that it and LayerScale scale. Whether
a crop skips a branch is a hash of (key of the image, view, block, branch): the same on any rank,
after a resume, in recomputation and, unless batched, in any micro-batch. Source: Huang et al. 2016 (arXiv
1603.09382); the rates grow linearly, as in facebookresearch/dino, or are all the same, as in
facebookresearch/dinov2."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dino_ds.basics.seeds import crop_seed, mix, shift_right
from dino_ds.models.fused import fused, fuses, fuses_in_block
from dino_ds.models.packing import MadeOnce, Packing, Selection


def step_key(seed: int, step: int) -> int:
    """One key below 2^63 for random choices that all images of a step share."""
    return crop_seed(seed, step, -1) >> 1  # -1: no image has this index


def drop_path_draws(keys: Tensor, views: int, blocks: int) -> Tensor:
    """keys (b,) -> (blocks, 2, views * b) FP64 in [0, 1): a hash of (key, view, block, branch)."""
    draws = torch.empty(2 * blocks, views, len(keys), dtype=torch.float64, device=keys.device)
    (_write_draws if fuses(keys) else _write_draws.function)(draws, keys)
    return draws.view(blocks, 2, -1)


@fused(kernels=1, draws=1)
def _write_draws(draws: Tensor, keys: Tensor) -> None:
    branches, views, _ = draws.shape
    view, branch = torch.arange(views, device=keys.device), torch.arange(branches, device=keys.device)
    rows = mix(keys + view.unsqueeze(1))
    hashed = mix(mix(rows ^ mix(branch).view(-1, 1, 1)))
    draws.copy_(shift_right(hashed, 11).to(torch.float64) * 2.0**-53)


def drop_path_scales(draws: Tensor, rates: tuple[float, float]) -> Tensor:
    """(blocks, 2, sequences) -> the same, FP32: 0 where a branch is dropped, 1 / (1 - rate) where it is kept. rates: of
    the first and of the last block; rates of the blocks between are interpolated linearly."""
    return (_scales_of if fuses(draws) else _scales_of.function)(draws, *rates)


@fused(kernels=1, draws=2)
def _scales_of(draws: Tensor, first: float, last: float) -> Tensor:
    # Made on the device: a list of rates would be a copy from the host in every step.
    blocks = len(draws)
    rate = torch.arange(blocks, device=draws.device, dtype=torch.float64) * ((last - first) / max(blocks - 1, 1))
    rate = (rate + first).view(-1, 1, 1)
    return ((draws >= rate) / (1 - rate)).float()


@dataclass(frozen=True)
class Kept:
    """The sequences whose branch is computed at all.

    rows: indices of all their tokens in the matrix of all sequences.
    packing: of `rows`; selection: among `rows`, if the block returns selected rows alone.
    places: indices, in the block's result, of the rows that the block returns for these sequences.
    scales: (rows, 1), for each of `places`: sequences of its size / kept sequences, so that the expected sum stays.
    inverse: for each row of the result its index in `places`, or -1; None unless functions are fused on a GPU.
    """

    rows: Tensor
    packing: Packing
    selection: Selection | None
    places: Tensor
    scales: Tensor
    inverse: Tensor | None = None


def kept_sequences(
    draws: Tensor,
    rates: tuple[float, float],
    packing: Packing,
    selection: Selection | None = None,
    made: MadeOnce | None = None,
) -> list[list[Kept]]:
    """Choose the sequences of batched stochastic depth: for each block and branch the share 1 - rate of each size. The
    others are not computed: the student's blocks cost (1 - mean rate). Unlike with `drop_path_scales`, the number of
    kept sequences does not vary, and which are kept depends on the micro-batch: those with the largest draws of each
    size. `selection`: the rows that the last block returns, `Packing.first_and_last`; `made`: a cache. Source:
    facebookresearch/dinov2 `drop_add_residual_stochastic_depth`, with the rates of `drop_path_scales`."""
    made = MadeOnce() if made is None else made
    orders, at, device = [], 0, draws.device
    for count, _ in packing.groups:  # of all blocks and branches at once
        orders.append(draws[..., at : at + count].argsort(dim=-1, descending=True))
        at += count
    rows, last = _rows(orders, packing), len(draws) - 1
    places = rows if selection is None else _rows([order[-1:] for order in orders], selection.packing)
    all_rates = [rates[0] + block * (rates[1] - rates[0]) / max(last, 1) for block in range(len(draws))]
    counts = [[max(1, round(count * (1 - rate))) for count, _ in packing.groups] for rate in all_rates]
    blocks: list[list[Kept]] = []
    for kept, equal in itertools.groupby(range(len(draws)), counts.__getitem__):
        sizes = [(n, tokens) for n, (_, tokens) in zip(kept, packing.groups, strict=True)]
        among = list(equal)  # blocks with equal counts share what follows
        packed, scales = made.of(("kept", *sizes, packing.groups, device), functools.partial(_kept, sizes, packing))
        read = _first(rows, kept, slice(among[0], among[-1] + 1))
        back = _inverse(read, packing)
        blocks += [
            [Kept(branch, packed, None, branch, scales, to) for branch, to in zip(block, inverse, strict=True)]
            for block, inverse in zip(read, back, strict=True)
        ]
    if selection is not None:
        kept_rows, tokens = _first(places, counts[last], slice(-1, None)), [n for _, n in selection.packing.groups]
        packed = blocks[last][0].packing
        chosen, scales = made.of(
            ("chosen", packed.groups, selection.packing.groups, device), lambda: _chosen(packed, tokens, packing)
        )
        ends = zip(blocks[last], kept_rows[0], _inverse(kept_rows, selection.packing)[0], strict=True)
        blocks[last] = [
            replace(kept, selection=chosen, places=where, scales=scales, inverse=to) for kept, where, to in ends
        ]
    return blocks


def _kept(sizes: list[tuple[int, int]], whole: Packing) -> tuple[Packing, Tensor]:
    packing = Packing.of(sizes, whole.bounds.device)
    return packing, _scales(whole, packing)


def _chosen(kept: Packing, tokens: list[int], whole: Packing) -> tuple[Selection, Tensor]:
    chosen = kept.first_and_last(tokens)
    return chosen, _scales(whole, chosen.packing)


def _inverse(places: Tensor, packing: Packing) -> Tensor | list[list[None]]:
    """Indices (blocks, 2, kept) of rows of a packing -> their inverse (blocks, 2, rows) int32, see `Kept`."""
    if not fuses(places):
        return [[None, None]] * len(places)
    rows = sum(count * tokens for count, tokens in packing.groups)
    order = torch.arange(places.shape[-1], dtype=torch.int32, device=places.device)
    inverse = order.new_full((*places.shape[:-1], rows), -1)
    return inverse.scatter_(-1, places, order.expand_as(places))


def _rows(orders: list[Tensor], packing: Packing) -> list[Tensor]:
    """Row indices of the tokens of sequences in `orders`, by size: (..., sequences) -> (..., sequences, tokens)."""
    rows, start = [], 0
    for order, (count, tokens) in zip(orders, packing.groups, strict=True):
        rows.append(order.unsqueeze(-1) * tokens + torch.arange(start, start + tokens, device=order.device))
        start += count * tokens
    return rows


def _first(rows: list[Tensor], counts: list[int], blocks: slice) -> Tensor:
    """The rows of the first `counts` sequences of each size, (blocks, 2, rows)."""
    return torch.cat([whole[blocks, :, :kept].flatten(2) for whole, kept in zip(rows, counts, strict=True)], dim=-1)


def _scales(whole: Packing, kept: Packing) -> Tensor:
    """For each row of `kept`, (rows, 1) FP32: number of sequences of its size in `whole` / number of kept ones."""
    rows = [((n * tokens, 1), count / n) for (count, _), (n, tokens) in zip(whole.groups, kept.groups, strict=True)]
    return torch.cat([whole.bounds.new_full(shape, scale, dtype=torch.float32) for shape, scale in rows])


class LayerScale(nn.Module):
    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.gamma = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.initial)

    def forward(self, x: Tensor, branch: Tensor, drop: Tensor | Kept | None) -> Tensor:
        return add_branch(x, branch, self.gamma, drop)


def add_branch(x: Tensor, branch: Tensor, gamma: Tensor | None, drop: Tensor | Kept | None) -> Tensor:
    """Add `branch`, times gamma (d,) if given, to x (rows, d). drop: stochastic depth: None, or a scale for each row of
    the branch (rows, 1), or the sequences whose branch was computed, with scales that make up for the others."""
    if (gamma is not None or drop is not None) and fuses_in_block(branch):
        scales, places = (drop.scales, (drop.places, drop.inverse)) if isinstance(drop, Kept) else (drop, (None, None))
        return _FusedAdd.apply(x, branch, gamma, scales, places)
    if gamma is not None:
        branch = branch * gamma
    if not isinstance(drop, Kept):
        return x + (branch if drop is None else branch * drop)
    if torch.compiler.is_compiling():
        return x.index_add(0, drop.places, (branch * drop.scales).to(x.dtype))
    return _Add.apply(x, branch, drop.places, drop.scales)


class _Add(torch.autograd.Function):
    """`add_branch` for `Kept` sequences: products with FP32 scales are rounded once, in the pass that computes them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, places: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(places, scales)
        ctx.dtype = branch.dtype
        return x.index_add(0, places, torch.mul(branch, scales, out=torch.empty_like(branch, dtype=x.dtype)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad,), (places, scales) = grad_outputs, ctx.saved_tensors
        return grad, grad.index_select(0, places).mul_(scales).to(ctx.dtype), None, None


class _FusedAdd(torch.autograd.Function):
    """`add_branch` on a GPU: all products are rounded once, with the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, gamma: Tensor | None, scales: Tensor | None, kept: Any) -> Tensor:
        places, inverse = kept
        ctx.save_for_backward(branch if ctx.needs_input_grad[2] else None, gamma, scales, places)
        ctx.dtype = branch.dtype
        if inverse is None:
            return _sum(x, branch, gamma, scales)
        return sum_kept(x, branch, gamma, scales, inverse)

    @staticmethod
    @torch.autograd.function.once_differentiable
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
    return _scaled(_read(grad, places), gamma, scales).to(dtype)


@fused(kernels=3, grad=2, branch=2)
def _gradients(
    grad: Tensor, branch: Tensor, gamma: Tensor, scales: Tensor | None, places: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows = _scaled(_read(grad, places), None, scales)
    return (rows * gamma).to(branch.dtype), (rows * branch).sum(dim=0).to(gamma.dtype)


def _read(grad: Tensor, places: Tensor | None) -> Tensor:
    return grad if places is None else grad.index_select(0, places)


def _scaled(x: Tensor, gamma: Tensor | None, scales: Tensor | None) -> Tensor:
    x = x if gamma is None else x * gamma
    return x if scales is None else x * scales

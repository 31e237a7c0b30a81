"""Stochastic depth whose decisions follow from the image, not from a generator's state.

Whether a crop skips a branch is a hash of (key of the image, view, block, branch): the same on any rank, for any
micro-batch, after a resume and in the recomputation of a checkpointed block, with no RNG state to save.
Source of the method: Huang et al. 2016 (arXiv 1603.09382); the rates grow linearly, as in facebookresearch/dino,
or are all the same, as in facebookresearch/dinov2.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dino_ds.basics.hashing import crop_seed, mix, shift_right
from dino_ds.models.fused import fused, fuses
from dino_ds.models.packing import MadeOnce, Packing, Selection


def sample_keys(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """One int64 key for each image of a batch: indices (b,) int64 on any device -> (b,) there."""
    base = mix(mix(torch.tensor(seed, dtype=torch.int64)) + epoch)
    return mix(base + indices)  # a CPU scalar is an argument of the kernel, not a copy to the device


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
    """Write draws (branches, views, b)."""
    branches, views, _ = draws.shape
    view, branch = torch.arange(views, device=keys.device), torch.arange(branches, device=keys.device)
    rows = mix(keys + view.unsqueeze(1))
    hashed = mix(mix(rows ^ mix(branch).view(-1, 1, 1)))
    draws.copy_(shift_right(hashed, 11).to(torch.float64) * 2.0**-53)


def drop_path_scales(draws: Tensor, rates: tuple[float, float]) -> Tensor:
    """(blocks, 2, sequences) -> the same, FP32: 0 where a branch is dropped, 1 / (1 - rate) where it is kept.

    rates: of the first and of the last block; rates of the blocks between are interpolated linearly.
    """
    found: Tensor = (_scales_of if fuses(draws) else _scales_of.function)(draws, *rates)
    return found


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
    scales: (rows, 1), for each of `places` sequences of its size / kept ones, which keeps the expected sum.
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
    """Choose the sequences of batched stochastic depth: for each block and branch the share 1 - rate of each size.

    The others are not computed: the student's blocks cost (1 - mean rate). Unlike with `drop_path_scales`, the number
    of kept sequences does not vary, and which are kept depends on the micro-batch: those with the largest draws of each
    size. `selection`: the rows that the last block returns, `Packing.first_and_last`; `made`: a cache.
    Source: facebookresearch/dinov2 `drop_add_residual_stochastic_depth`, with the rates of `drop_path_scales`.
    """
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
        among = list(equal)  # blocks of equal rates share what follows
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
    """Number of sequences of a size / kept ones, for each kept row, (rows, 1) FP32."""
    rows = [((n * tokens, 1), count / n) for (count, _), (n, tokens) in zip(whole.groups, kept.groups, strict=True)]
    return torch.cat([whole.bounds.new_full(shape, scale, dtype=torch.float32) for shape, scale in rows])

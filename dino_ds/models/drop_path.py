"""Stochastic depth whose decisions follow from the image, not from a generator's state.

Whether a crop skips a branch is a hash of (key of the image, view, block, branch): the same on any rank, for any
micro-batch, after a resume and in the recomputation of a checkpointed block, with no RNG state to save.
Source of the method: Huang et al. 2016 (arXiv 1603.09382); the rates grow linearly, as in facebookresearch/dino.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dino_ds.hashing import mix, shift_right
from dino_ds.models.packing import Packing


def sample_keys(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """One int64 key for each image of a batch: indices (b,) int64 on any device -> (b,) there."""
    base = mix(mix(torch.tensor(seed, dtype=torch.int64)) + epoch)
    return mix(base + indices)  # a CPU scalar is an argument of the kernel, not a copy to the device


def drop_path_draws(keys: Tensor, views: int, blocks: int) -> Tensor:
    """keys (b,) -> (blocks, 2, views * b) FP64 in [0, 1): a hash of (key, view, block, branch)."""
    view = torch.arange(views, device=keys.device).repeat_interleave(keys.shape[0])
    branch = torch.arange(2 * blocks, device=keys.device)
    rows = mix(keys.repeat(views) + view)
    hashed = mix(mix(rows.unsqueeze(0) ^ mix(branch).unsqueeze(1)))
    return (shift_right(hashed, 11).to(torch.float64) * 2.0**-53).view(blocks, 2, -1)


def drop_path_scales(draws: Tensor, last_rate: float) -> Tensor:
    """(blocks, 2, sequences) -> the same, FP32: 0 where a branch is dropped, 1 / (1 - rate) where it is kept.

    Rates grow linearly from 0 in the first block to `last_rate` in the last.
    """
    # Made on the device: a list of rates would be a copy from the host in every step.
    blocks = len(draws)
    rate = torch.arange(blocks, device=draws.device, dtype=torch.float64) * (last_rate / max(blocks - 1, 1))
    rate = rate.view(-1, 1, 1)
    return ((draws >= rate) / (1 - rate)).float()


@dataclass(frozen=True)
class Kept:
    """The sequences whose branch is computed at all.

    sequences (k,) in the whole batch; rows: all their tokens there; packing: of those rows; scales: sequences of a size
    / kept ones, so that the sum over a batch stays what it was, for each kept sequence (k, 1) and each row (rows, 1).
    """

    sequences: Tensor
    rows: Tensor
    packing: Packing
    scales: tuple[Tensor, Tensor]


def kept_sequences(draws: Tensor, last_rate: float, packing: Packing) -> list[list[Kept]]:
    """Batched stochastic depth: for each block and branch an exact part of the sequences of each size, 1 - rate.

    The others are not computed: the student's blocks cost (1 - mean rate). Not what `drop_path_scales` does: the number
    no longer varies, and who is kept depends on the micro-batch. Those with the largest draws of each size are kept.
    Source: facebookresearch/dinov2 `drop_add_residual_stochastic_depth`, with linear rates.
    """
    sequences, rows, first, start = [], [], 0, 0
    for count, tokens in packing.groups:
        order = draws[..., first : first + count].argsort(dim=-1, descending=True)  # of all blocks and branches at once
        sequences.append(order + first)
        rows.append(order.unsqueeze(-1) * tokens + torch.arange(start, start + tokens, device=draws.device))
        first, start = first + count, start + count * tokens
    blocks = []
    for block in range(len(draws)):
        rate = block * last_rate / max(len(draws) - 1, 1)
        counts = [max(1, round(count * (1 - rate))) for count, _ in packing.groups]
        own = Packing.of([(kept, n) for kept, (_, n) in zip(counts, packing.groups, strict=True)], draws.device)
        scales = _scales(packing, own, draws, False), _scales(packing, own, draws, True)
        blocks.append(
            [
                Kept(
                    torch.cat([whole[block, branch, :kept] for whole, kept in zip(sequences, counts, strict=True)]),
                    torch.cat(
                        [whole[block, branch, :kept].flatten() for whole, kept in zip(rows, counts, strict=True)]
                    ),
                    own,
                    scales,
                )
                for branch in range(2)
            ]
        )
    return blocks


def _scales(whole: Packing, kept: Packing, like: Tensor, by_row: bool) -> Tensor:
    """Sequences of a size / kept ones, for each kept sequence or row, (n, 1) FP32."""
    pairs = zip(whole.groups, kept.groups, strict=True)
    rows = [((n * tokens if by_row else n, 1), count / n) for (count, tokens), (n, _) in pairs]
    return torch.cat([like.new_full(shape, scale, dtype=torch.float32) for shape, scale in rows])

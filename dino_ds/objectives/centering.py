"""How a teacher's logits become targets that do not collapse: both ways are a softmax after a shift of each prototype.

targets = softmax(logits / temperature + shift). Centering subtracts a running mean (DINO, arXiv 2104.14294);
Sinkhorn-Knopp balances the prototypes over all rows of a step (SwAV, arXiv 2006.09882; DINOv2, arXiv 2304.07193).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from dino_ds.distributed import max_across_ranks, sum_across_ranks
from dino_ds.models.prototypes import Logits
from dino_ds.objectives.running import RunningMean


class Centering(ABC):
    """`whole_step`: the shift depends on the logits of all micro-batches of a step; statistics by name."""

    whole_step = False
    statistics: Mapping[str, RunningMean] = MappingProxyType({})

    @abstractmethod
    def shift(self, window: Sequence[Logits], temperature: float) -> Tensor:
        """Logits of the micro-batches, (n, k) each -> (k,). Every rank must call it; statistics gather the logits."""


class RunningCenter(Centering):
    """Less the running mean of the teacher's logits, which is that of the last applied step.

    name: of the mean in checkpoints.
    """

    def __init__(self, name: str, prototypes: int, momentum: float, device: torch.device | str = "cpu") -> None:
        self.center = RunningMean(prototypes, momentum, device)
        self.statistics = {name: self.center}

    @torch.no_grad()
    def shift(self, window: Sequence[Logits], temperature: float) -> Tensor:
        for logits in window:
            self.center.gather_sum(logits.sum(), len(logits.rows))
        return self.center.value / -temperature


class SinkhornKnopp(Centering):
    """The shift after which every prototype has had an equal part of all rows of all ranks, `iterations` times.

    Q = exp(logits / temperature) has its columns scaled to equal sums and then its rows, in turn, rows last. Rows'
    scaling is what a softmax does, so of Q only the columns' scaling is kept: three passes over tiles of logits, one
    sum of (k,) over ranks in each. In logarithms where numbers could be too large for FP32.
    One row alone has the uniform target, whatever its logits.
    """

    whole_step = True

    def __init__(self, iterations: int = 3) -> None:
        self.iterations = iterations

    @torch.no_grad()
    def shift(self, window: Sequence[Logits], temperature: float) -> Tensor:
        shift = -_log_sums(window, temperature)
        for _ in range(self.iterations - 1):
            sums = torch.zeros_like(shift)
            for logits in window:
                room = torch.empty(0, device=shift.device)
                for tile in logits.tiles(temperature):
                    room = room if room.numel() else torch.empty_like(tile)
                    # After a column's scaling its largest entry is at least 1 / rows, and rows sum to at most k:
                    # no sum of the softmax underflows.
                    sums += torch.softmax(tile.add_(shift), dim=-1, out=room[: len(tile)]).sum(dim=0)
            shift = shift - sum_across_ranks(sums).log()
        return shift


def _log_sums(window: Sequence[Logits], temperature: float) -> Tensor:
    """ln of the sum of exp(logits / temperature) over the rows of all ranks, (k,)."""
    found = torch.full_like(window[0].scale, -torch.inf)
    for logits in window:
        for tile in logits.tiles(temperature):
            torch.logaddexp(found, tile.logsumexp(dim=0), out=found)
    largest = max_across_ranks(found.clone())
    return largest + sum_across_ranks((found - largest).exp()).log()

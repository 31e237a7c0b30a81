"""The KoLeo term: spreads the CLS features of different images over the sphere.

Source: Sablayrolles et al. 2019 (arXiv 1806.03198); facebookresearch/dinov2 `KoLeoLoss`, and over ranks
`KoLeoLossDistributed` of dinov3's paper (arXiv 2508.10104).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.config.crops import Masks
from dino_ds.engine import distributed
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.method.objective import Needs, Outputs, StudentOutputs, Term, TermLoss
from dino_ds.models.base import cls_of

# As in the reference: added to every component of a difference, and to the distance.
_EPS = 1e-8


class KoLeoTerm(Term):
    """- ln of the distance to the nearest other image, mean over images, summed over their global crops. FP32.

    crops: global crops per image. all_ranks: whether the nearest is sought on all ranks, not on this rank alone. Under
    gradient accumulation only images of the same micro-batch are compared.
    """

    def __init__(self, crops: int = 2, all_ranks: bool = False) -> None:
        self.crops, self.all_ranks, self._feature = crops, all_ranks, cls_of("global")
        self.needs = Needs(student=(self._feature,), teachers={})

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[None]:
        return [None] * len(window)

    def loss(self, student: StudentOutputs, targets: None, schedule: ScheduleValues) -> TermLoss:
        features = student[self._feature]
        assert isinstance(features, Tensor)
        with torch.autocast(features.device.type, enabled=False):
            rows = F.normalize(features.float(), dim=-1, eps=_EPS).view(self.crops, -1, features.shape[-1])
            every = distributed.GatherRows.apply(rows) if self.all_ranks else rows
            first = rows.shape[1] * distributed.rank() if self.all_ranks else 0
            losses = [koleo(crop, all_of, first) for crop, all_of in zip(rows, every, strict=True)]
            return TermLoss(torch.stack(losses).sum(), {})


def koleo(rows: Tensor, every: Tensor, first: int = 0) -> Tensor:
    """Unit rows (b, d), those of `every` (n, d) from `first` on -> mean of - ln(distance to the nearest other row).

    The nearest row is found by dot product, without gradient; the distance has gradients for both of its rows.
    """
    with torch.no_grad():
        similarity = rows @ every.t()
        numbers = torch.arange(len(rows), device=rows.device)
        similarity[numbers, numbers + first] = -1.0
        nearest = similarity.argmax(dim=1)
    distance = torch.linalg.vector_norm(rows - every.index_select(0, nearest) + _EPS, dim=-1)
    return -(distance + _EPS).log().mean()

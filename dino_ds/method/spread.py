"""Terms that spread the features of different images over the sphere: KoLeo, and SimDINO's coding rate, an objective in
place of prototypes. Source of KoLeo: Sablayrolles et al. 2019 (arXiv 1806.03198), facebookresearch/dinov2 `KoLeoLoss`,
and over ranks `KoLeoLossDistributed` of dinov3's paper (arXiv 2508.10104). Of SimDINO: arXiv 2502.10385; the factor of
the rate and the distortion are those of its published code. There the projection is DINO's head without prototypes;
here it is one linear layer, which was as good (docs/notes/small-data.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.config.crops import Masks
from dino_ds.engine import distributed
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.method.objective import Needs, Outputs, StudentOutputs, Term, TermLoss
from dino_ds.method.specs.ours import CodingRateSpec
from dino_ds.models.base import CLS, cls_of
from dino_ds.models.network import Query

DISTORTION = 0.5  # the squared distortion, epsilon^2, of the coding rate
_EPS = 1e-8  # as in KoLeo's reference: added to every component of a difference, and to the distance


class CodingRateTerm(Term):
    """1 - the mean cosine over pairs of different crops - the coding rate of the student's global crops. FP32. The rate
    is over the images of one micro-batch on all ranks, also under gradient accumulation. `coding_spread` is where the
    rate lies between its smallest and its largest possible value, as 0 to 1."""

    scalars = ("view_cosine", "coding_rate", "coding_spread")
    spread = "coding_spread"

    def __init__(self, spec: CodingRateSpec, crops: int) -> None:
        self.crops, self.teacher, self._query = crops, spec.teacher, spec.name
        query = Query(f"{spec.name}_head", CLS, spec.width)
        self.needs = Needs((self._query,), {self.teacher: (self._query,)}, {self._query: query})

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Tensor]:
        outputs = [teachers[self.teacher][self._query] for teachers in window]
        return [_unit_rows(rows).unflatten(0, (self.crops, -1)) for rows in outputs]

    def loss(self, student: StudentOutputs, targets: Tensor, schedule: ScheduleValues) -> TermLoss:
        rows = _unit_rows(student[self._query]).unflatten(0, (-1, targets.shape[1]))
        with torch.autocast(rows.device.type, enabled=False):
            pairs = torch.einsum("vbd,gbd->vg", rows, targets) / rows.shape[1]
            cosine = (pairs.sum() - pairs.diagonal().sum()) / (pairs.numel() - self.crops)
            rate = coding_rate(rows[: self.crops])
            width, images = rows.shape[2], rows.shape[1] * distributed.world_size()
            least, most = (  # rates of images that all have the same row, and of images spread as evenly as they can be
                rank * math.log1p(width / (rank * DISTORTION)) / 2 * ((images + width) / (images * width))
                for rank in (1, min(width, images))
            )
            spread = (rate.detach() - least) / max(most - least, 1e-6)  # for one image the bounds are equal
            scalars = {"view_cosine": cosine.detach(), "coding_rate": rate.detach(), self.spread: spread}
            return TermLoss(1 - cosine - rate, scalars)


def coding_rate(rows: Tensor) -> Tensor:
    """Unit rows (crops, b, d) -> log det(I + d / (n DISTORTION) Z^T Z) / 2, mean over crops, times (n + d) / (n d). n
    counts the images of all ranks; the covariance is summed over ranks."""
    width, images = rows.shape[2], rows.shape[1] * distributed.world_size()
    covariance = _SumOverRanks.apply(rows.transpose(1, 2) @ rows)
    eye = torch.eye(width, device=rows.device)
    factors = torch.linalg.cholesky_ex(eye + width / (images * DISTORTION) * covariance).L
    rate = factors.diagonal(dim1=1, dim2=2).log().sum(dim=1).mean()
    return rate * (images + width) / (images * width)


def _unit_rows(output: object) -> Tensor:
    assert isinstance(output, Tensor)
    return F.normalize(output.float(), dim=-1)


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor, of any strides, over ranks. Every rank computes the loss of all images, and the engine
    averages gradients over ranks, so the backward pass sums over ranks too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return distributed.sum_across_ranks(values.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return distributed.sum_across_ranks(grad_outputs[0].clone(memory_format=torch.contiguous_format))


class KoLeoTerm(Term):
    """- ln of the distance to the nearest other image, mean over images, summed over their global crops. FP32. crops:
    global crops per image. all_ranks: whether the nearest is sought on all ranks, not on this rank alone. Under
    gradient accumulation only images of the same micro-batch are compared."""

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
    """Unit rows (b, d), those of `every` (n, d) from `first` on -> mean of - ln(distance to the nearest other row). The
    nearest row is found by dot product, without gradient; the distance has gradients for both of its rows."""
    with torch.no_grad():
        similarity = rows @ every.t()
        numbers = torch.arange(len(rows), device=rows.device)
        similarity[numbers, numbers + first] = -1.0
        nearest = similarity.argmax(dim=1)
    distance = torch.linalg.vector_norm(rows - every.index_select(0, nearest) + _EPS, dim=-1)
    return -(distance + _EPS).log().mean()

"""SimDINO's objective in place of prototypes: crops of an image agree with the teacher's, and images fill the sphere.

Source: arXiv 2502.10385; the factor of the rate and the distortion are those of its published code. There the
projection is DINO's head without prototypes; here it is one linear layer, which was as good (docs/notes/small-data.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dino_ds.config.crops import Masks
from dino_ds.engine import distributed
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.method.objective import Needs, Outputs, StudentOutputs, Term, TermLoss
from dino_ds.method.specs.ours import CodingRateSpec
from dino_ds.models.base import CLS
from dino_ds.models.network import Query

DISTORTION = 0.5
"""The squared distortion, epsilon^2, of the coding rate."""


class CodingRateTerm(Term):
    """1 - the mean cosine over pairs of different crops - the coding rate of the student's global crops. FP32.

    The rate is over the images of one micro-batch on all ranks, also under gradient accumulation. `coding_spread` is
    where the rate lies between its smallest and its largest possible value, as 0 to 1.
    """

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
            least, most = rate_bounds(rows.shape[2], rows.shape[1] * distributed.world_size())
            spread = (rate.detach() - least) / max(most - least, 1e-6)  # for one image the bounds are equal
            scalars = {"view_cosine": cosine.detach(), "coding_rate": rate.detach(), self.spread: spread}
            return TermLoss(1 - cosine - rate, scalars)


def coding_rate(rows: Tensor) -> Tensor:
    """Unit rows (crops, b, d) -> log det(I + d / (n DISTORTION) Z^T Z) / 2, mean over crops, times (n + d) / (n d).

    n counts the images of all ranks; the covariance is summed over ranks.
    """
    width, images = rows.shape[2], rows.shape[1] * distributed.world_size()
    covariance = _SumOverRanks.apply(rows.transpose(1, 2) @ rows)
    eye = torch.eye(width, device=rows.device)
    factors = torch.linalg.cholesky_ex(eye + width / (images * DISTORTION) * covariance).L
    rate = factors.diagonal(dim1=1, dim2=2).log().sum(dim=1).mean()
    return rate * (images + width) / (images * width)


def rate_bounds(width: int, images: int) -> tuple[float, float]:
    """The coding rate of images that all have the same row, and of images spread as evenly as they can be."""
    least, most = (rank * math.log1p(width / (rank * DISTORTION)) / 2 for rank in (1, min(width, images)))
    factor = (images + width) / (images * width)
    return least * factor, most * factor


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
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return distributed.sum_across_ranks(grad_outputs[0].clone(memory_format=torch.contiguous_format))

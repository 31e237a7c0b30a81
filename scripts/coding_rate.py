"""SimDINO's objective as a loss term of one's own, in place of prototypes: the first candidate of scripts.small_data.

    objective:
      dino_weight: 0
      terms:
        rate: {spec: "scripts.coding_rate:CodingRate", weight: 1}

Source: arXiv 2502.10385; the factor of the rate and `eps` are those of its published code. There the projection is
DINO's head; here it is one linear layer, which was as good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dino_ds.config.crops import EMA, Masks
from dino_ds.engine import distributed
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.method.objective import Measured, Needs, Outputs, StudentOutputs, Term
from dino_ds.method.specs.base import Batch, TermSpec
from dino_ds.models.base import CLS
from dino_ds.models.network import Query


@dataclass(frozen=True)
class CodingRate(TermSpec):
    """Each crop is near the teacher's other crops of its image, while all images fill the sphere.

    width: of the linear projection; eps: squared distortion of the coding rate; crops: that the teacher sees.
    """

    width: int = 64
    eps: float = 0.5
    crops: int = 2

    @property
    def title(self) -> str:
        return "Coding rate (SimDINO)"

    def accumulated(self, batch: Batch) -> tuple[list[str], list[str]]:
        images = batch.micro_batch * batch.ranks
        seen = f"the coding rate is of {images} images at a time, not the {batch.images} of a step"
        return [], [f"{seen}: with another accumulation it is another loss"]

    def build(self, parts: Any) -> Term:
        return CodingRateTerm(self)


class CodingRateTerm(Term):
    """1 - the mean cosine over pairs of different crops - the coding rate of the student's global crops, of all ranks'
    images. FP32."""

    scalars = ("cosine", "coding_rate")

    def __init__(self, spec: CodingRate) -> None:
        self.spec, self._query = spec, spec.name
        query = Query(f"{spec.name}_head", CLS, spec.width)
        self.needs = Needs((self._query,), {EMA: (self._query,)}, {self._query: query})

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Tensor]:
        return [_unit_rows(teachers[EMA][self._query]).unflatten(0, (self.spec.crops, -1)) for teachers in window]

    def loss(self, student: StudentOutputs, targets: Tensor, schedule: ScheduleValues) -> Measured:
        rows = _unit_rows(student[self._query]).unflatten(0, (-1, targets.shape[1]))
        with torch.autocast(rows.device.type, enabled=False):
            pairs = torch.einsum("vbd,gbd->vg", rows, targets) / rows.shape[1]
            cosine = (pairs.sum() - pairs.diagonal().sum()) / (pairs.numel() - self.spec.crops)
            rate = coding_rate(rows[: self.spec.crops], self.spec.eps)
            return Measured(1 - cosine - rate, {"cosine": cosine.detach(), "coding_rate": rate.detach()})


def _unit_rows(output: object) -> Tensor:
    assert isinstance(output, Tensor)
    return F.normalize(output.float(), dim=-1)


def coding_rate(rows: Tensor, eps: float) -> Tensor:
    """Unit rows (crops, b, d) -> log det(I + d / (n eps) Z^T Z) / 2, mean over crops, times (n + d) / (n d).

    n are the images of all ranks: covariances are summed over them.
    """
    width, images = rows.shape[2], rows.shape[1] * distributed.world_size()
    covariance = _SumOverRanks.apply(rows.transpose(1, 2) @ rows)
    eye = torch.eye(width, device=rows.device)
    factors = torch.linalg.cholesky(eye + width / (images * eps) * covariance)
    rate = factors.diagonal(dim1=1, dim2=2).log().sum(dim=1).mean()
    return rate * (images + width) / (images * width)


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks. Each rank has the loss of all images, and the engine means gradients over ranks: so the
    gradient is summed over ranks too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return distributed.sum_across_ranks(values.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return distributed.sum_across_ranks(grad_outputs[0].clone())

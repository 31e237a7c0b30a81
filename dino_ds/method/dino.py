"""The DINO term: every student crop predicts the teacher's outputs for the teacher's crops, except for itself; and the
centering of a teacher's logits, by which its targets do not collapse.

targets = softmax(logits / temperature + shift). Centering subtracts a running mean; Sinkhorn-Knopp balances the
prototypes over all rows of a step.

Source: DINO, equation 3 and algorithm 1 (arXiv 2104.14294); facebookresearch/dino `DINOLoss`; Sinkhorn-Knopp: SwAV
(arXiv 2006.09882), facebookresearch/dinov2 (arXiv 2304.07193).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.basics.ranges import device_kind
from dino_ds.config.crops import EMA, Masks
from dino_ds.engine.distributed import max_across_ranks, sum_across_ranks
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.method import objective
from dino_ds.method.networks import TermParts
from dino_ds.method.specs.ours import DINO, HEAD, LOCAL_WEIGHT, CenteringSpec, DinoSpec
from dino_ds.models.base import CLS
from dino_ds.models.fused import fused, fuses, log_sum_exp
from dino_ds.models.network import Query
from dino_ds.models.prototypes import Compared, Comparison, Logits, part_rows, tile_rows

# Bytes of logits that Sinkhorn-Knopp keeps between passes. On a GPU recomputing them is worth the memory saved.
_KEPT = {"cpu": 160 * 2**20}


class Centering(ABC):
    """Computes the shift. whole_step: whether it needs all micro-batches of a step at once; statistics: by name."""

    whole_step = False
    statistics: Mapping[str, objective.RunningMean] = MappingProxyType({})

    @abstractmethod
    def shift(self, window: Sequence[Logits], temperature: float) -> Tensor:
        """Logits of the micro-batches, (n, k) each -> (k,). Every rank must call it; statistics sum up the logits."""


class RunningCenter(Centering):
    """Subtracts the running mean of the teacher's logits as of the last applied step.

    name: the mean's name in checkpoints.
    """

    def __init__(self, name: str, prototypes: int, momentum: float, device: torch.device | str = "cpu") -> None:
        self.center = objective.RunningMean(prototypes, momentum, device)
        self.statistics = {name: self.center}

    @torch.no_grad()
    def shift(self, window: Sequence[Logits], temperature: float) -> Tensor:
        for logits in window:
            self.center.gather_sum(logits.sum(), len(logits.rows))
        return self.center.value / -temperature


class SinkhornKnopp(Centering):
    """Balances the prototypes: `iterations` times, every prototype gets an equal share of the rows of all ranks.

    Each iteration scales the columns of Q = exp(logits / temperature) to equal sums, and then its rows. A softmax
    scales the rows by itself, so only the scales of the columns are kept, as the shift. An iteration takes one pass
    over tiles of logits and one sum of (k,) over ranks, with logarithms where numbers could be too large for FP32.
    A single row gets the uniform target, whatever its logits.
    """

    whole_step = True

    def __init__(self, iterations: int = 3) -> None:
        self.iterations = iterations

    @torch.no_grad()
    def shift(self, window: Sequence[Logits], temperature: float) -> Tensor:
        tiles = _Tiles(window, temperature)
        shift = -_log_sums(tiles)
        for _ in range(self.iterations - 1):
            shift = shift - sum_across_ranks(_sums(tiles, shift)).log()
        return shift


def build_centering(spec: CenteringSpec, prototypes: int, device: torch.device) -> Centering:
    """The centering that a spec describes, with a new running mean on `device` if it uses one."""
    if spec.sinkhorn:
        return SinkhornKnopp()
    return RunningCenter(spec.name, prototypes, spec.momentum, device)


def sums_of_rows(logits: Logits, temperature: float) -> Tensor:
    """The two sums of Sinkhorn-Knopp over this rank's rows, (2, k): the logarithms of the first iteration's sums of
    exp(logits / temperature), and a later iteration's sums of the softmaxes."""
    tiles = _Tiles([logits], temperature)
    log_sums = _log_sums_of_rank(tiles)
    return torch.stack([log_sums, _sums(tiles, -log_sums)])


def _log_sums(tiles: _Tiles) -> Tensor:
    """ln of the sum of exp(logits / temperature) over the rows of all ranks, (k,)."""
    log_sums = _log_sums_of_rank(tiles)
    largest = max_across_ranks(log_sums.clone())
    return largest + sum_across_ranks((log_sums - largest).exp()).log()


def _log_sums_of_rank(tiles: _Tiles) -> Tensor:
    log_sums = torch.full_like(tiles.scale, -torch.inf)
    if tiles.fused:
        for products, scale in tiles.products():
            log_sums = _add_exp(log_sums, products, scale)
    else:
        for tile in tiles:
            largest, sums = tile.amax(dim=0), torch.zeros_like(log_sums)
            for part, scratch, _ in tiles.parts(tile):
                sums += torch.sub(part, largest, out=scratch).exp_().sum(dim=0)
            torch.logaddexp(log_sums, largest.add_(sums.log_()), out=log_sums)
    return log_sums


def _sums(tiles: _Tiles, shift: Tensor) -> Tensor:
    """Sums (k,) over this rank's rows of softmax(logits / temperature + shift).

    After a column's scaling its largest entry is at least 1 / rows, and rows sum to at most k: no sum of the softmax
    underflows.
    """
    sums = torch.zeros_like(shift)
    if tiles.fused:
        for products, scale in tiles.products():
            sums = _add_softmax(sums, products, scale, shift)
        return sums
    for tile in tiles:
        for part, scratch, other in tiles.parts(tile):
            sums += torch.softmax(torch.add(part, shift, out=scratch), dim=-1, out=other).sum(dim=0)
    return sums


@fused(kernels=1)
def _add_exp(log_sums: Tensor, products: Tensor, scale: Tensor) -> Tensor:
    """`log_sums` (k,), ln of sums of exp(logits) over rows, after adding the rows of products (r, k)."""
    return torch.logaddexp(log_sums, log_sum_exp(products * scale, dim=0)[0])


@fused(kernels=2, products=2)
def _add_softmax(sums: Tensor, products: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`sums` (k,) of softmaxes over rows, after adding the rows of products (r, k)."""
    x = products * scale + shift
    return sums + (x - log_sum_exp(x)).exp().sum(dim=0)


class _Tiles:
    """Iterates over tiles (r, k) of a window's logits / temperature in FP32, any number of times; don't write to them.

    The first tiles are kept as far as they fit into `_KEPT`; the others are recomputed each time, in the same memory.
    """

    def __init__(self, window: Sequence[Logits], temperature: float) -> None:
        self._window, self.scale = window, window[0].scale
        self._scales = [logits.scale / temperature for logits in window]
        weight = window[0].weight
        self.fused = fuses(weight)
        self._size = tile_rows(weight, self.fused)
        self._keeps = _KEPT.get(device_kind(weight.device.type), 0) // (4 * self._size * len(weight))
        self._kept: dict[tuple[int, int], Tensor] = {}
        most = min(self._size, max(len(logits.rows) for logits in window))
        self._scratch = weight.new_empty(most, len(weight))
        if not self.fused:
            self._parts = weight.new_empty(2, min(most, part_rows(weight)), len(weight))

    def __iter__(self) -> Iterator[Tensor]:
        for i, start in self._places():
            yield self._tile(i, start)

    def products(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the matrix product of each tile, and the factors (k,) that turn it into logits / temperature."""
        for i, start in self._places():
            logits = self._window[i]
            yield logits.multiply(logits.rows[start : start + self._size], self._scratch), self._scales[i]

    def _places(self) -> Iterator[tuple[int, int]]:
        for i, logits in enumerate(self._window):
            for start in range(0, len(logits.rows), self._size):
                yield i, start

    def _tile(self, i: int, start: int) -> Tensor:
        if (i, start) in self._kept:
            return self._kept[i, start]
        logits = self._window[i]
        rows = logits.rows[start : start + self._size]
        keep = len(self._kept) < self._keeps
        tile = logits.multiply(rows, torch.empty_like(self._scratch) if keep else self._scratch).mul_(self._scales[i])
        if keep:
            self._kept[i, start] = tile
        return tile

    def parts(self, tile: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield a few rows of a tile at a time, and two scratch tensors of their size."""
        for part in tile.split(max(1, self._parts.shape[1])):
            yield part, self._parts[0, : len(part)], self._parts[1, : len(part)]


def dino_loss(student: Tensor, teacher: Tensor, temperature: float, local_weight: float = 1.0) -> Tensor:
    """The formula of the paper: the mean cross-entropy over images and pairs of a teacher's crop and another crop.

    student: logits (crops, images, prototypes), those that the teacher sees first; teacher: probabilities (its crops,
    images, prototypes), after centering; local_weight: factor on the pairs of the student's other crops.
    """
    losses = []
    for t, targets in enumerate(teacher):
        for s, logits in enumerate(student):
            if s != t:
                cross_entropy = -(targets * F.log_softmax(logits / temperature, dim=-1)).sum(dim=-1)
                losses.append(cross_entropy.mean() * (1.0 if s < len(teacher) else local_weight))
    return torch.stack(losses).mean()


class DinoTerm(objective.Term):
    """`dino_loss`, which the head computes with its logits, a few images at a time (`Prototypes`). FP32.

    The value is the same: cross-entropy is linear in its targets, so the targets for a student's crop are summed first,
    and the crop costs one log-sum-exp and one product: (pairs) lse(logits) - <sum of targets, logits>.

    Args:
        teacher_crops: number of crops of each image that the teacher sees; the student sees these first.
        teacher: name of the teacher whose logits make the targets.
        weighs_local: whether LOCAL_WEIGHT of the schedule multiplies the pairs of the student's other crops (DINOv3);
            the divisor stays the number of pairs. The scalar dino_cross_entropy is then the weighted mean over pairs.
    """

    scalars: tuple[str, ...] = ("teacher_entropy",)

    def __init__(
        self,
        prototypes: int,
        student_temp: float,
        centering: Centering,
        teacher_crops: int = 2,
        teacher: str = EMA,
        weighs_local: bool = False,
    ) -> None:
        self.teacher, self._weighs_local = teacher, weighs_local
        self.needs = objective.Needs(student=(DINO,), teachers={teacher: (DINO,)}, queries={DINO: Query(HEAD, CLS)})
        self.student_temp, self.centering, self.teacher_crops = student_temp, centering, teacher_crops
        self.entropies = {"teacher_entropy": objective.TargetEntropy(prototypes)}
        if weighs_local:
            self.scalars = ("teacher_entropy", "dino_cross_entropy")
            self.entropies = {"teacher_entropy": objective.TargetEntropy(prototypes, "dino_cross_entropy")}
        self.statistics, self.whole_step = centering.statistics, centering.whole_step

    def targets(
        self, window: Sequence[objective.Outputs], masks: Sequence[Masks], schedule: ScheduleValues
    ) -> list[Comparison]:
        logits = objective.teacher_logits(window, self.teacher, DINO)
        temperature = schedule.teacher_temp
        shift = self.centering.shift(logits, temperature)
        others = schedule.weights[LOCAL_WEIGHT] if self._weighs_local else 1.0
        return [
            Comparison(
                of_batch, shift, temperature, self.student_temp, self.teacher_crops, exclude_own=True, others=others
            )
            for of_batch in logits
        ]

    def loss(
        self, student: objective.StudentOutputs, targets: Comparison, schedule: ScheduleValues
    ) -> objective.TermLoss:
        compared = student[DINO]
        assert isinstance(compared, Compared)
        scalars = {"teacher_entropy": compared.entropy}
        if self._weighs_local:
            scalars["dino_cross_entropy"] = compared.loss.detach() / compared.share
        return objective.TermLoss(compared.loss, scalars)


def build_dino(spec: DinoSpec, parts: TermParts) -> DinoTerm:
    prototypes = spec.head[1].prototypes
    center = build_centering(spec.centering, prototypes, parts.device)
    return DinoTerm(prototypes, spec.student_temp, center, parts.taught_crops, spec.teacher, spec.weighs_local)

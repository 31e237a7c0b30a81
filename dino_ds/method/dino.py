"""The DINO term: every student crop predicts the teacher's outputs for the teacher's crops, except for itself; the iBOT
term: for each hidden patch the student predicts what the teacher sees there; and the centering of a teacher's logits.
targets = softmax(logits / temperature + shift). Centering subtracts a running mean; Sinkhorn-Knopp balances the
prototypes over all rows of a step. Without either the targets collapse. Source: DINO, equation 3 and algorithm 1 (arXiv
2104.14294), facebookresearch/dino `DINOLoss`; iBOT (arXiv 2111.07832), facebookresearch/dinov2
`iBOTPatchLoss.forward_masked`; Sinkhorn-Knopp: SwAV (arXiv 2006.09882), dinov2."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.basics.ranges import device_kind
from dino_ds.config.crops import EMA, GLOBAL, Masks
from dino_ds.engine.distributed import max_across_ranks, sum_across_ranks
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.method.networks import TermParts
from dino_ds.method.objective import Needs, Outputs, RunningMean, StudentOutputs, TargetEntropy, Term, TermLoss
from dino_ds.method.specs.ours import DINO, HEAD, IBOT, IBOT_HEAD, LOCAL_WEIGHT, DinoSpec, PrototypeSpec
from dino_ds.models.base import CLS, masked_of
from dino_ds.models.fused import fused, fuses, log_sum_exp
from dino_ds.models.network import Query
from dino_ds.models.prototypes import Compared, Comparison, Logits, part_rows, tile_rows

# Bytes of logits that Sinkhorn-Knopp keeps between passes. On a GPU recomputing them is worth the memory saved.
_KEPT = {"cpu": 160 * 2**20}


class Centering(ABC):
    """Computes the targets' shift. whole_step: whether it needs all micro-batches of a step; statistics: by name."""

    whole_step = False
    statistics: Mapping[str, RunningMean] = MappingProxyType({})

    @abstractmethod
    def shift(self, window: Sequence[Logits], temperature: float) -> Tensor:
        """Logits of the micro-batches, (n, k) each -> (k,). Every rank must call it; statistics sum up the logits."""


class RunningCenter(Centering):
    """Subtracts the running mean of the teacher's logits as of the last applied step. name: of the mean in
    checkpoints."""

    def __init__(self, name: str, prototypes: int, momentum: float, device: torch.device | str = "cpu") -> None:
        self.center = RunningMean(prototypes, momentum, device)
        self.statistics = {name: self.center}

    @torch.no_grad()
    def shift(self, window: Sequence[Logits], temperature: float) -> Tensor:
        for logits in window:
            self.center.gather(logits.sum(), len(logits.rows))
        return self.center.value / -temperature


class SinkhornKnopp(Centering):
    """Balances the prototypes: `iterations` times, every prototype gets an equal share of the rows of all ranks. Each
    iteration scales the columns of Q = exp(logits / temperature) to equal sums, and then its rows. A softmax scales the
    rows by itself, so only the scales of the columns are kept, as the shift. An iteration takes one pass over tiles of
    logits and one sum of (k,) over ranks, with logarithms where numbers could be too large for FP32. A single row gets
    the uniform target, whatever its logits."""

    whole_step = True

    def __init__(self, iterations: int = 3) -> None:
        self.iterations = iterations

    @torch.no_grad()
    def shift(self, window: Sequence[Logits], temperature: float) -> Tensor:
        tiles = _Tiles(window, temperature)
        log_sums = _log_sums_of_rank(tiles)
        largest = max_across_ranks(log_sums.clone())
        shift = -(largest + sum_across_ranks((log_sums - largest).exp()).log())
        for _ in range(self.iterations - 1):
            shift = shift - sum_across_ranks(_sums(tiles, shift)).log()
        return shift


def sums_of_rows(logits: Logits, temperature: float) -> Tensor:
    """The two sums of Sinkhorn-Knopp over this rank's rows, (2, k): the logarithms of the first iteration's sums of
    exp(logits / temperature), and a later iteration's sums of the softmaxes."""
    tiles = _Tiles([logits], temperature)
    log_sums = _log_sums_of_rank(tiles)
    return torch.stack([log_sums, _sums(tiles, -log_sums)])


def _log_sums_of_rank(tiles: _Tiles) -> Tensor:
    """ln of the sum of exp(logits / temperature) over this rank's rows, (k,)."""
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
    """Sums (k,) over this rank's rows of softmax(logits / temperature + shift). After a column's scaling its largest
    entry is at least 1 / rows, and rows sum to at most k: no sum of the softmax underflows."""
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
    The first tiles are kept if they fit into `_KEPT`; others are recomputed in the same memory."""

    def __init__(self, window: Sequence[Logits], temperature: float) -> None:
        weight, self.scale = window[0].weight, window[0].scale
        self.fused = fuses(weight)
        size = tile_rows(weight, self.fused)
        scales = [logits.scale / temperature for logits in window]
        self._rows = [
            (logits, logits.rows[start : start + size], scale)
            for logits, scale in zip(window, scales, strict=True)
            for start in range(0, len(logits.rows), size)
        ]
        self._keeps = _KEPT.get(device_kind(weight.device.type), 0) // (4 * size * len(weight))
        self._kept: list[Tensor] = []
        most = min(size, max(len(logits.rows) for logits in window))
        self._scratch = weight.new_empty(most, len(weight))
        if not self.fused:
            self._parts = weight.new_empty(2, min(most, part_rows(weight)), len(weight))

    def __iter__(self) -> Iterator[Tensor]:
        for i, (logits, rows, scale) in enumerate(self._rows):
            if i < len(self._kept):
                yield self._kept[i]
                continue
            keep = i < self._keeps
            tile = logits.multiply(rows, torch.empty_like(self._scratch) if keep else self._scratch).mul_(scale)
            if keep:
                self._kept.append(tile)
            yield tile

    def products(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the matrix product of each tile, and the factors (k,) that turn it into logits / temperature."""
        for logits, rows, scale in self._rows:
            yield logits.multiply(rows, self._scratch), scale

    def parts(self, tile: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield a few rows of a tile at a time, and two scratch tensors of their size."""
        for part in tile.split(max(1, self._parts.shape[1])):
            yield part, self._parts[0, : len(part)], self._parts[1, : len(part)]


def dino_loss(student: Tensor, teacher: Tensor, temperature: float, local_weight: float = 1.0) -> Tensor:
    """The formula of the paper: the mean cross-entropy over images and pairs of a teacher's crop and another crop.
    student: logits (crops, images, prototypes), the teacher's crops first; teacher: probabilities (its crops,
    images, prototypes), after centering; local_weight: factor on the pairs of the student's other crops."""
    losses = []
    for t, targets in enumerate(teacher):
        for s, logits in enumerate(student):
            if s != t:
                cross_entropy = -(targets * F.log_softmax(logits / temperature, dim=-1)).sum(dim=-1)
                losses.append(cross_entropy.mean() * (1.0 if s < len(teacher) else local_weight))
    return torch.stack(losses).mean()


def ibot_loss(student: Tensor, teacher: Tensor, temperature: float, weights: Tensor, crops: int) -> Tensor:
    """The formula of the paper: cross-entropies of hidden patches, averaged in each crop and over `crops`. student:
    logits (patches, prototypes) of the hidden patches; teacher: probabilities (patches, prototypes) for them; weights
    (patches,): 1 / the number of hidden patches in the patch's crop. A crop without hidden patches counts as 0."""
    cross_entropy = -(teacher * F.log_softmax(student / temperature, dim=-1)).sum(dim=-1)
    return (cross_entropy * weights).sum() / crops


class _PrototypeTerm(Term):
    """A cross-entropy that the head computes with its logits, a few images at a time (`Prototypes`). FP32. `centering`
    turns the logits of `teacher` into targets; `query` names the output of student and teacher that is compared."""

    def __init__(self, student_temp: float, centering: Centering, teacher: str, query: str, head: Query) -> None:
        self.student_temp, self.centering, self.teacher, self._query = student_temp, centering, teacher, query
        self.needs = Needs((query,), {teacher: (query,)}, {query: head})
        self.statistics, self.whole_step = centering.statistics, centering.whole_step

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Comparison]:
        logits = [cast(Logits, teachers[self.teacher][self._query]) for teachers in window]
        shift = self.centering.shift(logits, schedule.teacher_temp)
        like = Comparison(logits[0], shift, schedule.teacher_temp, self.student_temp)
        pairs = zip(logits, masks, strict=True)
        return [like._replace(teacher=teacher, **self._how(hidden, schedule)) for teacher, hidden in pairs]

    @abstractmethod
    def _how(self, masks: Masks, schedule: ScheduleValues) -> dict[str, Any]:
        """Further fields of a micro-batch's `Comparison`."""


class DinoTerm(_PrototypeTerm):
    """`dino_loss`, which the head computes with its logits, a few images at a time (`Prototypes`). FP32.

    The value is the same: cross-entropy is linear in its targets, so the targets for a student's crop are summed first,
    and the crop costs one log-sum-exp and one product: (pairs) lse(logits) - <sum of targets, logits>.

    Args:
        teacher_crops: number of crops of each image that the teacher sees; the student sees these first.
        teacher: name of the teacher whose logits make the targets.
        weighs_local: whether LOCAL_WEIGHT of the schedule multiplies the pairs of the student's other crops (DINOv3);
            the divisor stays the number of pairs. The scalar dino_cross_entropy is then the weighted mean over pairs.
    """

    def __init__(
        self,
        prototypes: int,
        student_temp: float,
        centering: Centering,
        teacher_crops: int = 2,
        teacher: str = EMA,
        weighs_local: bool = False,
    ) -> None:
        super().__init__(student_temp, centering, teacher, DINO, Query(HEAD, CLS))
        self.teacher_crops, self._weighs_local = teacher_crops, weighs_local
        self.scalars = ("teacher_entropy", *(["dino_cross_entropy"] if weighs_local else []))
        self.entropies = {"teacher_entropy": TargetEntropy(prototypes, "dino_cross_entropy" if weighs_local else None)}

    def _how(self, masks: Masks, schedule: ScheduleValues) -> dict[str, Any]:
        others = schedule.weights[LOCAL_WEIGHT] if self._weighs_local else 1.0
        return {"crops": self.teacher_crops, "exclude_own": True, "others": others}

    def loss(self, student: StudentOutputs, targets: Comparison, schedule: ScheduleValues) -> TermLoss:
        compared = student[DINO]
        assert isinstance(compared, Compared)
        scalars = {"teacher_entropy": compared.entropy}
        if self._weighs_local:
            scalars["dino_cross_entropy"] = compared.loss.detach() / compared.share
        return TermLoss(compared.loss, scalars)


class IbotTerm(_PrototypeTerm):
    """`ibot_loss` over the global crops, masked or not: a crop without hidden patches counts as 0, so that a masked
    crop weighs the same in every batch. head: name of the patch head."""

    scalars = ("ibot_teacher_entropy", "ibot_cross_entropy")

    def __init__(
        self, prototypes: int, student_temp: float, centering: Centering, head: str = IBOT_HEAD, teacher: str = EMA
    ) -> None:
        super().__init__(student_temp, centering, teacher, IBOT, Query(head, masked_of(GLOBAL)))
        self.entropies = {"ibot_teacher_entropy": TargetEntropy(prototypes, "ibot_cross_entropy", "masked patch")}

    def _how(self, masks: Masks, schedule: ScheduleValues) -> dict[str, Any]:
        return {"weights": masks[GLOBAL]["weights"], "divisor": float(len(masks[GLOBAL]["mask"]))}

    def loss(self, student: StudentOutputs, targets: Comparison, schedule: ScheduleValues) -> TermLoss:
        """The loss; as scalars the entropy of the targets and the cross-entropy, means over the masked crops."""
        compared = student[IBOT]
        assert isinstance(compared, Compared) and targets.weights is not None and targets.divisor is not None
        mean = compared.loss.detach() * (targets.divisor / targets.weights.sum().clamp_min(1e-9))
        return TermLoss(compared.loss, {"ibot_teacher_entropy": compared.entropy, "ibot_cross_entropy": mean})


def build_prototype_term(spec: PrototypeSpec, parts: TermParts) -> Term:
    (name, head), teacher = spec.head, spec.teacher
    centering: Centering = SinkhornKnopp()
    if not spec.sinkhorn:
        centering = RunningCenter(spec.center, head.prototypes, spec.center_momentum, parts.device)
    if isinstance(spec, DinoSpec):
        crops = parts.taught_crops
        return DinoTerm(head.prototypes, spec.student_temp, centering, crops, teacher, spec.weighs_local)
    return IbotTerm(head.prototypes, spec.student_temp, centering, name, teacher)

"""The DINO term: every student crop predicts the teacher's outputs for the teacher's crops, except for itself.

Source: DINO, equation 3 and algorithm 1 (arXiv 2104.14294); facebookresearch/dino `DINOLoss`; with Sinkhorn-Knopp
facebookresearch/dinov2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.config.crops import EMA, Masks
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.method.centering import Centering, build_centering
from dino_ds.method.objective import Measured, Needs, Outputs, StudentOutputs, TargetEntropy, Term, teacher_logits
from dino_ds.method.parts import TermParts
from dino_ds.method.specs.dino import DINO, HEAD, LOCAL_WEIGHT, DinoSpec
from dino_ds.models.base import CLS
from dino_ds.models.logits import Compared, Comparison
from dino_ds.models.network import Query


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


class DinoTerm(Term):
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
        self.needs = Needs(student=(DINO,), teachers={teacher: (DINO,)}, queries={DINO: Query(HEAD, CLS)})
        self.student_temp, self.centering, self.teacher_crops = student_temp, centering, teacher_crops
        self.entropies = {"teacher_entropy": TargetEntropy(prototypes)}
        if weighs_local:
            self.scalars = ("teacher_entropy", "dino_cross_entropy")
            self.entropies = {"teacher_entropy": TargetEntropy(prototypes, "dino_cross_entropy")}
        self.statistics, self.whole_step = centering.statistics, centering.whole_step

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Comparison]:
        logits = teacher_logits(window, self.teacher, DINO)
        temperature = schedule.teacher_temp
        shift = self.centering.shift(logits, temperature)
        others = schedule.weights[LOCAL_WEIGHT] if self._weighs_local else 1.0
        return [
            Comparison(
                of_batch, shift, temperature, self.student_temp, self.teacher_crops, exclude_own=True, others=others
            )
            for of_batch in logits
        ]

    def loss(self, student: StudentOutputs, targets: Comparison, schedule: ScheduleValues) -> Measured:
        compared = student[DINO]
        assert isinstance(compared, Compared)
        scalars = {"teacher_entropy": compared.entropy}
        if self._weighs_local:
            scalars["dino_cross_entropy"] = compared.loss.detach() / compared.share
        return Measured(compared.loss, scalars)


def build_dino(spec: DinoSpec, parts: TermParts) -> DinoTerm:
    """The term that a spec describes, with new running statistics."""
    prototypes = spec.head[1].prototypes
    center = build_centering(spec.centering, prototypes, parts.device)
    return DinoTerm(prototypes, spec.student_temp, center, parts.taught_crops, spec.teacher, spec.weighs_local)

"""The DINO term: every student crop predicts the teacher's view of its crops, itself excepted.

Source: DINO, equation 3 and algorithm 1 (arXiv 2104.14294); facebookresearch/dino `DINOLoss`; with Sinkhorn-Knopp
facebookresearch/dinov2.
"""

from __future__ import annotations

from collections.abc import Sequence

from dino_ds.config.crops import EMA, Masks
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.method.centering import Centering, build_centering
from dino_ds.method.objective import Measured, Needs, Outputs, StudentOutputs, TargetEntropy, Term, teacher_logits
from dino_ds.method.parts import TermParts
from dino_ds.method.specs.dino import DINO, HEAD, LOCAL_WEIGHT, DinoSpec
from dino_ds.models.base import CLS
from dino_ds.models.logits import Compared, Comparison
from dino_ds.models.network import Query


class DinoTerm(Term):
    """The mean cross-entropy over images and pairs of a teacher's crop and another crop of the student's. FP32.

    teacher_crops: that the teacher sees of each image; the student sees these first. teacher: whose logits are the
    targets. weighs_local: the pairs of the student's other crops weigh as much as the schedule's LOCAL_WEIGHT says, and
    are divided by their number all the same (DINOv3); the scalar dino_cross_entropy is then the mean over pairs by
    weight, of which the entropy of the targets is a part.
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
    return DinoTerm(prototypes, spec.student_temp, center, spec.teacher_crops, spec.teacher, spec.weighs_local)

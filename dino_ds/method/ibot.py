"""The iBOT term: for each hidden patch the student predicts what the teacher sees there.

Source: iBOT (arXiv 2111.07832); facebookresearch/dinov2 `iBOTPatchLoss.forward_masked`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from dino_ds.config.crops import EMA, Masks
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.method.dino import Centering, build_centering
from dino_ds.method.networks import TermParts
from dino_ds.method.objective import Needs, Outputs, StudentOutputs, TargetEntropy, Term, TermLoss, teacher_logits
from dino_ds.method.specs.ours import IBOT, IBOT_HEAD, IbotSpec
from dino_ds.models.base import masked_of
from dino_ds.models.network import Query
from dino_ds.models.prototypes import Compared, Comparison


def ibot_loss(student: Tensor, teacher: Tensor, temperature: float, weights: Tensor, crops: int) -> Tensor:
    """The formula of the paper: cross-entropies of hidden patches, averaged in each crop and over `crops`.

    student: logits (patches, prototypes) of the hidden patches; teacher: probabilities (patches, prototypes) for them;
    weights (patches,): 1 / the number of hidden patches in the patch's crop. A crop without any counts as 0.
    """
    cross_entropy = -(teacher * F.log_softmax(student / temperature, dim=-1)).sum(dim=-1)
    return (cross_entropy * weights).sum() / crops


class IbotTerm(Term):
    """`ibot_loss` over the crops of `group`, masked or not, a few patches at a time as in `DinoTerm`. FP32.

    A crop without hidden patches counts as 0, so that a masked crop weighs the same in every batch. head: name of the
    patch head; teacher: name of the teacher whose logits make the targets.
    """

    group = "global"
    scalars = ("ibot_teacher_entropy", "ibot_cross_entropy")

    def __init__(
        self, prototypes: int, student_temp: float, centering: Centering, head: str = IBOT_HEAD, teacher: str = EMA
    ) -> None:
        self.student_temp, self.centering, self.teacher = student_temp, centering, teacher
        self.needs = Needs(
            student=(IBOT,), teachers={teacher: (IBOT,)}, queries={IBOT: Query(head, masked_of(self.group))}
        )
        self.entropies = {"ibot_teacher_entropy": TargetEntropy(prototypes, "ibot_cross_entropy", "masked patch")}
        self.statistics, self.whole_step = centering.statistics, centering.whole_step

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Comparison]:
        logits = teacher_logits(window, self.teacher, IBOT)
        temperature = schedule.teacher_temp
        shift = self.centering.shift(logits, temperature)
        return [
            Comparison(
                of_batch,
                shift,
                temperature,
                self.student_temp,
                weights=of_crops[self.group]["weights"],
                divisor=float(len(of_crops[self.group]["mask"])),
            )
            for of_batch, of_crops in zip(logits, masks, strict=True)
        ]

    def loss(self, student: StudentOutputs, targets: Comparison, schedule: ScheduleValues) -> TermLoss:
        """The loss; as scalars the entropy of the targets and the cross-entropy, means over the masked crops."""
        compared = student[IBOT]
        assert isinstance(compared, Compared) and targets.weights is not None and targets.divisor is not None
        mean = compared.loss.detach() * (targets.divisor / targets.weights.sum().clamp_min(1e-9))
        return TermLoss(compared.loss, {"ibot_teacher_entropy": compared.entropy, "ibot_cross_entropy": mean})


def build_ibot(spec: IbotSpec, parts: TermParts) -> IbotTerm:
    name, head = spec.head
    center = build_centering(spec.centering, head.prototypes, parts.device)
    return IbotTerm(head.prototypes, spec.student_temp, center, name, spec.teacher)

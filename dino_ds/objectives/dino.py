"""The DINO objective: every student crop predicts the teacher's view of the two global crops, itself excepted.

Source: DINO, equation 3 and algorithm 1 (arXiv 2104.14294); facebookresearch/dino `DINOLoss`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dino_ds.config.crops import EMA
from dino_ds.objectives.base import Measured, Needs, Outputs, Term
from dino_ds.objectives.running import RunningMean
from dino_ds.schedules import ScheduleValues

HEAD = "head"
"""The name of the head whose logits are compared, and of its output."""


class DinoTerm(Term):
    """Center and sharpen the teacher's logits of the crops it sees, compare with every student crop. All in FP32."""

    needs = Needs(student=(HEAD,), teachers={EMA: (HEAD,)})
    scalars = ("teacher_entropy",)

    def __init__(
        self,
        prototypes: int,
        student_temp: float,
        center_momentum: float,
        teacher_crops: int = 2,
        device: torch.device | str = "cpu",
    ) -> None:
        self.student_temp, self.teacher_crops = student_temp, teacher_crops
        self.center = RunningMean(prototypes, center_momentum, device)
        self.entropies = {"teacher_entropy": prototypes}
        self.statistics = {"center": self.center}

    def targets(self, teachers: Outputs, schedule: ScheduleValues) -> tuple[Tensor, Tensor]:
        """Logits (g * b, k) of the g crops that the teacher sees -> probabilities (g, b, k) and their mean entropy.

        The center used is the one of the last applied step; these logits join the next one.
        """
        logits = teachers[EMA][HEAD]
        probs, entropy = teacher_targets(logits, self.center.value, schedule.teacher_temp)
        self.center.gather(logits)
        return probs.view(self.teacher_crops, -1, probs.shape[-1]), entropy

    def loss(self, student: dict[str, Tensor], targets: tuple[Tensor, Tensor], schedule: ScheduleValues) -> Measured:
        """Student logits (v * b, k), crop-major, the teacher's crops first -> mean cross-entropy over pairs."""
        probs, entropy = targets
        logits = student[HEAD].view(-1, *probs.shape[1:])
        return Measured(multicrop_cross_entropy(logits, probs, self.student_temp), {"teacher_entropy": entropy})


@torch.no_grad()
def teacher_targets(teacher_logits: Tensor, center: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logits (rows, k) -> centered, sharpened probabilities (rows, k) FP32, and their mean entropy (scalar)."""
    log_probs = F.log_softmax((teacher_logits.float() - center) / temperature, dim=-1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs).sum(dim=-1).mean()
    return probs, entropy


def multicrop_cross_entropy(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Mean over the g (v - 1) pairs of different crops and the images of H(target, softmax(logit / temperature)).

    logits (v, b, k), the teacher's crops first; targets (g, b, k) probabilities, without gradient -> scalar, FP32.

    A cross-entropy is linear in its target and targets sum to 1, so the pairs of one student crop add up:
    sum of its pairs = w lse(l) - <T, l>, T = the sum of the targets it is compared with, w = their number.
    Each crop's logits are visited once, one crop's FP32 copy at a time, and the backward pass writes the gradient in
    place of the logits: never is there a second (v, b, k). So one backward pass, and no use of the logits after it.
    """
    return _MultiCropCrossEntropy.apply(logits, targets, temperature)


class _MultiCropCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        crops, images, _ = logits.shape
        lse = torch.empty(crops, images, dtype=torch.float32, device=logits.device)
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        for s, (target, weight) in enumerate(_summed_targets(targets, crops)):
            scaled = logits[s].float() / temperature
            lse[s] = torch.logsumexp(scaled, dim=-1)
            total += (weight * lse[s] - scaled.mul_(target).sum(dim=-1)).sum()
        ctx.save_for_backward(logits, targets, lse)
        ctx.temperature = temperature
        return total / _pairs(targets, crops)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        assert ctx.temperature is not None, "the first backward pass has overwritten the logits"
        logits, targets, lse = ctx.saved_tensors
        crops = logits.shape[0]
        scale = grad_outputs[0] / (_pairs(targets, crops) * ctx.temperature)
        grad = logits.detach()
        for s, (target, weight) in enumerate(_summed_targets(targets, crops)):
            probs = grad[s].float()  # FP32 logits: the very memory
            probs.div_(ctx.temperature).sub_(lse[s].unsqueeze(-1)).exp_()
            grad[s] = probs.mul_(weight).sub_(target).mul_(scale)
        ctx.temperature = None
        return grad, None, None


def _summed_targets(targets: Tensor, crops: int) -> list[tuple[Tensor, int]]:
    """For each student crop the sum (b, k) of the targets that it is compared with, and how many they are."""
    seen = len(targets)
    others = [_sum([target for t, target in enumerate(targets) if t != s]) for s in range(seen)]
    return [(other, seen - 1) for other in others] + [(_sum(list(targets)), seen)] * (crops - seen)


def _sum(targets: Sequence[Tensor]) -> Tensor:
    """(b, k) each, at least one; no copy of a single one."""
    total = targets[0]
    for target in targets[1:]:
        total = total + target
    return total


def _pairs(targets: Tensor, crops: int) -> int:
    """Pairs of different crops, times images."""
    return targets.shape[0] * (crops - 1) * targets.shape[1]

"""The DINO objective: every student crop predicts the teacher's view of the two global crops, itself excepted.

Source: DINO, equation 3 and algorithm 1 (arXiv 2104.14294); facebookresearch/dino `DINOLoss`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dino_ds.objective.center import Center

GLOBAL_VIEWS = 2


class DinoLossOutput(NamedTuple):
    """loss: mean cross-entropy over pairs of different views and images (scalar, with gradient);
    teacher_entropy: mean entropy of the teacher's targets (scalar, no gradient), so KL = loss - teacher_entropy."""

    loss: Tensor
    teacher_entropy: Tensor


class DinoLoss:
    """Center and sharpen the teacher, compare with every student crop. All arithmetic in FP32."""

    def __init__(
        self, prototypes: int, student_temp: float, center_momentum: float, device: torch.device | str = "cpu"
    ) -> None:
        self.student_temp = student_temp
        self.center = Center(prototypes, center_momentum, device)

    def __call__(self, student_logits: Tensor, teacher_logits: Tensor, teacher_temp: float) -> DinoLossOutput:
        """student_logits (v * b, k), teacher_logits (2 * b, k), both view-major, global views first.

        The center used is the one of the last applied step; these teacher logits join the next one.
        """
        targets, entropy = teacher_targets(teacher_logits, self.center.value, teacher_temp)
        self.center.gather(teacher_logits)
        images = teacher_logits.shape[0] // GLOBAL_VIEWS
        k = teacher_logits.shape[-1]
        loss = multicrop_cross_entropy(
            student_logits.view(-1, images, k), targets.view(GLOBAL_VIEWS, images, k), self.student_temp
        )
        return DinoLossOutput(loss, entropy)


@torch.no_grad()
def teacher_targets(teacher_logits: Tensor, center: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logits (rows, k) -> centered, sharpened probabilities (rows, k) FP32, and their mean entropy (scalar)."""
    log_probs = F.log_softmax((teacher_logits.float() - center) / temperature, dim=-1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs).sum(dim=-1).mean()
    return probs, entropy


def multicrop_cross_entropy(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Mean over the 2 (v - 1) pairs of different views and the images of H(target, softmax(logit / temperature)).

    logits (v, b, k), global views first; targets (2, b, k) probabilities, without gradient -> scalar, FP32.

    A cross-entropy is linear in its target and targets sum to 1, so the pairs of one student crop add up:
    sum of its pairs = w lse(l) - <T, l>, T = the sum of the targets it is compared with, w = their number.
    Each crop's logits are visited once, one crop's FP32 copy at a time, and the backward pass writes the gradient in
    place of the logits: never is there a second (v, b, k). So one backward pass, and no use of the logits after it.
    """
    return _MultiCropCrossEntropy.apply(logits, targets, temperature)


class _MultiCropCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        views, images, _ = logits.shape
        lse = torch.empty(views, images, dtype=torch.float32, device=logits.device)
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        for s, (target, weight) in enumerate(_summed_targets(targets, views)):
            scaled = logits[s].float() / temperature
            lse[s] = torch.logsumexp(scaled, dim=-1)
            total += (weight * lse[s] - scaled.mul_(target).sum(dim=-1)).sum()
        ctx.save_for_backward(logits, targets, lse)
        ctx.temperature = temperature
        return total / _terms(views, images)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        assert ctx.temperature is not None, "the first backward pass has overwritten the logits"
        logits, targets, lse = ctx.saved_tensors
        views, images, _ = logits.shape
        scale = grad_outputs[0] / (_terms(views, images) * ctx.temperature)
        grad = logits.detach()
        for s, (target, weight) in enumerate(_summed_targets(targets, views)):
            probs = grad[s].float()  # FP32 logits: the very memory
            probs.div_(ctx.temperature).sub_(lse[s].unsqueeze(-1)).exp_()
            grad[s] = probs.mul_(weight).sub_(target).mul_(scale)
        ctx.temperature = None
        return grad, None, None


def _summed_targets(targets: Tensor, views: int) -> list[tuple[Tensor, int]]:
    """For each student crop the sum (b, k) of the targets that it is compared with, and how many they are."""
    both = targets[0] + targets[1]
    return [(targets[1], 1), (targets[0], 1), *[(both, GLOBAL_VIEWS)] * (views - GLOBAL_VIEWS)]


def _terms(views: int, images: int) -> int:
    """Pairs of different views, times images."""
    return GLOBAL_VIEWS * (views - 1) * images

"""Gram anchoring: keeps the similarities between the patches of an image close to those of a teacher.

Source: DINOv3, section 4 (arXiv 2508.10104). Only similarities are compared, so the teacher may have another width, and
features may rotate freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dino_ds.basics.rehearsal import device_kind
from dino_ds.config.crops import GLOBAL, Masks
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.method.objective import Measured, Needs, Outputs, StudentOutputs, Term
from dino_ds.method.parts import TermParts
from dino_ds.method.specs.gram import GRAM, GramSpec
from dino_ds.models.base import patches_of, resized_patches
from dino_ds.models.logits import tf32

# Bytes of the student's similarities in memory at a time; the teacher's take as much again.
_PIECE = {"cpu": 4 * 2**20, "cuda": 128 * 2**20}


def gram_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """The formula of the paper: the mean squared difference of student's and teacher's cosines over all pairs of rows.

    student (matrices, n, d), teacher (matrices, n, d').
    """
    cosines, wanted = (unit @ unit.mT for unit in (_unit(student), _unit(teacher)))
    return (cosines - wanted).square().mean()


class GramTerm(Term):
    """`gram_loss` of the patches of each image, in tiles. FP32.

    The student's patches are those of its global crops, hidden ones too. Where the schedule's weight is 0 nothing is
    computed, and the loss is 0.

    Args:
        teacher: name of the teacher that gives the patches to compare with.
        seen: group of the teacher's crops, the same image regions in this size or another.
    """

    def __init__(self, teacher: str, seen: str) -> None:
        self._teacher, self._seen, self._own = teacher, patches_of(seen), patches_of("global")
        self.needs = Needs(student=(self._own,), teachers={teacher: (self._seen,)})

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Any]:
        """The teacher's patches (images, n, d) of each micro-batch, on its own grid; None while the weight is 0."""
        if not schedule.weights[GRAM]:
            return [None] * len(window)
        return [teachers[self._teacher][self._seen] for teachers in window]

    def loss(self, student: StudentOutputs, targets: Tensor | None, schedule: ScheduleValues) -> Measured:
        features = student[self._own]
        assert isinstance(features, Tensor)
        with torch.autocast(features.device.type, enabled=False):
            if targets is None:  # every parameter must have a gradient: ZeRO 3 would repeat an old one
                return Measured(0.0 * features.float().sum(), {})
            wanted = resized_patches(targets, features.shape[1])
            return Measured(tiled_gram_loss(features, wanted), {})


def build_gram(spec: GramSpec, parts: TermParts) -> GramTerm:
    """The term that a spec describes."""
    groups = (group.name for group in parts.recipe.groups if GRAM in group.teachers)
    return GramTerm(spec.teacher, next(groups, GLOBAL))


def tiled_gram_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """`gram_loss`, computing in the same pass its gradient, which only the student has.

    At most `_PIECE` bytes of a matrix of cosines are in memory at once.
    """
    low = student.dtype != torch.float32
    loss: Tensor = _GramLoss.apply(_unit(student), _unit(teacher.detach()), low)
    return loss


def _unit(rows: Tensor) -> Tensor:
    return F.normalize(rows.float(), dim=-1)


class _GramLoss(torch.autograd.Function):
    """The loss of unit rows x, L = sum (x x^T - t)^2 / count; its gradient is 4 (x x^T - t) x / count, as both are
    symmetric."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, low: bool) -> Tensor:
        matrices, n, _ = x.shape
        size = max(1, _PIECE.get(device_kind(x.device.type), _PIECE["cuda"]) // (4 * n))  # rows of similarities
        together, rows = max(1, size // n), min(size, n)
        grad = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        total, scale = x.new_zeros(()), 4 / (matrices * n * n)
        with tf32(low):
            for first in range(0, matrices, together):
                part = slice(first, min(first + together, matrices))
                for start in range(0, n, rows):
                    block = slice(start, min(start + rows, n))
                    cosines = x[part, block] @ x[part].mT
                    wanted = y[part, block] @ y[part].mT
                    difference = cosines.sub_(wanted)
                    total += torch.linalg.vecdot(difference, difference).sum()
                    if grad is not None:
                        grad[part, block] = (difference @ x[part]).mul_(scale)
        ctx.save_for_backward(grad)
        return total * (scale / 4)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grad_outputs[0], None, None

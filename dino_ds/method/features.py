"""Distillation of features: the student's, through a linear layer, point where a teacher's do.

Source: AM-RADIO (arXiv 2312.06709), section 3: cosine loss of the summary features; here of the patches too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.config.crops import Masks
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.method.objective import Measured, Needs, Outputs, StudentOutputs, Term
from dino_ds.method.specs.distill import FROZEN
from dino_ds.models.base import resized_patches
from dino_ds.models.network import Query


class FeatureTerm(Term):
    """1 - cosine, mean over crops and patches. FP32.

    name: of the output of `head`, one layer from the student's `feature` ("cls/GROUP" or "patches/GROUP") to `width`
    numbers, which are the teacher's. Patches of another grid than the student's are resized to it.
    """

    def __init__(self, name: str, feature: str, head: str, width: int) -> None:
        self.needs = Needs((name,), {FROZEN: (feature,)}, {name: Query(head, feature, width)})
        self._name, self._feature = name, feature

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Tensor]:
        return [_tensor(teachers[FROZEN][self._feature]) for teachers in window]

    def loss(self, student: StudentOutputs, targets: Tensor, schedule: ScheduleValues) -> Measured:
        found = _tensor(student[self._name])
        with torch.autocast(found.device.type, enabled=False):
            wanted = targets.float()
            if wanted.ndim == 3:
                wanted = resized_patches(wanted, found.shape[1])
            return Measured((1 - F.cosine_similarity(found.float(), wanted, dim=-1)).mean(), {})


def _tensor(output: object) -> Tensor:
    assert isinstance(output, Tensor)
    return output

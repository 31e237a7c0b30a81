"""The parts of a training step as one would write them first: the start of the ladder.

They fit into `TrainingStep` in place of ours, so that the step around them is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.config.ds_config import PerformanceOptions
from dino_ds.config.recipe import Recipe
from dino_ds.engine.device import device
from dino_ds.engine.engine import Progress
from dino_ds.engine.masters import WholeMasters
from dino_ds.engine.optim import apply_settings, parameter_groups
from dino_ds.models.base import Masks
from dino_ds.models.network import Network, Output
from dino_ds.models.prototypes import Prototypes
from dino_ds.objectives.base import Measured, Outputs, StudentOutputs, Term
from dino_ds.objectives.dino import DINO, DinoTerm
from dino_ds.objectives.running import RunningMean
from dino_ds.schedules import ScheduleValues
from dino_ds.teachers.ema import EmaTeacher


class PairwiseTerm(Term):
    """A log-softmax for every pair of crops, as facebookresearch/dino's `DINOLoss`, without the entropy.

    For a network with `NormalisedPrototypes`.
    """

    needs = DinoTerm.needs
    scalars = DinoTerm.scalars

    def __init__(self, prototypes: int, student_temp: float, center_momentum: float, teacher_crops: int = 2) -> None:
        self.student_temp, self.teacher_crops = student_temp, teacher_crops
        self.center = RunningMean(prototypes, center_momentum, device())
        self.statistics = {"center": self.center}

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Tensor]:
        return [self._probs(cast(Tensor, teachers["ema"][DINO]), schedule) for teachers in window]

    def _probs(self, logits: Tensor, schedule: ScheduleValues) -> Tensor:
        probs = F.softmax((logits - self.center.value) / schedule.teacher_temp, dim=-1)
        self.center.gather(logits)
        return probs.view(self.teacher_crops, -1, probs.shape[-1])

    def loss(self, student: StudentOutputs, targets: Tensor, schedule: ScheduleValues) -> Measured:
        probs = targets
        logits = (cast(Tensor, student[DINO]) / self.student_temp).split(probs.shape[1])
        losses = [
            torch.sum(-target * F.log_softmax(crop, dim=-1), dim=-1).mean()
            for t, target in enumerate(probs)
            for s, crop in enumerate(logits)
            if s != t
        ]
        return Measured(torch.stack(losses).mean(), {"teacher_entropy": probs.new_zeros(())})


class NormalisedPrototypes(Prototypes):
    """All logits in one matrix; normalises the whole weight in each forward pass and differentiates through that."""

    def forward(self, z: Tensor, comparison: object = None) -> Tensor:  # type: ignore[override]
        return F.linear(F.normalize(z, dim=-1), F.normalize(self.weight, dim=-1))


def normalise_prototypes(network: Network) -> None:
    """Put `NormalisedPrototypes` into the network, with its weight."""
    head: Any = network.head
    k, bottleneck = head.prototypes.weight.shape
    plain = NormalisedPrototypes(bottleneck, k)
    plain.weight = head.prototypes.weight
    head.prototypes = plain


class LoopTeacher(EmaTeacher):
    """Moves its parameters one by one: a product, a temporary, a sum; as facebookresearch/dino."""

    def __init__(self, network: Network, masters: Sequence[WholeMasters]) -> None:
        parameters = dict(network.named_parameters())
        self._pairs = [(parameters[name].data, student) for m in masters for name, student in m.parameters]
        super().__init__(network, masters)

    @torch.no_grad()
    def move(self, momentum: float) -> None:
        for teacher, student in self._pairs:
            teacher.mul_(momentum).add_((1 - momentum) * student.detach())


class PlainEngine:
    """The student with torch's AdamW and no engine around it: the calls of `Engine` that a step makes, on one process.

    `fused` False takes torch's loop over the parameters; `clipping` of the global norm, 0 = none. FP32.
    """

    def __init__(self, network: Network, recipe: Recipe, clipping: float, fused: bool, device: torch.device) -> None:
        self.device = device
        # What a step asks of it: what is compiled (nothing), and how many micro-batches it has.
        self.config = SimpleNamespace(performance=PerformanceOptions(), accumulation=1)
        self._network = network.to(device).train()
        self._clipping = clipping
        options = recipe.optimizer
        self._optimizer = torch.optim.AdamW(
            parameter_groups(self._network),
            lr=0.0,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            fused=fused,
            foreach=False,
        )

    def __call__(self, *inputs: Any) -> dict[str, Output]:
        outputs: dict[str, Output] = self._network(*inputs)
        return outputs

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> Progress:
        if self._clipping:
            torch.nn.utils.clip_grad_norm_(self._network.parameters(), self._clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Progress.STEPPED

    def set_groups(self, settings: dict[str, dict[str, float]]) -> None:
        apply_settings(self._optimizer.param_groups, settings)

    def freeze_prototypes(self, frozen: bool) -> None:
        self._network.freeze_prototypes(frozen)

    def freeze_backbone(self, frozen: bool) -> None:
        self._network.freeze_backbone(frozen)

    def buffers(self, saved: bool = False) -> dict[str, Tensor]:
        return dict(self._network.named_buffers())

    def masters(self) -> list[WholeMasters]:
        return [WholeMasters(list(self._network.named_parameters()))]

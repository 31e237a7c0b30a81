"""The parts of a training step as one would write them first: the start of the ladder.

They fit into `DinoStep` in place of ours, so that the step around them is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.config.ds_config import PerformanceOptions
from dino_ds.config.recipe import Recipe
from dino_ds.engine.engine import Progress
from dino_ds.engine.masters import WholeMasters
from dino_ds.engine.optim import parameter_groups
from dino_ds.models.head import Prototypes
from dino_ds.models.network import DinoNetwork
from dino_ds.objective.dino import DinoLoss, DinoLossOutput
from dino_ds.teacher import Teacher


class PairwiseLoss(DinoLoss):
    """A log-softmax for every pair of crops, as facebookresearch/dino's `DINOLoss`, without the entropy."""

    def __call__(self, student_logits: Tensor, teacher_logits: Tensor, teacher_temp: float) -> DinoLossOutput:
        targets = F.softmax((teacher_logits - self.center.value) / teacher_temp, dim=-1).chunk(2)
        self.center.gather(teacher_logits)
        student = (student_logits / self.student_temp).split(len(targets[0]))
        losses = [
            torch.sum(-target * F.log_softmax(logits, dim=-1), dim=-1).mean()
            for t, target in enumerate(targets)
            for s, logits in enumerate(student)
            if s != t
        ]
        return DinoLossOutput(torch.stack(losses).mean(), student_logits.new_zeros(()))


class NormalisedPrototypes(Prototypes):
    """Normalises the whole weight in each forward pass, and differentiates through that."""

    def forward(self, z: Tensor) -> Tensor:
        return F.linear(F.normalize(z, dim=-1), F.normalize(self.weight, dim=-1))


def normalise_prototypes(network: DinoNetwork) -> None:
    """Put `NormalisedPrototypes` into the network, with its weight."""
    k, bottleneck = network.head.prototypes.weight.shape
    plain = NormalisedPrototypes(bottleneck, k)
    plain.weight = network.head.prototypes.weight
    network.head.prototypes = plain


class LoopTeacher(Teacher):
    """Moves its parameters one by one: a product, a temporary, a sum; as facebookresearch/dino."""

    def __init__(self, network: DinoNetwork, masters: Sequence[WholeMasters]) -> None:
        parameters = dict(network.named_parameters())
        self._pairs = [(parameters[name].data, student) for m in masters for name, student in m.parameters]
        super().__init__(network, masters)

    @torch.no_grad()
    def update(self, momentum: float) -> None:
        for teacher, student in self._pairs:
            teacher.mul_(momentum).add_((1 - momentum) * student.detach())


class PlainEngine:
    """The student with torch's AdamW and no engine around it: the calls of `Engine` that a step makes, on one process.

    `fused` False takes torch's loop over the parameters; `clipping` of the global norm, 0 = none. FP32.
    """

    def __init__(
        self, network: DinoNetwork, recipe: Recipe, clipping: float, fused: bool, device: torch.device
    ) -> None:
        self.device = device
        self.config = SimpleNamespace(performance=PerformanceOptions())  # a step asks what is compiled: nothing
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

    def __call__(self, crops: list[Tensor], drop_keys: Tensor | None) -> Tensor:
        return self._network(crops, drop_keys)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> Progress:
        if self._clipping:
            torch.nn.utils.clip_grad_norm_(self._network.parameters(), self._clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Progress.STEPPED

    def set_groups(self, settings: dict[str, dict[str, float]]) -> None:
        for group in self._optimizer.param_groups:
            group.update(settings[group["name"]])

    def freeze_prototypes(self, frozen: bool) -> None:
        self._network.freeze_prototypes(frozen)

    def freeze_backbone(self, frozen: bool) -> None:
        self._network.freeze_backbone(frozen)

    def masters(self) -> list[WholeMasters]:
        return [WholeMasters(list(self._network.named_parameters()))]

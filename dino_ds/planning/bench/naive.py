"""The parts of a training step as one would write them first: the start of the ladder.

They fit into `TrainingStep` in place of ours, so that the step around them is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.config.crops import EMA, Masks, teacher_sizes
from dino_ds.config.ds_values import PerformanceOptions
from dino_ds.config.recipe import Recipe
from dino_ds.engine.clipping import parts_of
from dino_ds.engine.device import device
from dino_ds.engine.engine import Progress
from dino_ds.engine.masters import WholeMasters
from dino_ds.engine.optim import apply_settings, build_optimizer
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.method.build import build_network, build_objective, build_schedules
from dino_ds.method.dino import DinoTerm, dino_loss
from dino_ds.method.ema import EmaTeacher, TeacherOptions
from dino_ds.method.ibot import IbotTerm, ibot_loss
from dino_ds.method.networks import optimizer_options
from dino_ds.method.objective import Measured, Needs, Objective, Outputs, StudentOutputs, Term
from dino_ds.method.running import RunningMean
from dino_ds.method.specs.dino import DINO, HEAD, IBOT, LOCAL_WEIGHT
from dino_ds.method.step import TrainingStep
from dino_ds.method.teacher import Teachers
from dino_ds.models.base import CLS, masked_of
from dino_ds.models.batch_norm import unsynced_statistics
from dino_ds.models.network import Network, Output, Query
from dino_ds.models.prototypes import Prototypes
from dino_ds.planning.measure.trial import EPOCH_STEPS

CLIPPING = 3.0


def build_plain_step(
    recipe: Recipe, levers: PerformanceOptions, tiled_loss: bool, fused_adamw: bool, one_pass_ema: bool
) -> TrainingStep:
    """A training step without an engine: FP32, on one process; of the parts below where ours are not asked for."""
    network = build_network(recipe, levers)
    objective = build_objective(recipe, device()) if tiled_loss else plain_objective(recipe)
    if not tiled_loss:
        normalise_prototypes(network)
    copied = copy.deepcopy(network).to(device())
    engine: Any = PlainEngine(network, recipe, CLIPPING, fused_adamw, device())
    options = TeacherOptions(batch_norm=recipe.teacher.batch_norm)
    teacher = (EmaTeacher if one_pass_ema else LoopTeacher)(copied, engine.masters(), options, engine.buffers)
    teachers, groups = Teachers({EMA: teacher}, recipe.groups), recipe.groups
    return TrainingStep(engine, teachers, objective, build_schedules(recipe, EPOCH_STEPS), groups)


class PlainCenter:
    """Probabilities after the running mean is taken off, as facebookresearch/dino's `DINOLoss`."""

    def __init__(self, name: str, prototypes: int, momentum: float) -> None:
        self.center = RunningMean(prototypes, momentum, device())
        self.statistics = {name: self.center}

    @torch.no_grad()
    def __call__(self, logits: Tensor, temperature: float) -> Tensor:
        probs = F.softmax((logits - self.center.value) / temperature, dim=-1)
        self.center.gather(logits)
        return probs


class PlainSinkhorn:
    """Sinkhorn-Knopp of a whole matrix, as facebookresearch/dinov2's `sinkhorn_knopp_teacher` on one process."""

    statistics: Mapping[str, RunningMean] = MappingProxyType({})

    @torch.no_grad()
    def __call__(self, logits: Tensor, temperature: float) -> Tensor:
        q = torch.exp(logits.float() / temperature).t()  # (k, n)
        rows = q.shape[1]
        q /= q.sum()
        for _ in range(3):
            q /= q.sum(dim=1, keepdim=True)
            q /= len(q)
            q /= q.sum(dim=0, keepdim=True)
            q /= rows
        q *= rows
        return q.t()


class PairwiseTerm(Term):
    """`dino_loss` as it stands, without the entropy.

    For a network with `NormalisedPrototypes`.
    """

    needs = Needs(student=(DINO,), teachers={EMA: (DINO,)}, queries={DINO: Query(HEAD, CLS)})
    scalars = DinoTerm.scalars

    def __init__(self, student_temp: float, centering: PlainCenter | PlainSinkhorn, teacher_crops: int = 2) -> None:
        self.student_temp, self.teacher_crops, self._centering = student_temp, teacher_crops, centering
        self.statistics = centering.statistics

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Tensor]:
        probs = [self._centering(cast(Tensor, teachers[EMA][DINO]), schedule.teacher_temp) for teachers in window]
        return [rows.view(self.teacher_crops, -1, rows.shape[-1]) for rows in probs]

    def loss(self, student: StudentOutputs, targets: Tensor, schedule: ScheduleValues) -> Measured:
        logits = cast(Tensor, student[DINO]).unflatten(0, (-1, targets.shape[1]))
        loss = dino_loss(logits, targets, self.student_temp, schedule.weights.get(LOCAL_WEIGHT, 1.0))
        return Measured(loss, {"teacher_entropy": targets.new_zeros(())})


class PlainIbotTerm(Term):
    """`ibot_loss` as it stands, without the entropy.

    For a network with `NormalisedPrototypes`. head: the name of the head of patches.
    """

    scalars = IbotTerm.scalars

    def __init__(self, student_temp: float, centering: PlainCenter | PlainSinkhorn, head: str) -> None:
        self.student_temp, self._centering = student_temp, centering
        self.needs = Needs((IBOT,), {EMA: (IBOT,)}, {IBOT: Query(head, masked_of("global"))})
        self.statistics = centering.statistics

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Any]:
        probs = [self._centering(cast(Tensor, teachers[EMA][IBOT]), schedule.teacher_temp) for teachers in window]
        return list(zip(probs, (of_crops["global"] for of_crops in masks), strict=True))

    def loss(self, student: StudentOutputs, targets: Any, schedule: ScheduleValues) -> Measured:
        probs, masks = targets
        logits = cast(Tensor, student[IBOT])
        loss = ibot_loss(logits, probs, self.student_temp, masks["weights"], len(masks["mask"]))
        return Measured(loss, dict.fromkeys(self.scalars, probs.new_zeros(())))


def plain_objective(recipe: Recipe) -> Objective:
    """The recipe's objective in plain terms; KoLeo is plain as it is."""
    how, ours = recipe.objective, build_objective(recipe, device())
    terms = dict(ours.terms)

    def centering(name: str, prototypes: int) -> PlainCenter | PlainSinkhorn:
        return PlainSinkhorn() if how.centering == "sinkhorn" else PlainCenter(name, prototypes, how.center_momentum)

    if DINO in terms:
        crops = len(teacher_sizes(recipe.groups))
        terms[DINO] = PairwiseTerm(how.student_temp, centering("center", recipe.head.prototypes), crops)
    if IBOT in terms:
        head = ours.queries[IBOT].head
        sizes = recipe.head if head == HEAD else recipe.ibot_head
        terms[IBOT] = PlainIbotTerm(how.student_temp, centering("ibot_center", sizes.prototypes), head)
    return Objective(terms)


class NormalisedPrototypes(Prototypes):
    """All logits in one matrix; normalises the whole weight in each forward pass and differentiates through that."""

    def forward(self, z: Tensor, comparison: object = None) -> Tensor:  # type: ignore[override]
        weight = self.weight if self.free else F.normalize(self.weight, dim=-1)
        return F.linear(F.normalize(z, dim=-1), weight if self.lengths is None else weight * self.lengths)


def normalise_prototypes(network: Network) -> None:
    """Put `NormalisedPrototypes` into the heads of the network, with their weights."""
    for head in network.heads().values():
        ours: Any = head
        k, bottleneck = ours.prototypes.weight.shape
        plain = NormalisedPrototypes(bottleneck, k, ours.prototypes.lengths is not None, ours.prototypes.free)
        plain.weight, plain.lengths = ours.prototypes.weight, ours.prototypes.lengths
        ours.prototypes = plain


class LoopTeacher(EmaTeacher):
    """Moves its parameters one by one: a product, a temporary, a sum; as facebookresearch/dino."""

    def __init__(self, network: Network, masters: Sequence[WholeMasters], *more: Any) -> None:
        parameters = dict(network.named_parameters())
        self._pairs = [(parameters[name].data, student) for m in masters for name, student in m.parameters]
        super().__init__(network, masters, *more)

    @torch.no_grad()
    def _move_weights(self, momentum: float) -> None:
        for teacher, student in self._pairs:
            teacher.mul_(momentum).add_((1 - momentum) * student.detach())


class PlainEngine:
    """The student with torch's optimizer and no engine around it: on one process what a step calls of `Engine`.

    `fused` False takes torch's loop over the parameters; `clipping` of the norm of all or, by the recipe, of each
    part; 0 = none. FP32.
    """

    def __init__(self, network: Network, recipe: Recipe, clipping: float, fused: bool, device: torch.device) -> None:
        self.device = device
        # What a step asks of it: what is compiled (nothing), and how many micro-batches it has.
        self.config = SimpleNamespace(performance=PerformanceOptions(), accumulation=1)
        self._network = network.to(device).train()
        self._clipping = clipping
        self._optimizer = build_optimizer(self._network, optimizer_options(recipe.optimizer), fused)

    def __call__(self, *inputs: Any) -> dict[str, Output]:
        outputs: dict[str, Output] = self._network(*inputs)
        return outputs

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> Progress:
        if self._clipping:
            for part in parts_of(self._optimizer, self._network):
                torch.nn.utils.clip_grad_norm_(part, self._clipping)
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

    def unsynced_statistics(self) -> list[Tensor]:
        return unsynced_statistics(self._network)

    def masters(self) -> list[WholeMasters]:
        return [WholeMasters(list(self._network.named_parameters()))]

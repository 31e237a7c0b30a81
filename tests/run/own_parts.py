"""A loss term and a teacher as a user writes them: a spec each, found by the recipe, and nothing of the package."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from dino_ds.basics.own_code import allow_code
from dino_ds.config.crops import Masks
from dino_ds.config.fields import Ramp
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.method.objective import Needs, Outputs, StudentOutputs, Term, TermLoss
from dino_ds.method.specs import base, ours
from dino_ds.models.base import patches_of

PATCHES = patches_of("global")
_TERM = {"spec": "tests.run.own_parts:VarianceSpec", "weight": "0..0.5 over 4 steps", "floor": 0.2}
_SLOW = {"spec": "tests.run.own_parts:LinearEmaSpec", "momentum": 0.9, "momentum_end": 0.8}
OWN = {"objective.terms": json.dumps({"variance": _TERM}), "teacher.others": json.dumps({"slow": _SLOW})}
"""Keys of a recipe that has both."""
allow_code(OWN.values())


@dataclass(frozen=True)
class VarianceSpec(base.TermSpec):
    """The variance of patch features is to be a slow teacher's, and more than `floor`."""

    floor: float = 0.1
    teacher: str = "slow"

    reads_patches: ClassVar[bool] = True

    @property
    def title(self) -> str:
        return "Variance of patches"

    def build(self, parts: Any) -> Term:
        return VarianceTerm(self.floor, self.teacher)


class VarianceTerm(Term):
    scalars = ("variance",)

    def __init__(self, floor: float, teacher: str) -> None:
        self.floor, self.teacher = floor, teacher
        self.needs = Needs(student=(PATCHES,), teachers={teacher: (PATCHES,)})

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Tensor]:
        return [_variance(teachers[self.teacher][PATCHES]) for teachers in window]

    def loss(self, student: StudentOutputs, targets: Tensor, schedule: ScheduleValues) -> TermLoss:
        variance = _variance(student[PATCHES])
        loss = (variance - targets).square().mean() + F.relu(self.floor - variance).mean()
        return TermLoss(loss, {"variance": variance.detach().mean()})


def _variance(patches: Any) -> Tensor:
    """Patches (images, n, d) -> their variance, (d,)."""
    found: Tensor = patches.float().flatten(0, 1).var(dim=0)
    return found


@dataclass(frozen=True)
class GreedySpec(VarianceSpec):
    """A term whose scheduled number has the name of another term."""

    takes: str = "dino"

    @property
    def scheduled(self) -> Mapping[str, Ramp]:
        return {self.takes: Ramp(3.0)}


@dataclass(frozen=True)
class LinearEmaSpec(ours.EmaSpec):
    """An EMA teacher whose momentum moves along a line."""

    def momentum_at(self, step: int, steps: int) -> float:
        return self.momentum + (self.momentum_end - self.momentum) * step / steps


@dataclass(frozen=True)
class EmptySpec(VarianceSpec):
    """A term that builds nothing."""

    def build(self, parts: Any) -> Any:
        return None


@dataclass(frozen=True)
class AnySpec(VarianceSpec):
    """A term that reads any feature and measures any scalar."""

    feature: str = PATCHES
    scalar: str = "variance"
    problem: str = ""

    def problems(self, recipe: Any) -> list[str]:
        return [self.problem] * bool(self.problem)

    def build(self, parts: Any) -> Term:
        term = VarianceTerm(self.floor, self.teacher)
        term.scalars, term.needs = (self.scalar,), Needs((self.feature,), {self.teacher: (PATCHES,)})
        return term

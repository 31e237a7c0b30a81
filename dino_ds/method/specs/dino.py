"""Descriptions of the terms that compare a teacher's and the student's prototypes: DINO of crops, iBOT of patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dino_ds.config.crops import EMA
from dino_ds.config.fields import Ramp
from dino_ds.config.sections import HeadSection
from dino_ds.method.specs.base import RecipeSections, StepImages, TermSpec
from dino_ds.method.specs.distill import FeatureSpec, regresses_features

DINO, IBOT, LOCAL_WEIGHT = "dino", "ibot", "dino_local"
"""The names of the two terms, and of the weight of pairs with local crops in the DINO term."""
HEAD, IBOT_HEAD = "head", "ibot_head"
ONE = Ramp(1.0)


@dataclass(frozen=True)
class CenteringSpec:
    """How a teacher's logits become targets: by Sinkhorn-Knopp, or by softmax less a running mean, which checkpoints
    hold as `name`."""

    sinkhorn: bool
    momentum: float
    name: str


@dataclass(frozen=True)
class PrototypeSpec(TermSpec):
    """A cross-entropy over prototypes: the name and sizes of its head, and the teacher whose logits become targets."""

    head: tuple[str, HeadSection]
    centering: CenteringSpec
    student_temp: float
    teacher: str = EMA

    @property
    def heads(self) -> Mapping[str, HeadSection]:
        return dict([self.head])

    def needs_images_together(self, step: StepImages) -> int | None:
        return step.total if self.centering.sinkhorn else None

    def accumulated(self, step: StepImages) -> tuple[list[str], list[str]]:
        if not self.centering.sinkhorn:
            return [], []
        held = f"{step.accumulation} micro-batches are held at once"
        return [f"targets are balanced over all {step.total} images of a step; {held}"], []


@dataclass(frozen=True)
class DinoSpec(PrototypeSpec):
    """The DINO loss; `local_weight` weighs the pairs of crops that the teacher does not see."""

    local_weight: Ramp = ONE

    label: ClassVar[str] = "Loss of DINO"

    @property
    def weighs_local(self) -> bool:
        return self.local_weight != ONE

    @property
    def scheduled(self) -> Mapping[str, Ramp]:
        return {LOCAL_WEIGHT: self.local_weight}

    @classmethod
    def from_recipe(cls, name: str, weight: Ramp, recipe: RecipeSections) -> TermSpec:
        how, teacher = recipe.objective, recipe.teacher.taught_by
        if regresses_features(recipe):
            return FeatureSpec(name, weight, patches=False)
        centering = CenteringSpec(how.centering == "sinkhorn", how.center_momentum, "center")
        head = (HEAD, recipe.head)
        return DinoSpec(name, weight, head, centering, how.student_temp, teacher, how.dino_local_weight)


@dataclass(frozen=True)
class IbotSpec(PrototypeSpec):
    """The iBOT loss: for each hidden patch the student predicts what the teacher sees there."""

    label: ClassVar[str] = "Masked patches (iBOT)"

    @classmethod
    def from_recipe(cls, name: str, weight: Ramp, recipe: RecipeSections) -> TermSpec:
        how, teacher = recipe.objective, recipe.teacher.taught_by
        if regresses_features(recipe):
            return FeatureSpec(name, weight, patches=True)
        head = (IBOT_HEAD, recipe.ibot_head) if how.ibot_head == "own" else (HEAD, recipe.head)
        centering = CenteringSpec(how.centering == "sinkhorn", how.center_momentum, "ibot_center")
        return IbotSpec(name, weight, head, centering, how.student_temp, teacher)

    def problems(self, recipe: RecipeSections) -> list[str]:
        """Lines for crops without masks, and for BatchNorm, which needs the same number of patches on every rank."""
        problems = []
        if recipe.crops.mask == "none":
            problems.append("objective.ibot_weight needs masked patches: set crops.mask dinov2")
        name, head = self.head
        if head.batch_norm:
            problems.append(f"{name}.batch_norm true: the masked patches of a rank vary, and may be none: leave it out")
        return problems

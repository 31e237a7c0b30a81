"""Descriptions of the terms that compare a teacher's and the student's prototypes: DINO of crops, iBOT of patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dino_ds.config.crops import EMA, teacher_sizes
from dino_ds.config.fields import IdleKey, Ramp
from dino_ds.config.sections import HeadSection, ObjectiveSection
from dino_ds.method.specs.base import Batch, Recipe, TermSpec
from dino_ds.method.specs.distill import regresses_features, taught_by
from dino_ds.models.specs.backbones import FROM_SOURCE

DINO, IBOT, LOCAL_WEIGHT = "dino", "ibot", "dino_local"
"""The names of the two terms, and of the weight of local crops' pairs within the first."""
HEAD, IBOT_HEAD = "head", "ibot_head"
ONE = Ramp(1.0)
SECTIONS = "objective crops model teacher head ibot_head"
"""The sections of a recipe that the problems of these terms follow from."""


@dataclass(frozen=True)
class CenteringSpec:
    """The way from a teacher's logits to targets: by Sinkhorn-Knopp, or less a running mean, called `name` in
    checkpoints."""

    sinkhorn: bool
    momentum: float
    name: str

    def __str__(self) -> str:
        return "Sinkhorn-Knopp" if self.sinkhorn else "softmax less a running mean"


@dataclass(frozen=True)
class PrototypeSpec(TermSpec):
    """A cross-entropy over prototypes: the name and the sizes of its head, and whose logits are the targets."""

    head: tuple[str, HeadSection]
    centering: CenteringSpec
    student_temp: float
    teacher: str = EMA

    @property
    def heads(self) -> Mapping[str, HeadSection]:
        return dict([self.head])

    @property
    def targets(self) -> str:
        return str(self.centering)

    def accumulated(self, batch: Batch) -> tuple[list[str], list[str]]:
        if not self.centering.sinkhorn:
            return [], []
        held = f"{batch.accumulation} micro-batches are held at once"
        return [f"targets are balanced over all {batch.images} images of a step; {held}"], []


@dataclass(frozen=True)
class DinoSpec(PrototypeSpec):
    """The DINO loss of `teacher_crops` crops; `local_weight` weighs the pairs of the student's other crops."""

    teacher_crops: int = 2
    local_weight: Ramp = ONE

    builder: ClassVar[str] = "dino_ds.method.dino:build_dino"

    @property
    def title(self) -> str:
        return "Loss of DINO"

    @property
    def weighs_local(self) -> bool:
        return self.local_weight != ONE

    @property
    def scheduled(self) -> Mapping[str, Ramp]:
        return {LOCAL_WEIGHT: self.local_weight}

    @staticmethod
    def in_recipe(recipe: Recipe) -> list[TermSpec]:
        """The DINO term of a recipe, if it has it."""
        how, teacher = recipe.objective, taught_by(recipe)
        if not how.dino_weight or regresses_features(recipe):
            return []
        crops = len(teacher_sizes(recipe.groups, teacher))
        head, centering, local = (HEAD, recipe.head), _centering(how, "center"), how.dino_local_weight
        return [DinoSpec(DINO, how.dino_weight, head, centering, how.student_temp, teacher, crops, local)]

    @staticmethod
    def problems(recipe: Recipe) -> list[str]:
        """Options of the DINO term that can't act."""
        how, problems = recipe.objective, list[str]()
        if how.dino_local_weight != ONE and not (how.dino_weight and recipe.crops.num_local):
            why = "has no effect without local crops and objective.dino_weight"
            problems.append(IdleKey.of("objective.dino_local_weight", how.dino_local_weight, why))
        if how.centering == "sinkhorn" and how.center_momentum != ObjectiveSection().center_momentum:
            why = "has no effect with objective.centering sinkhorn"
            problems.append(IdleKey.of("objective.center_momentum", how.center_momentum, why))
        return problems


@dataclass(frozen=True)
class IbotSpec(PrototypeSpec):
    """The iBOT loss: for each hidden patch the student predicts what the teacher sees there."""

    builder: ClassVar[str] = "dino_ds.method.ibot:build_ibot"

    @property
    def title(self) -> str:
        return "Masked patches (iBOT)"

    @staticmethod
    def in_recipe(recipe: Recipe) -> list[TermSpec]:
        """The iBOT term of a recipe, if it has it."""
        how = recipe.objective
        if not how.ibot_weight or regresses_features(recipe):
            return []
        head = (IBOT_HEAD, recipe.ibot_head) if how.ibot_head == "own" else (HEAD, recipe.head)
        centering = _centering(how, "ibot_center")
        return [IbotSpec(IBOT, how.ibot_weight, head, centering, how.student_temp, taught_by(recipe))]

    @staticmethod
    def problems(recipe: Recipe) -> list[str]:
        """Options of the iBOT term and of masks that can't act."""
        how, crops, problems = recipe.objective, recipe.crops, list[str]()
        masked, regressed = crops.mask != "none", regresses_features(recipe)
        predicted = bool(how.ibot_weight) or how.terms != "{}"
        if how.ibot_weight and not masked and not regressed:
            problems.append("objective.ibot_weight needs masked patches: set crops.mask dinov2")
        if masked and not predicted:
            problems.append(f"crops.mask {crops.mask} hides patches that no loss predicts: set objective.ibot_weight")
        if not crops.mask_hides and not masked:
            problems.append(IdleKey.of("crops.mask_hides", "false", "has no effect with crops.mask none"))
        if (
            ((how.ibot_weight and not regressed) or masked)
            and recipe.model.backbone != FROM_SOURCE
            and "mask_token" not in recipe.model.spec().obeys
        ):
            cure = f"and {recipe.model.backbone} can't: take a ViT, or leave both out"
            problems.append(f"objective.ibot_weight and crops.mask need a backbone that hides patches, {cure}")
        if not (how.ibot_weight and how.ibot_head == "own"):
            why, usual = "has no effect without objective.ibot_weight and objective.ibot_head own", dict(HeadSection())
            head = {key: value for key, value in recipe.ibot_head if value != usual[key]}
            problems += [IdleKey.of(f"ibot_head.{key}", value, why) for key, value in head.items()]
        name = "ibot_head" if how.ibot_head == "own" else "head"
        if how.ibot_weight and getattr(recipe, name).batch_norm:
            problems.append(f"{name}.batch_norm true: the masked patches of a rank vary, and may be none: leave it out")
        return problems


def _centering(how: ObjectiveSection, name: str) -> CenteringSpec:
    return CenteringSpec(how.centering == "sinkhorn", how.center_momentum, name)

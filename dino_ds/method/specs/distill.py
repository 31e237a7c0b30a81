"""Descriptions of a distillation: the frozen teacher of teacher.source, and the terms that regress its features."""

from __future__ import annotations

from dataclasses import dataclass

from dino_ds.config.crops import FROZEN, GLOBAL
from dino_ds.method.specs.base import RecipeSections, TeacherSpec, TermSpec


def regresses_features(recipe: RecipeSections) -> bool:
    """Whether the targets are a teacher's features, not its heads' outputs."""
    return recipe.teacher.source is not None and recipe.teacher.distill == "features"


@dataclass(frozen=True)
class FrozenSpec(TeacherSpec):
    """The teacher of a file, which is never trained."""

    @property
    def of_file(self) -> bool:
        return True

    @staticmethod
    def in_recipe(recipe: RecipeSections) -> list[TeacherSpec]:
        """The frozen teacher of a recipe, if it has one."""
        return [] if recipe.teacher.source is None else [FrozenSpec(FROZEN)]

    @staticmethod
    def problems(recipe: RecipeSections) -> list[str]:
        how = recipe.objective
        if recipe.teacher.source is not None and not (how.dino_weight or how.ibot_weight):
            return ["teacher.source teaches nothing with objective.dino_weight and ibot_weight 0: give one a weight"]
        return []


@dataclass(frozen=True)
class FeatureSpec(TermSpec):
    """Regression of the student's features to the frozen teacher's on global crops: CLS features, or `patches`."""

    patches: bool

    @property
    def title(self) -> str:
        return f"Distillation of {'patches' if self.patches else 'CLS features'}"

    @property
    def group(self) -> str:
        return GLOBAL

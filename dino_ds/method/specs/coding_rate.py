"""Description of SimDINO's term: views of an image agree, and images fill the sphere, without prototypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dino_ds.config.crops import teacher_sizes
from dino_ds.method.specs.base import Batch, Recipe, TermSpec
from dino_ds.method.specs.distill import taught_by

CODING_RATE = "coding_rate"
SECTIONS = "objective head teacher"


@dataclass(frozen=True)
class CodingRateSpec(TermSpec):
    """The coding rate of rows of `width`, which a linear head makes of CLS features, and the cosines of the student's
    crops to the first `crops` ones, as `teacher` sees them."""

    width: int
    crops: int
    teacher: str

    builder: ClassVar[str] = "dino_ds.method.coding_rate:build_coding_rate"

    @property
    def title(self) -> str:
        return "Coding rate (SimDINO)"

    def accumulated(self, batch: Batch) -> tuple[list[str], list[str]]:
        images = batch.micro_batch * batch.ranks
        seen = f"the coding rate is of {images} images at a time, not the {batch.images} of a step"
        return [], [f"{seen}: with another accumulation it is another loss"]

    @staticmethod
    def in_recipe(recipe: Recipe) -> list[TermSpec]:
        """The term of a recipe, if it has it."""
        weight, teacher = recipe.objective.coding_rate_weight, taught_by(recipe)
        if not weight:
            return []
        crops = len(teacher_sizes(recipe.groups, teacher))
        return [CodingRateSpec(CODING_RATE, weight, recipe.head.bottleneck, crops, teacher)]

    @staticmethod
    def problems(recipe: Recipe) -> list[str]:
        """A frozen teacher, which has no head like the student's."""
        if not recipe.objective.coding_rate_weight or recipe.teacher.distill is None:
            return []
        why = "compares the student with its own average, not with a frozen teacher: set one of them 0 or none"
        return [f"objective.coding_rate_weight with teacher.distill {recipe.teacher.distill} {why}"]

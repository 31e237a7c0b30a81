"""Description of SimDINO's term: views of an image agree, and images fill the sphere, without prototypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dino_ds.config.fields import Ramp
from dino_ds.method.specs.base import RecipeSections, StepImages, TermSpec


@dataclass(frozen=True)
class CodingRateSpec(TermSpec):
    """SimDINO's loss on the outputs, of `width` elements, of a linear head on CLS features: their coding rate, and the
    cosines between the student's crops and those of `teacher`."""

    width: int
    teacher: str

    label: ClassVar[str] = "Coding rate (SimDINO)"

    def needs_images_together(self, step: StepImages) -> int:
        return step.together

    @classmethod
    def from_recipe(cls, name: str, weight: Ramp, recipe: RecipeSections) -> TermSpec:
        return CodingRateSpec(name, weight, recipe.head.bottleneck, recipe.teacher.taught_by)

    def problems(self, recipe: RecipeSections) -> list[str]:
        """A line if the targets are those of a frozen teacher, which has no head like the student's."""
        if recipe.teacher.distill is None:
            return []
        why = "compares the student with its own average, not with a frozen teacher: set one of them 0 or none"
        return [f"objective.coding_rate_weight with teacher.distill {recipe.teacher.distill} {why}"]

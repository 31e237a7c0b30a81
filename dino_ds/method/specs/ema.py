"""Specs of EMA teachers: the one that a run exports, and further ones with their own momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dino_ds.config.crops import EMA, GLOBAL
from dino_ds.engine.schedules import cosine_schedule
from dino_ds.method.specs.base import RecipeSections, TeacherSpec


@dataclass(frozen=True)
class EmaSpec(TeacherSpec):
    """An exponential moving average of the student; a cosine takes its momentum from `momentum` to `momentum_end`."""

    momentum: float = 0.996
    momentum_end: float = 1.0

    follows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raises ValueError for momenta outside [0, 1], with which the result is no average."""
        for name in ("momentum", "momentum_end"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name} {value:g} is not between 0 and 1")

    @property
    def title(self) -> str:
        return "EMA teacher" if self.name == EMA else super().title

    def momentum_at(self, step: int, steps: int) -> float:
        return cosine_schedule(step, self.momentum, self.momentum_end, steps)

    @staticmethod
    def in_recipe(recipe: RecipeSections) -> list[TeacherSpec]:
        """The EMA teacher, which every run has; it sees no crops if a frozen teacher is distilled."""
        teacher = recipe.teacher
        sees = (GLOBAL,) if teacher.taught_by == EMA else ()
        return [EmaSpec(EMA, sees, teacher.momentum, teacher.momentum_end)]

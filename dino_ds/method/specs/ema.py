"""Description of EMA teachers: the one that is the run's product, and further ones with a momentum of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dino_ds.config.crops import EMA, GLOBAL
from dino_ds.engine.schedules import cosine_schedule
from dino_ds.method.specs.base import Recipe, TeacherSpec
from dino_ds.method.specs.distill import taught_by


@dataclass(frozen=True)
class EmaSpec(TeacherSpec):
    """The exponential moving average of the student: momentum `momentum`, by a cosine to `momentum_end` over the
    run."""

    momentum: float = 0.996
    momentum_end: float = 1.0

    builder: ClassVar[str] = "dino_ds.method.ema:build_teacher"

    def __post_init__(self) -> None:
        """Raises ValueError for momenta with which the average would leave what it averages."""
        for name in ("momentum", "momentum_end"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name} {value:g} is not between 0 and 1")

    @property
    def title(self) -> str:
        return "EMA teacher" if self.name == EMA else super().title

    @property
    def follows(self) -> bool:
        return True

    def momentum_at(self, step: int, steps: int) -> float:
        return cosine_schedule(step, self.momentum, self.momentum_end, steps)

    def describe(self) -> list[str]:
        if self.name == EMA:
            return []
        momenta = " to ".join(f"{one:g}" for one in dict.fromkeys((self.momentum, self.momentum_end)))
        return [f"teacher  {self.name}: another EMA of the student, momentum {momenta}; it sees {', '.join(self.sees)}"]

    @staticmethod
    def in_recipe(recipe: Recipe) -> list[TeacherSpec]:
        """The teacher of each run: it sees no crops where another one is distilled."""
        teacher = recipe.teacher
        sees = (GLOBAL,) if taught_by(recipe) == EMA else ()
        return [EmaSpec(EMA, sees, teacher.momentum, teacher.momentum_end)]

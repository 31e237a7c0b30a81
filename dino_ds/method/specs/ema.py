"""Specs of EMA teachers: the one that a run exports, and further ones with their own momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from dino_ds.config.crops import EMA, FROZEN, GLOBAL
from dino_ds.config.fields import Fraction01, PathText, Section, option
from dino_ds.config.model import ArgumentsField
from dino_ds.engine.schedules import cosine_schedule
from dino_ds.method.specs.base import TeacherSpec

if TYPE_CHECKING:
    from dino_ds.config.recipe import Recipe


class TeacherSection(Section):
    source: PathText | None = option(
        None,
        "to distil: the frozen teacher, a run, weights or a timm name; none = the EMA",
        learned=False,  # but the digest of its weights must stay the same
    )
    distill: Literal["heads", "features"] | None = option(
        None, "of teacher.source the targets: its heads' outputs (none too), or its features"
    )
    momentum: Fraction01 = option(0.996, "EMA momentum of the teacher at the start")
    momentum_end: Fraction01 = option(1.0, "EMA momentum at the end (cosine in between)")
    batch_norm: Literal["auto", "reference", "ema", "frozen"] = option(
        "auto",
        "teacher's BatchNorm: by its batch (reference: DINO), the student's averages (ema), the start's (frozen)",
    )
    others: ArgumentsField = option("{}", 'further EMA teachers, for such terms: {"NAME": {"momentum": 0.9995, ...}}')

    @model_validator(mode="after")
    def _check(self) -> TeacherSection:
        if self.source is None and self.distill == "features":
            raise ValueError("distill features has no effect without source: name a teacher (--teacher.source RUN)")
        return self

    @property
    def taught_by(self) -> str:
        """The name of the teacher whose outputs are the targets."""
        return EMA if self.source is None else FROZEN


@dataclass(frozen=True)
class EmaSpec(TeacherSpec):
    """An exponential moving average of the student; a cosine takes its momentum from `momentum` to `momentum_end`."""

    momentum: float = 0.996
    momentum_end: float = 1.0

    builder: ClassVar[str] = "dino_ds.method.ema:build_teacher"
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
    def in_recipe(recipe: Recipe) -> list[TeacherSpec]:
        """The EMA teacher, which every run has; it sees no crops if a frozen teacher is distilled."""
        teacher = recipe.teacher
        sees = (GLOBAL,) if teacher.taught_by == EMA else ()
        return [EmaSpec(EMA, sees, teacher.momentum, teacher.momentum_end)]

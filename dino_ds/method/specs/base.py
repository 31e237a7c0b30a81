"""The contracts of a loss term's and of a teacher's description, for ours and for those of users. No torch here.

The log's first lines, metrics, plots, schedules, checks, predictions and resumes go by these descriptions: who adds a
term or a teacher writes its spec and what the spec builds, and nothing else.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from dino_ds.config.crops import GLOBAL, CropGroup, Resolution
from dino_ds.config.fields import Length, Ramp
from dino_ds.config.model import ModelSection
from dino_ds.config.sections import (
    CropsSection,
    DataSection,
    GramSection,
    HeadSection,
    ObjectiveSection,
    TeacherSection,
)
from dino_ds.engine.schedules import Replacements


class Recipe(Protocol):
    """The source of descriptions: the sections of a `dino_ds.config.recipe.Recipe` that say what is learned."""

    data: DataSection
    crops: CropsSection
    model: ModelSection
    head: HeadSection
    ibot_head: HeadSection
    objective: ObjectiveSection
    gram: GramSection
    teacher: TeacherSection

    def model_copy(self, *, update: Any) -> Any: ...

    @property
    def resolutions(self) -> tuple[Resolution, ...]: ...

    @property
    def groups(self) -> tuple[CropGroup, ...]: ...


@dataclass(frozen=True)
class Batch:
    """The images of an optimizer step, and how many of them are computed together."""

    micro_batch: int
    accumulation: int
    ranks: int

    @property
    def images(self) -> int:
        return self.micro_batch * self.accumulation * self.ranks


@dataclass(frozen=True)
class TermSpec:
    """A loss term in plain numbers: `name` is its key in metrics, schedules, the log and plots.

    A term of a user's is a subclass with fields of its own, which the recipe gives next to `spec` and `weight`
    (docs/flow.md), and a `build`.
    """

    name: str
    weight: Ramp

    builder: ClassVar[str] = ""
    """The "module:function" that `build` calls, so that a spec imports no torch."""
    reads_patches: ClassVar[bool] = False
    """Whether it needs a backbone that gives features of patches."""

    @property
    def title(self) -> str:
        """The loss in a few words, as a plot names it."""
        return f"Loss term {self.name}"

    @property
    def start(self) -> Length:
        """When the term begins: before, its weight is 0."""
        return Length(0, "steps")

    @property
    def scheduled(self) -> Mapping[str, Ramp]:
        """Further numbers that move with the steps, by the name under which `ScheduleValues.weights` has them."""
        return {}

    @property
    def heads(self) -> Mapping[str, HeadSection]:
        """Heads of prototypes whose outputs it compares, by name."""
        return {}

    @property
    def targets(self) -> str:
        """The making of its targets over prototypes, in words, or "" for a term without such targets."""
        return ""

    def describe(self, recipe: Recipe) -> list[str]:
        """Lines of the log, after the one that lists the terms."""
        return []

    def accumulated(self, batch: Batch) -> tuple[list[str], list[str]]:
        """Notes and warnings on a step of several micro-batches, where they are not one batch to the term."""
        return [], []

    def build(self, parts: Any) -> Any:
        """The `dino_ds.method.objective.Term`, from a `dino_ds.method.parts.TermParts`; torch may be imported here."""
        return _built(self, parts)


@dataclass(frozen=True)
class TeacherSpec:
    """A teacher in plain numbers: `name` is its key in metrics, schedules and checkpoints.

    `sees`: names of the crop groups that are shown to it, besides `own_group`.
    """

    name: str
    sees: tuple[str, ...] = (GLOBAL,)

    builder: ClassVar[str] = ""
    """The "module:function" that `build_teacher` calls, so that a spec imports no torch."""

    @property
    def title(self) -> str:
        """The teacher in a few words, as predictions name it."""
        return f"{self.name} teacher"

    @property
    def of_file(self) -> bool:
        """Whether its weights are a file's and never move: a checkpoint holds their digest alone."""
        return False

    def describe(self) -> list[str]:
        """Lines of the log, where it is not the EMA teacher of each run."""
        return []

    @property
    def follows(self) -> bool:
        """Whether it is an average of the student's weights."""
        return False

    def without_file(self, recipe: Recipe) -> dict[str, Any]:
        """Sections of a recipe, changed so that it begins as the student does, and no file is read."""
        return {}

    def momentum_at(self, step: int, steps: int) -> float:
        """The momentum of that average after `step` of `steps` applied steps."""
        raise NotImplementedError

    def own_group(self, first: CropGroup, resolution: Resolution) -> CropGroup | None:
        """Crops that only it sees, made from the first group's, in a step of one of the recipe's resolutions."""
        return None

    def replaced_after(self, recipe: Recipe, epoch_steps: int) -> Replacements | None:
        """When the EMA teacher's weights take the place of its own, or None for never."""
        return None

    def notes(self, recipe: Recipe) -> list[str]:
        """Lines of the log where a run starts with drawn weights."""
        return []

    def build_teacher(self, parts: Any) -> Any:
        """The `dino_ds.method.teacher.Teacher` on this process's device, from a `dino_ds.method.parts.TeacherParts`;
        every rank must call it."""
        return _built(self, parts)


def _built(spec: TermSpec | TeacherSpec, parts: Any) -> Any:
    """The result of a spec's builder."""
    module, _, name = spec.builder.partition(":")
    return getattr(importlib.import_module(module), name)(spec, parts)

"""Specs of a loss term that keeps a run near the weights it starts from, and of the teacher with these weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dino_ds.method.specs.base import RecipeSections, TeacherSpec, TermSpec

PRESERVE, START = "preserve", "start"
"""The names of the term and of its teacher."""


@dataclass(frozen=True)
class PreserveSpec(TermSpec):
    """1 - cosine between features of the student's global crops and those of the weights that it started from."""

    label: ClassVar[str] = "Distance from the start's features"

    def problems(self, recipe: RecipeSections) -> list[str]:
        """A line if there are no weights to start from, whose features would be kept."""
        if recipe.model.init_from is not None:
            return []
        return ["objective.preserve_weight keeps features of the weights of model.init_from: give that, or set it 0"]


@dataclass(frozen=True)
class StartSpec(TeacherSpec):
    """The teacher with the weights of model.init_from, which never change."""

    label: ClassVar[str] = "frozen start"

    @property
    def of_file(self) -> bool:
        return True

    @staticmethod
    def in_recipe(recipe: RecipeSections) -> list[TeacherSpec]:
        """The recipe's teacher of this kind, if it has one."""
        return [StartSpec(START)] if recipe.objective.preserve_weight else []

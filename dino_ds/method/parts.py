"""The inputs from which specs build loss terms and teachers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dino_ds.config.crops import teacher_sizes
from dino_ds.config.ds_values import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.engine.engine import Engine
from dino_ds.method.objective import Objective
from dino_ds.models.network import Network
from dino_ds.weights.frozen import FrozenSource


@dataclass(frozen=True)
class TermParts:
    """Inputs of a loss term: the recipe, the device of its statistics, and the file of the frozen teacher."""

    recipe: Recipe
    device: torch.device
    source: FrozenSource | None = None

    @property
    def taught_crops(self) -> int:
        """The number of crops of an image that the teacher of the targets sees."""
        return len(teacher_sizes(self.recipe.groups, self.recipe.teacher.taught_by))


@dataclass(frozen=True)
class TeacherParts:
    """Inputs of a teacher: the student's engine, the objective, whose terms read the teacher's outputs, and the EMA
    teacher's network (None while that teacher is built)."""

    recipe: Recipe
    config: DsConfig
    engine: Engine
    objective: Objective
    source: FrozenSource | None = None
    ema: Network | None = None

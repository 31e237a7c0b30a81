"""Description of the KoLeo term: CLS features of different images spread apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dino_ds.config.crops import teacher_sizes
from dino_ds.method.specs.base import Batch, Recipe, TermSpec
from dino_ds.method.specs.distill import taught_by

KOLEO = "koleo"
SECTIONS = "objective"


@dataclass(frozen=True)
class KoLeoSpec(TermSpec):
    """KoLeo over `crops` crops of each image; `all_ranks`: among all ranks' images, not a micro-batch's alone."""

    crops: int
    all_ranks: bool

    builder: ClassVar[str] = "dino_ds.method.koleo:build_koleo"

    @property
    def title(self) -> str:
        return "KoLeo, sum over the global crops"

    def accumulated(self, batch: Batch) -> tuple[list[str], list[str]]:
        images = batch.micro_batch * (batch.ranks if self.all_ranks else 1)
        seen = f"KoLeo sees a micro-batch of {images} images at a time, not the {batch.images} of a step"
        return [], [f"{seen}: with another accumulation it is another loss"]

    @staticmethod
    def in_recipe(recipe: Recipe) -> list[TermSpec]:
        """The KoLeo term of a recipe, if it has it."""
        how, crops = recipe.objective, len(teacher_sizes(recipe.groups, taught_by(recipe)))
        return [KoLeoSpec(KOLEO, how.koleo_weight, crops, how.koleo_ranks == "all")] if how.koleo_weight else []

    @staticmethod
    def problems(recipe: Recipe) -> list[str]:
        """No option of it is without effect."""
        return []

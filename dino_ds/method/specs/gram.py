"""Specs of Gram anchoring: its term, teacher and crops, and the recipes that these refuse.

Source: DINOv3, section 4 (arXiv 2508.10104); facebookresearch/dinov3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dino_ds.config.crop_checks import side_problems
from dino_ds.config.crops import EMA, GLOBAL, CropGroup, Resolution
from dino_ds.config.fields import Length, Ramp
from dino_ds.config.sections import CropsSection
from dino_ds.config.teachers import SNAPSHOT, GramSection
from dino_ds.engine.schedules import Replacements
from dino_ds.method.specs.base import RecipeSections, TeacherSpec, TermSpec

GRAM = "gram"
"""The name of the term, of its teacher and of the crop group that only this teacher sees."""


@dataclass(frozen=True)
class GramSpec(TermSpec):
    """Gram anchoring: similarities of patches stay those of `teacher`, on the global crops or on its own."""

    teacher: str
    begin: Length

    label: ClassVar[str] = "Gram anchoring"
    reads_patches: ClassVar[bool] = True

    @property
    def start(self) -> Length:
        return self.begin

    @classmethod
    def from_recipe(cls, name: str, weight: Ramp, recipe: RecipeSections) -> TermSpec:
        gram = recipe.gram
        teacher = EMA if gram.teacher == EMA else GRAM
        return GramSpec(name, weight, teacher, gram.start)

    def problems(self, recipe: RecipeSections) -> list[str]:
        """Lines for crops and replacements that the term's teacher can't have."""
        if self.teacher != EMA:
            return _crop_problems(recipe.gram, recipe.crops, recipe.model.side_multiple)
        unseen = "gram.teacher ema in a distillation: the EMA teacher sees no crops then"
        return [] if recipe.teacher.taught_by == EMA else [f"{unseen}; take snapshot, a run or weights"]


@dataclass(frozen=True)
class GramTeacherSpec(TeacherSpec):
    """Gram anchoring's teacher, if it is not the EMA teacher itself.

    source: "snapshot", or the file of its weights; refreshed: the EMA teacher's weights replace them at intervals.
    """

    source: str = SNAPSHOT
    refreshed: bool = False

    label: ClassVar[str] = "Gram teacher"

    @property
    def of_file(self) -> bool:
        return self.source != SNAPSHOT and not self.refreshed

    def without_file(self, recipe: RecipeSections) -> dict[str, Any]:
        return {"gram": recipe.gram.model_copy(update={"teacher": SNAPSHOT})}

    def own_group(self, first: CropGroup, resolution: Resolution) -> CropGroup | None:
        """The crops of `first` in another size and without colors (DINOv3)."""
        if resolution.gram_size is None:
            return None
        size, seen = resolution.gram_size, (self.name,)
        group = replace(first, name=GRAM, size=size, teachers=seen, like=first.name)
        return replace(group, student=False, masked=False, augmented=False)

    def replaced_after(self, recipe: RecipeSections, epoch_steps: int) -> Replacements:
        gram, batch = recipe.gram, recipe.data.global_batch
        start, every = (length.in_steps(batch, epoch_steps) for length in (gram.start, gram.refresh_every))
        return Replacements(start, gram.teacher == SNAPSHOT, every, gram.refreshes)

    def notes(self, recipe: RecipeSections) -> list[str]:
        if recipe.gram.teacher != SNAPSHOT or recipe.gram.start.value:
            return []
        return ["gram.teacher snapshot at gram.start 0 is of a network that has learned nothing yet: give gram.start"]

    @staticmethod
    def in_recipe(recipe: RecipeSections) -> list[TeacherSpec]:
        """The recipe's Gram teacher, if it has one."""
        gram = recipe.gram
        if not gram.weight or gram.teacher == EMA:
            return []
        sees = () if gram.own_crop_size else (GLOBAL,)
        return [GramTeacherSpec(GRAM, sees, gram.teacher, gram.refresh_every.value > 0)]

    @staticmethod
    def problems(recipe: RecipeSections) -> list[str]:
        """Lines for sizes of the Gram teacher's crops in several resolutions."""
        several, model = recipe.resolutions if recipe.crops.resolutions else (), recipe.model
        sides = [(f"crops.resolutions {step}: Gram size", step.gram_size) for step in several if step.gram_size]
        problems = _size_problems(several, recipe.gram.own_crop_size)
        return problems + side_problems(sides, model.backbone, model.side_multiple)


def _size_problems(several: Iterable[Resolution], gram_size: int | None) -> list[str]:
    """The first problem of a resolution: a Gram size without Gram crops, none with them, or one out of range."""
    for resolution in several:
        name, size = f"crops.resolutions {resolution}", resolution.gram_size
        if size and not gram_size:
            why = "has a Gram size, and Gram anchoring has no crops of its own here"
            return [f"{name} {why}: set gram.weight and gram.crop_size, or leave out the third number"]
        if gram_size and not size:
            why = f"has no Gram size, and gram.crop_size is {gram_size}"
            return [f"{name} {why}: write GLOBAL/LOCAL/GRAM:SHARE, or set gram.crop_size none"]
        if size and not resolution.global_size <= size <= 2 * resolution.global_size:
            return [f"{name}: Gram size {size} must be 1 to 2 times the global size {resolution.global_size}"]
    return []


def _crop_problems(gram: GramSection, crops: CropsSection, patch: int) -> list[str]:
    """Problems of the Gram teacher's crops; the student's crops have sides that are multiples of `patch`."""
    size, side = gram.crop_size, crops.global_size
    if size is None:
        return []
    if not side <= size <= 2 * side:
        return [f"gram.crop_size {size} must be 1 to 2 times crops.global_size {side}: {side} to {2 * side}, or none"]
    if size % patch and (gram.teacher == SNAPSHOT or gram.refresh_every.value):
        fitting = " or ".join(str(s) for s in (size // patch * patch, size // patch * patch + patch))
        return [f"gram.crop_size {size} is not a multiple of the patch size {patch}: use {fitting}"]
    return []

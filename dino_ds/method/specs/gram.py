"""Descriptions of Gram anchoring: its term, its teacher, its crops, and what a recipe can't ask of them.

Source: DINOv3, section 4 (arXiv 2508.10104); facebookresearch/dinov3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dino_ds.config.crop_checks import side_problems
from dino_ds.config.crops import EMA, GLOBAL, CropGroup, Resolution
from dino_ds.config.fields import IdleKey, Length
from dino_ds.config.sections import SNAPSHOT, CropsSection, GramSection
from dino_ds.engine.schedules import Replacements
from dino_ds.method.specs.base import Batch, Recipe, TeacherSpec, TermSpec
from dino_ds.method.specs.distill import taught_by

GRAM = "gram"
"""The name of the term, of its teacher and of the crops that this one may have for itself."""
SECTIONS = "crops model gram teacher"


@dataclass(frozen=True)
class GramSpec(TermSpec):
    """Gram anchoring: similarities of patches stay those of `teacher`, on the crop group `seen`."""

    teacher: str
    seen: str
    whole_batch: bool
    drop_negative: bool
    begin: Length

    builder: ClassVar[str] = "dino_ds.method.gram:build_gram"
    reads_patches: ClassVar[bool] = True

    @property
    def title(self) -> str:
        return "Gram anchoring"

    @property
    def start(self) -> Length:
        return self.begin

    def describe(self, recipe: Recipe) -> list[str]:
        """A line of the log: the teacher whose similarities of patches are kept, from when on, and on what crops."""
        gram, start = recipe.gram, self.begin
        if gram.teacher == EMA:
            who = "the EMA teacher as it is"
        else:
            when = f"{start}" if start.value or not start.begin else f"step {start.begin}"
            who = f"the EMA teacher as it is after {when}" if gram.teacher == SNAPSHOT else gram.teacher
            if gram.refresh_every.value:
                who += f", replaced by the EMA teacher every {gram.refresh_every} from then on, {gram.refreshes} times"
        pixels = ", ".join(str(size) for size in dict.fromkeys(one.gram_size for one in recipe.resolutions))
        crops = f"the global crops at {pixels} pixels, without colors" if gram.crop_size else "the global crops"
        begin = f" from {start} on" if start.value else ""
        return [f"gram     weight {self.weight}{begin}; teacher {who}; it sees {crops}"]

    def accumulated(self, batch: Batch) -> tuple[list[str], list[str]]:
        if not self.whole_batch:
            return [], []
        seen = f"gram.whole_batch compares the patches of a micro-batch of {batch.micro_batch} images at a time"
        return [], [f"{seen}, not of the {batch.images} of a step: with another accumulation it is another loss"]

    @staticmethod
    def in_recipe(recipe: Recipe) -> list[TermSpec]:
        """The term of a recipe, if it has it."""
        gram = recipe.gram
        if not gram.weight:
            return []
        teacher = EMA if gram.teacher == EMA else GRAM
        seen = next((group.name for group in recipe.groups if GRAM in group.teachers), GLOBAL)
        return [GramSpec(GRAM, gram.weight, teacher, seen, gram.whole_batch, gram.drop_negative, gram.start)]

    @staticmethod
    def problems(recipe: Recipe) -> list[str]:
        """Options of Gram anchoring that can't act, and crops that it can't have."""
        gram, crops, defaults = recipe.gram, recipe.crops, GramSection()
        several, model = recipe.resolutions if crops.resolutions else (), recipe.model
        patch = model.side_multiple
        problems = _size_problems(several, own_crop_size(gram))
        sides = [(f"crops.resolutions {one}: Gram size", one.gram_size) for one in several if one.gram_size]
        problems += side_problems(sides, model.backbone, patch)
        if not gram.weight:
            return problems + [
                IdleKey.of(
                    f"gram.{name}",
                    getattr(gram, name),
                    "has no effect without gram.weight",
                    "leave it out, or give that",
                )
                for name in GramSection.model_fields
                if name != "weight" and getattr(gram, name) != getattr(defaults, name)
            ]
        if gram.teacher == EMA:
            problems += _ema_problems(gram, taught_by(recipe) != EMA)
        else:
            problems += _crop_problems(gram, crops, patch)
        if gram.refreshes != defaults.refreshes and not gram.refresh_every.value:
            without = "has no effect without gram.refresh_every"
            problems.append(IdleKey.of("gram.refreshes", gram.refreshes, without, "give both or none"))
        return problems


@dataclass(frozen=True)
class GramTeacherSpec(TeacherSpec):
    """The teacher of its own that Gram anchoring has, unless that is the EMA teacher as it is. place: "snapshot", or
    the file of its weights; refreshed: the EMA teacher replaces it now and then."""

    place: str = SNAPSHOT
    refreshed: bool = False

    builder: ClassVar[str] = "dino_ds.method.gram_teacher:build_teacher"

    @property
    def title(self) -> str:
        return "Gram teacher"

    @property
    def of_file(self) -> bool:
        return self.place != SNAPSHOT and not self.refreshed

    def without_file(self, recipe: Recipe) -> dict[str, Any]:
        return {"gram": recipe.gram.model_copy(update={"teacher": SNAPSHOT})}

    def own_group(self, first: CropGroup, resolution: Resolution) -> CropGroup | None:
        """The crops of `first` in another size and without colors (DINOv3)."""
        if resolution.gram_size is None:
            return None
        size, seen = resolution.gram_size, (self.name,)
        own = replace(first, name=GRAM, size=size, teachers=seen, like=first.name)
        return replace(own, student=False, masked=False, augmented=False)

    def replaced_after(self, recipe: Recipe, epoch_steps: int) -> Replacements:
        gram, batch = recipe.gram, recipe.data.global_batch
        start, every = (length.in_steps(batch, epoch_steps) for length in (gram.start, gram.refresh_every))
        return Replacements(start, gram.teacher == SNAPSHOT, every, gram.refreshes)

    def notes(self, recipe: Recipe) -> list[str]:
        if recipe.gram.teacher != SNAPSHOT or recipe.gram.start.value:
            return []
        return ["gram.teacher snapshot at gram.start 0 is of a network that has learned nothing yet: give gram.start"]

    @staticmethod
    def in_recipe(recipe: Recipe) -> list[TeacherSpec]:
        """The teacher of a recipe, if it has it."""
        gram = recipe.gram
        if not gram.weight or gram.teacher == EMA:
            return []
        sees = () if own_crop_size(gram) else (GLOBAL,)
        return [GramTeacherSpec(GRAM, sees, gram.teacher, gram.refresh_every.value > 0)]


def own_crop_size(gram: GramSection) -> int | None:
    """Side in pixels of crops of its own, or None where it has none."""
    return gram.crop_size if gram.weight and gram.teacher != EMA else None


def _size_problems(several: Iterable[Resolution], gram_size: int | None) -> list[str]:
    """Problems where resolutions name sizes of crops that Gram anchoring does not have, or leave its own out."""
    for one in several:
        name, size = f"crops.resolutions {one}", one.gram_size
        if size and not gram_size:
            why = "has a Gram size, and Gram anchoring has no crops of its own here"
            return [f"{name} {why}: set gram.weight and gram.crop_size, or leave out the third number"]
        if gram_size and not size:
            why = f"has no Gram size, and gram.crop_size is {gram_size}"
            return [f"{name} {why}: write GLOBAL/LOCAL/GRAM:SHARE, or set gram.crop_size none"]
        if size and not one.global_size <= size <= 2 * one.global_size:
            return [f"{name}: Gram size {size} must be 1 to 2 times the global size {one.global_size}"]
    return []


def _ema_problems(gram: GramSection, distills: bool) -> list[str]:
    problems = []
    if gram.crop_size is not None:
        seen = "with gram.teacher ema, which sees the global crops: leave one of them out"
        problems.append(f"gram.crop_size {gram.crop_size} {seen}")
    if gram.refresh_every.value:
        moves = "with gram.teacher ema, which moves with every step: leave it out"
        problems.append(f"gram.refresh_every {gram.refresh_every} {moves}")
    if distills:
        problems.append(
            "gram.teacher ema in a distillation: the EMA teacher sees no crops then; take snapshot, a run or weights"
        )
    return problems


def _crop_problems(gram: GramSection, crops: CropsSection, patch: int) -> list[str]:
    """Problems of the crops of its own; sides of the student's are multiples of `patch`."""
    size, own = gram.crop_size, crops.global_size
    if size is None:
        return []
    if not own <= size <= 2 * own:
        return [f"gram.crop_size {size} must be 1 to 2 times crops.global_size {own}: {own} to {2 * own}, or none"]
    if size % patch and (gram.teacher == SNAPSHOT or gram.refresh_every.value):
        fitting = " or ".join(str(s) for s in (size // patch * patch, size // patch * patch + patch))
        return [f"gram.crop_size {size} is not a multiple of the patch size {patch}: use {fitting}"]
    return []

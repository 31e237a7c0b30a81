"""What of a recipe does not go with Gram anchoring, or has no effect; in one line each. No torch here."""

from __future__ import annotations

from dino_ds.config.crops import EMA
from dino_ds.config.sections import SNAPSHOT, CropsSection, GramSection, TeacherSection


def gram_problems(gram: GramSection, crops: CropsSection, teacher: TeacherSection, patch: int) -> list[str]:
    """`patch`: what the sides of the student's crops are multiples of."""
    defaults = GramSection()
    if not gram.weight:
        return [
            f"gram.{name} {getattr(gram, name)} has no effect without gram.weight: leave it out, or give gram.weight "
            "above 0"
            for name in GramSection.model_fields
            if name != "weight" and getattr(gram, name) != getattr(defaults, name)
        ]
    problems = _of_ema(gram, teacher) if gram.teacher == EMA else _crop_problems(gram, crops, patch)
    if gram.refreshes != defaults.refreshes and not gram.refresh_every.value:
        problems.append(f"gram.refreshes {gram.refreshes} has no effect without gram.refresh_every: give both or none")
    return problems


def _of_ema(gram: GramSection, teacher: TeacherSection) -> list[str]:
    problems = []
    if gram.crop_size is not None:
        problems.append(
            f"gram.crop_size {gram.crop_size} with gram.teacher ema, which sees the global crops: leave it out, or "
            "take gram.teacher snapshot"
        )
    if gram.refresh_every.value:
        problems.append(
            f"gram.refresh_every {gram.refresh_every} with gram.teacher ema, which moves with every step: leave it out"
        )
    if teacher.source is not None:
        problems.append(
            "gram.teacher ema with teacher.source: the EMA teacher sees no crops then; take gram.teacher snapshot, or "
            "give a run or weights"
        )
    return problems


def _crop_problems(gram: GramSection, crops: CropsSection, patch: int) -> list[str]:
    size, own = gram.crop_size, crops.global_size
    if size is None:
        return []
    if not own <= size <= 2 * own:
        return [
            f"gram.crop_size {size} must be 1 to 2 times crops.global_size {own}: {own} to {2 * own}, or none for the "
            "global crops themselves"
        ]
    if size % patch and (gram.teacher == SNAPSHOT or gram.refresh_every.value):
        fitting = " or ".join(str(s) for s in (size // patch * patch, size // patch * patch + patch))
        return [f"gram.crop_size {size} is not a multiple of the patch size {patch}: use {fitting}"]
    return []

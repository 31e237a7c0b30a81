"""Which crops and Gram anchoring a recipe can't have, or to no effect; in one line each. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dino_ds.config.crops import EMA, Resolution, parse_resolutions
from dino_ds.config.model import ModelSection
from dino_ds.config.sections import SNAPSHOT, CropsSection, GramSection, TeacherSection
from dino_ds.models.specs.backbones import FROM_SOURCE


def crop_problems(crops: CropsSection, model: ModelSection, patch: int, gram_size: int | None) -> list[str]:
    """`patch`: what the sides of crops are multiples of. gram_size: of Gram anchoring's own crops, if it has any."""
    several = parse_resolutions(crops.resolutions)
    sizes = [("crops.global_size", crops.global_size)]
    problems = _gram_problems(several, gram_size) + _colour_problems(crops, model)
    problems += _mask_problems(crops, several, patch)
    if crops.num_local:
        sizes += [(f"crops.resolutions {one}: local size", one.local_size) for one in several]
        sizes += [] if several else [("crops.local_size", crops.local_size)]
    elif model.local_cls_norm:
        problems += ["model.local_cls_norm is for CLS tokens of local crops, and crops.num_local is 0: leave it out"]
    sizes += [(f"crops.resolutions {one}: global size", one.global_size) for one in several]
    sizes += [(f"crops.resolutions {one}: Gram size", one.gram_size) for one in several if one.gram_size]
    return problems + [
        f"{name} {size} is not a multiple of the patch size {patch} (model.backbone {model.backbone}): "
        f"use {' or '.join(str(s) for s in (size // patch * patch, size // patch * patch + patch) if s)}"
        for name, size in sizes
        if size % patch
    ]


def _mask_problems(crops: CropsSection, several: Iterable[Resolution], patch: int) -> list[str]:
    """A problem where a masked crop would never hide a patch."""
    size = min([one.global_size for one in several] or [crops.global_size])
    patches, (low, high) = (size // patch) ** 2, crops.mask_ratio
    if crops.mask == "none" or not patches or int(patches * high):
        return []
    return [
        f"crops.mask_ratio {low:g},{high:g} hides none of the {patches} patches of a crop of {size} pixels: it must "
        f"reach {math.ceil(1e4 / patches) / 1e4:g}, one patch"
    ]


def _colour_problems(crops: CropsSection, model: ModelSection) -> list[str]:
    """Where operations on colours are asked for and images have none."""
    if model.in_chans == 3 or model.backbone == FROM_SOURCE:
        return []
    why = f"no effect on images of {model.in_chans} channels (model.in_chans), which are not RGB"
    problems = [f"crops.grayscale {crops.grayscale:g} has {why}: leave it out"] if crops.grayscale else []
    if crops.jitter and any(crops.jitter[2:]):
        strengths = [f"{strength:g}" for strength in crops.jitter]
        instead = ",".join([*strengths[:2], "0", "0"])
        problems.append(f"crops.jitter {','.join(strengths)}: saturation and hue have {why}: write {instead}")
    return problems


def _gram_problems(several: Iterable[Resolution], gram_size: int | None) -> list[str]:
    """Where resolutions name sizes of crops that Gram anchoring does not have, or leave out those that it has."""
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


def gram_problems(gram: GramSection, crops: CropsSection, teacher: TeacherSection, patch: int) -> list[str]:
    """`patch`: what the sides of the student's crops are multiples of."""
    defaults = GramSection()
    if not gram.weight:
        return [
            f"gram.{name} {getattr(gram, name)} has no effect without gram.weight: leave it out, or give that"
            for name in GramSection.model_fields
            if name != "weight" and getattr(gram, name) != getattr(defaults, name)
        ]
    problems = _of_ema(gram, teacher) if gram.teacher == EMA else _own_crop_problems(gram, crops, patch)
    if gram.refreshes != defaults.refreshes and not gram.refresh_every.value:
        problems.append(f"gram.refreshes {gram.refreshes} has no effect without gram.refresh_every: give both or none")
    return problems


def _of_ema(gram: GramSection, teacher: TeacherSection) -> list[str]:
    problems = []
    if gram.crop_size is not None:
        problems.append(
            f"gram.crop_size {gram.crop_size} with gram.teacher ema, which sees the global crops: leave one of them out"
        )
    if gram.refresh_every.value:
        problems.append(
            f"gram.refresh_every {gram.refresh_every} with gram.teacher ema, which moves with every step: leave it out"
        )
    if teacher.source is not None:
        problems.append(
            "gram.teacher ema with teacher.source: the EMA teacher sees no crops then; take snapshot, a run or weights"
        )
    return problems


def _own_crop_problems(gram: GramSection, crops: CropsSection, patch: int) -> list[str]:
    size, own = gram.crop_size, crops.global_size
    if size is None:
        return []
    if not own <= size <= 2 * own:
        return [f"gram.crop_size {size} must be 1 to 2 times crops.global_size {own}: {own} to {2 * own}, or none"]
    if size % patch and (gram.teacher == SNAPSHOT or gram.refresh_every.value):
        fitting = " or ".join(str(s) for s in (size // patch * patch, size // patch * patch + patch))
        return [f"gram.crop_size {size} is not a multiple of the patch size {patch}: use {fitting}"]
    return []

"""Which crops a recipe can't have: their sizes, and colours of images without; in one line each. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

from dino_ds.backbones import FROM_SOURCE
from dino_ds.config.crops import Resolution, parse_resolutions
from dino_ds.config.model import ModelSection
from dino_ds.config.sections import CropsSection


def crop_problems(crops: CropsSection, model: ModelSection, patch: int, gram_size: int | None) -> list[str]:
    """`patch`: what the sides of crops are multiples of. gram_size: of Gram anchoring's own crops, if it has any."""
    several = parse_resolutions(crops.resolutions)
    sizes = [("crops.global_size", crops.global_size)]
    problems = _gram_problems(several, gram_size) + _colour_problems(crops, model)
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


def _colour_problems(crops: CropsSection, model: ModelSection) -> list[str]:
    """Where operations on colours are asked for and images have none."""
    if model.in_chans == 3 or model.backbone == FROM_SOURCE:
        return []
    why = f"has no effect on images of {model.in_chans} channels (model.in_chans), which are not RGB"
    problems = [f"crops.grayscale {crops.grayscale:g} {why}: leave it out"] if crops.grayscale else []
    if crops.jitter and any(crops.jitter[2:]):
        bright, contrast, *colours = (f"{strength:g}" for strength in crops.jitter)
        problems.append(
            f"crops.jitter: the saturation and hue of {','.join((bright, contrast, *colours))} {why}: "
            f"write {bright},{contrast},0,0"
        )
    return problems


def _gram_problems(several: Iterable[Resolution], gram_size: int | None) -> list[str]:
    """Where resolutions name sizes of crops that Gram anchoring does not have, or leave out those that it has."""
    for one in several:
        name, size = f"crops.resolutions {one}", one.gram_size
        if size and not gram_size:
            return [
                f"{name} has a Gram size, and Gram anchoring has no crops of its own here: set gram.weight and "
                "gram.crop_size, or leave out the third number"
            ]
        if gram_size and not size:
            return [
                f"{name} has no Gram size, and gram.crop_size is {gram_size}: write GLOBAL/LOCAL/GRAM:SHARE, or set "
                "gram.crop_size none"
            ]
        if size and not one.global_size <= size <= 2 * one.global_size:
            return [f"{name}: Gram size {size} must be 1 to 2 times the global size {one.global_size}"]
    return []

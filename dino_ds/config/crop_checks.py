"""Checks a recipe's crops for settings that can't be or have no effect, and finds sizes that fit images. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dino_ds.config.crops import Resolution, parse_resolutions
from dino_ds.config.model import ModelSection
from dino_ds.config.schema import IdleKey
from dino_ds.config.sections import CropsSection
from dino_ds.models.specs.backbones import FROM_SOURCE


def crop_problems(crops: CropsSection, model: ModelSection) -> list[str]:
    """Lines about sizes, colors and masks that crops can't have."""
    several, patch = parse_resolutions(crops.resolutions), model.side_multiple
    sizes = [("crops.global_size", crops.global_size)]
    problems = _color_problems(crops, model)
    problems += _mask_problems(crops, several, patch)
    if crops.mask != "none" and model.backbone != FROM_SOURCE and "mask_token" not in model.spec().obeys:
        can_not = f"and {model.backbone} can't: take a ViT, or leave it out with the loss of masked patches"
        problems.append(f"crops.mask {crops.mask} needs a backbone that hides patches, {can_not}")
    if crops.num_local:
        sizes += [(f"crops.resolutions {resolution}: local size", resolution.local_size) for resolution in several]
        sizes += [] if several else [("crops.local_size", crops.local_size)]
    sizes += [(f"crops.resolutions {resolution}: global size", resolution.global_size) for resolution in several]
    return problems + side_problems(sizes, model.backbone, patch)


def side_problems(sizes: Iterable[tuple[str, int]], backbone: str, patch: int) -> list[str]:
    """Lines about (key, side) of crops whose sides are not multiples of the backbone's patch size."""
    return [
        f"{name} {size} is not a multiple of the patch size {patch} (model.backbone {backbone}): "
        f"use {' or '.join(str(s) for s in (size // patch * patch, size // patch * patch + patch) if s)}"
        for name, size in sizes
        if size % patch
    ]


def _mask_problems(crops: CropsSection, several: Iterable[Resolution], patch: int) -> list[str]:
    """A problem where a masked crop would never hide a patch."""
    size = min([resolution.global_size for resolution in several] or [crops.global_size])
    patches, (low, high) = (size // patch) ** 2, crops.mask_ratio
    if crops.mask == "none" or not patches or int(patches * high):
        return []
    return [
        f"crops.mask_ratio {low:g},{high:g} hides none of the {patches} patches of a crop of {size} pixels: it must "
        f"reach {math.ceil(1e4 / patches) / 1e4:g}, one patch"
    ]


def _color_problems(crops: CropsSection, model: ModelSection) -> list[str]:
    """Problems of color augmentations for images that are not RGB."""
    if model.in_chans == 3 or model.backbone == FROM_SOURCE:
        return []
    why = f"no effect on images of {model.in_chans} channels (model.in_chans), which are not RGB"
    problems: list[str] = [IdleKey.of("crops.grayscale", crops.grayscale, f"has {why}")] if crops.grayscale else []
    if crops.jitter and any(crops.jitter[2:]):
        strengths = [f"{strength:g}" for strength in crops.jitter]
        instead = ",".join([*strengths[:2], "0", "0"])
        problems.append(f"crops.jitter {','.join(strengths)}: saturation and hue have {why}: write {instead}")
    return problems


def fitting_sizes(side: int, patch: int, most: int) -> tuple[int, int]:
    """(global, local) sizes of crops for images of `side` pixels, multiples of the patch: global ones of `most` pixels
    at most, local ones in DINO's ratio of 96 to 224, or half of the global ones if `most` is below 224."""
    large = max(2, min(most, side) // patch) * patch
    share = 0.5 if most < 224 else 96 / 224
    return large, min(max(1, round(share * large / patch)) * patch, large - patch)

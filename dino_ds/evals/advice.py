"""Words for the user of a training run about its evaluations: what would help, and which key of the recipe is meant."""

from __future__ import annotations

import re

from dino_ds.config.recipe import Recipe
from dino_ds.errors import ConfigError, DataError

_SMALLEST_PATCH, _SMALL_IMAGE = 4, 64
"""Sides in pixels: the smallest patch that is advised, and the largest crops that call for weak augmentation."""


def changes_that_help(recipe: Recipe) -> list[str]:
    """Advice on images' features that the recipe does not follow already."""
    spec, crops, found = recipe.model.spec(), recipe.crops, []
    if "patch_size" in spec.obeys and spec.stride > _SMALLEST_PATCH:
        found.append(f"with smaller patches than {spec.stride} pixels (--model.patch_size)")
    if crops.global_size <= _SMALL_IMAGE and crops.augment != "low_res":
        found.append("with --crops.augment low_res, for images of 32 to 64 pixels")
    return found


def with_recipe_keys(name: str, error: ConfigError | DataError) -> ConfigError | DataError:
    """The message of an evaluation with recipe keys in the place of the flags of `dino-ds eval`."""
    words = {
        "(--images)": "(eval.bank_images, eval.test_images)",
        "--images": "--eval.bank_images",
        "with --test_root DIR": "with --eval.root DIR, or leave this out with --eval.evals auto",
        "--test_root": "--eval.root",
        "--benchmark_root": "--eval.benchmark_root",
        "--k": "--eval.k",
    }
    text = re.sub("|".join(map(re.escape, words)), lambda flag: words[flag[0]], str(error))
    return type(error)(f"eval.evals {name}: {text}")

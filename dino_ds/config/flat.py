"""Recipes by dotted names: to compare two of them, and to say which keys have no effect beside others."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dino_ds.config.fields import PATH, Section
from dino_ds.config.recipe import Recipe
from dino_ds.config.schema import options_of, show_value


def flat_values(recipe: Recipe) -> dict[str, Any]:
    """Dotted name -> plain value."""
    return flatten(recipe.model_dump(mode="json"))


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections -> dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """The differences between two nested mappings, in words such as "seed 0 -> 1", by dotted name in order."""
    old, new = flatten(before), flatten(now)
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return {key: f"{key} {old.get(key)} -> {new.get(key)}" for key in keys}


def named_values(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value as the schema has it)."""
    for key, value in section:
        if isinstance(value, Section):
            yield from named_values(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@functools.cache
def path_keys() -> tuple[str, ...]:
    """The dotted names of the keys whose values may be paths, as their types say."""
    options = options_of(Recipe).items()
    return tuple(name for name, option in options if any(PATH in limits for _, limits in option.members))


def split_place(value: str) -> tuple[str, str]:
    """A value of such a key -> what stands before its path, and the path; "" for a word that is none."""
    kind, colon, file = value.partition(":")
    if kind == "clusters":
        return kind + colon, file
    return "", "" if value in ("none", "classes", "snapshot", "ema") else value


def idle_keys(recipe: Recipe, given: Iterable[str]) -> list[str]:
    """A line for each of the keys `given` that has no effect in this recipe, and why."""
    values = dict(named_values(recipe))
    reasons = {key: _why_idle(key, recipe, values) for key in given}
    return [f"{key} {show_value(values[key])} has no effect: {reason}" for key, reason in reasons.items() if reason]


def _why_idle(key: str, recipe: Recipe, values: Mapping[str, Any]) -> str:
    how = recipe.objective
    if key == "crops.local_size" and recipe.crops.resolutions:
        return "crops.resolutions gives the sizes"
    # Terms of a user's own may have prototypes.
    if not (how.dino_weight or how.ibot_weight or recipe.teacher.distill) and how.terms == "{}" and key in _PROTOTYPES:
        return "no loss has prototypes (objective.dino_weight and ibot_weight are 0)"
    other, off = _IDLE.get(key, ("", ""))
    return f"{other} is {off}" if other and show_value(values[other]).split()[0] == off else ""


_PROTOTYPES = (
    *("head.prototypes", "objective.teacher_temp", "objective.student_temp", "objective.centering"),
    *("objective.freeze_prototypes", "objective.frozen_prototypes"),
)
_IDLE = {
    "optimizer.warmup_shape": ("optimizer.warmup", "0"),
    "optimizer.min_lr": ("optimizer.schedule", "constant"),
    **dict.fromkeys(("crops.local_size", "crops.local_scale"), ("crops.num_local", "0")),
    **dict.fromkeys(("crops.mask_share", "crops.mask_ratio"), ("crops.mask", "none")),
    "objective.warmup_teacher_temp": ("objective.teacher_temp_warmup", "0"),
    "objective.frozen_prototypes": ("objective.freeze_prototypes", "0"),
    "objective.koleo_ranks": ("objective.koleo_weight", "0"),
    "objective.ibot_head": ("objective.ibot_weight", "0"),
    **dict.fromkeys(("model.drop_path_growth", "model.stochastic_depth"), ("model.drop_path", "0")),
}
"""Key -> the key beside whose value it has no effect."""

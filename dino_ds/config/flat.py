"""Recipes by dotted names: to compare two of them, and to say which keys have no effect beside others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dino_ds.config.fields import PATH, Length, Section
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


def lengths_without_unit(recipe: Recipe) -> list[str]:
    """The dotted names of lengths that were given as bare numbers."""
    return [name for name, value in named_values(recipe) if isinstance(value, Length) and value.assumed]


def idle_keys(recipe: Recipe, given: Iterable[str]) -> list[str]:
    """A line for each of the keys `given` that has no effect in this recipe, and why."""
    values, lines = dict(named_values(recipe)), []
    for key in given:
        reason = next((why for keys, is_idle, why in _IDLE if key in keys.split() and is_idle(recipe)), None)
        if reason is not None:
            lines.append(f"{key} {show_value(values[key])} has no effect: {reason}")
    return lines


def _has_no_prototypes(recipe: Recipe) -> bool:
    """Whether no loss of ours has prototypes; terms of a user's own may have them."""
    how = recipe.objective
    return not (how.dino_weight or how.ibot_weight) and how.terms == "{}" and recipe.teacher.distill is None


_PROTOTYPES = (
    "head.prototypes objective.teacher_temp objective.student_temp objective.centering objective.freeze_prototypes "
    "objective.frozen_prototypes"
)
_IDLE: list[tuple[str, Callable[[Recipe], bool], str]] = [
    ("optimizer.warmup_shape", lambda r: not r.optimizer.warmup.value, "optimizer.warmup is 0"),
    ("optimizer.min_lr", lambda r: r.optimizer.schedule == "constant", "optimizer.schedule is constant"),
    ("crops.local_size crops.local_scale", lambda r: not r.crops.num_local, "crops.num_local is 0"),
    ("crops.local_size", lambda r: bool(r.crops.resolutions), "crops.resolutions gives the sizes"),
    ("crops.mask_share crops.mask_ratio", lambda r: r.crops.mask == "none", "crops.mask is none"),
    (
        "objective.warmup_teacher_temp",
        lambda r: not r.objective.teacher_temp_warmup.value,
        "objective.teacher_temp_warmup is 0",
    ),
    (_PROTOTYPES, _has_no_prototypes, "no loss has prototypes (objective.dino_weight and ibot_weight are 0)"),
    (
        "objective.frozen_prototypes",
        lambda r: not r.objective.freeze_prototypes.value,
        "objective.freeze_prototypes is 0",
    ),
    ("objective.koleo_ranks", lambda r: not r.objective.koleo_weight, "objective.koleo_weight is 0"),
    ("objective.ibot_head", lambda r: not r.objective.ibot_weight, "objective.ibot_weight is 0"),
    ("model.drop_path_growth model.stochastic_depth", lambda r: not r.model.drop_path, "model.drop_path is 0"),
]
"""Keys, when they have no effect, and why; of several reasons the first is said."""

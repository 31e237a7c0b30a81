"""Flattens recipes to dotted names, by which two of them are compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dino_ds.config.fields import Length, Section
from dino_ds.config.recipe import Recipe


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


def lengths_without_unit(recipe: Recipe) -> list[str]:
    """The dotted names of lengths that were given as bare numbers."""
    return [name for name, value in named_values(recipe) if isinstance(value, Length) and value.assumed]

"""Sections as dotted names: what two recipes are compared by."""

from __future__ import annotations

from typing import Any

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

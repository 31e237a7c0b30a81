"""A recipe with another backbone."""

from __future__ import annotations

from dino_ds.architectures import ARCHITECTURES
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe


def with_backbone(recipe: Recipe, backbone: str | None) -> Recipe:
    """`recipe` with this backbone, and crops that its patches divide: 96 pixels become 98 for patches of 14, as in
    DINOv2. Raises ConfigError."""
    if backbone is None:
        return recipe
    patch = ARCHITECTURES[backbone].stride if backbone in ARCHITECTURES else 1
    crops = {"global_size": recipe.crops.global_size, "local_size": recipe.crops.local_size}
    sizes = {f"crops.{name}": str(max(1, round(size / patch)) * patch) for name, size in crops.items()}
    return change_recipe(recipe, {"model.backbone": backbone, **sizes})

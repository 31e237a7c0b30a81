"""Facts of the teacher of a run that its tensors do not show: teacher.json, and the same of any checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from dino_ds.checkpoint.manifest import Manifest
from dino_ds.config.recipe import Recipe
from dino_ds.data.normalisation import Normalisation
from dino_ds.errors import CheckpointError
from dino_ds.models.specs.base import BackboneSpec


def about_teacher(
    recipe: Recipe, distilled: Mapping[str, Any] | None, step: int, versions: Mapping[str, str]
) -> dict[str, Any]:
    """Content of teacher.json: how the teacher was made, `distilled` from what, and how timm builds its model."""
    arch, known, normalisation = recipe.model.spec(), recipe.data.known_range, Normalisation.of(recipe)
    return {
        **({"value_range": list(known)} if known else {}),
        "mean": list(normalisation.mean),
        "std": list(normalisation.std),
        **_timm(recipe, arch),
        "pos_embed_interpolation": recipe.model.pos_embed_interpolation,
        **({"distilled_from": dict(distilled)} if distilled else {}),
        "step": step,
        "images": step * recipe.data.global_batch,
        "architecture": dict(vars(arch)),
        "versions": dict(versions),
    }


def about_checkpoint(saved: Manifest, network: str = "teacher") -> dict[str, Any]:
    """The content that teacher.json would have, written from this checkpoint. Raises CheckpointError."""
    about = about_teacher(recipe_of(saved), saved.frozen_teacher, saved.step, saved.versions)
    if network == "student" and "load" in about:
        about["load"] = about["load"].replace("teacher.safetensors", "student.safetensors")
    return about if network == "teacher" else about | {"network": network}


def recipe_of(saved: Manifest) -> Recipe:
    """The recipe that a checkpoint was saved with. Raises CheckpointError where it is of another version."""
    try:
        return Recipe.model_validate(saved.recipe)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"its recipe is of another version of dino_ds ({where}: {first['msg']})") from None


def _timm(recipe: Recipe, arch: BackboneSpec) -> dict[str, Any]:
    backbone, size = recipe.model.backbone, recipe.crops.global_size
    own = {} if arch.told_by_tensors else {"backbone": backbone, "image_size": size}
    known = arch.timm_model(backbone, size)
    if known is None:
        return {"image_size": size, **own}
    name, arguments = known[0], known[1] | {"num_classes": 0}
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return own | {
        "load": f"model = timm.create_model({name!r}, {written}); "
        "model.load_state_dict(safetensors.torch.load_file('teacher.safetensors'))",
        "timm_name": name,
        "timm_arguments": arguments,
    }

"""Settings of a recipe that was written for one network and that another one has no use for. No torch here."""

from __future__ import annotations

import contextlib

from dino_ds.config.model import OF_ANY_BACKBONE, OF_ROPE, SPEC_KEYS, has_option
from dino_ds.models.specs.backbones import FROM_SOURCE, ViTSpec, backbone_spec


def keys_not_of(backbone: object) -> list[str]:
    """Keys of the recipe that `backbone` can't take over from another one: arguments, and what it does not have."""
    keys = ["arguments"]
    with contextlib.suppress(ValueError):  # the schema refuses an unknown name
        spec = None if backbone == FROM_SOURCE else backbone_spec(str(backbone))
        keys += [key for key in SPEC_KEYS if spec and not has_option(spec, key)]
        keys += OF_ANY_BACKBONE if spec and not isinstance(spec, ViTSpec) else ()
        keys += OF_ROPE if spec and getattr(spec, "rope", None) is None else ()
    return [f"model.{key}" for key in dict.fromkeys(keys)]

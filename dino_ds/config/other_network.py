"""Settings of a recipe that was written for one network and that another one has no use for. No torch here."""

from __future__ import annotations

import contextlib

from dino_ds.config.model import keys_not_obeyed
from dino_ds.models.specs.backbones import FROM_SOURCE, backbone_spec


def keys_not_of(backbone: object) -> list[str]:
    """Keys of the recipe that `backbone` can't take over from another one: arguments, and what it does not obey."""
    keys = ["arguments"]
    with contextlib.suppress(ValueError):  # the schema refuses an unknown name
        keys += [] if backbone == FROM_SOURCE else keys_not_obeyed(backbone_spec(str(backbone)))
    return [f"model.{key}" for key in keys]

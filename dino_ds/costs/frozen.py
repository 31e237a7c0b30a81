"""What is known of the teacher that is distilled without reading its weights."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from dino_ds.backbones import BACKBONES, BackboneSpec, ViTSpec
from dino_ds.config.recipe import Recipe


def frozen_spec(recipe: Recipe) -> ViTSpec | None:
    """The backbone of teacher.source, as far as its name or the JSON beside it says; None: another kind, or unknown."""
    return None if recipe.teacher.source is None else _stated(recipe.teacher.source)


def is_unknown(recipe: Recipe) -> bool:
    """Whether there is a frozen teacher that can't be counted."""
    return recipe.teacher.source is not None and frozen_spec(recipe) is None


@functools.cache
def _stated(source: str) -> ViTSpec | None:
    base, path = source.partition(".")[0], Path(source)
    spec: BackboneSpec | None = BACKBONES.get(base) if not path.exists() else None
    if isinstance(spec, ViTSpec):
        return spec
    beside = path / "teacher.json" if path.is_dir() else path.with_suffix(".json")
    try:
        about: Any = json.loads(beside.read_text())
        return replace(ViTSpec(**about["architecture"]), local_cls_norm=False)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None

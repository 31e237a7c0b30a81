"""Inputs of a rehearsal beside the recipe: settings of the ds config, and a frozen teacher's architecture."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, replace
from pathlib import Path

from dino_ds.basics.files import read_object
from dino_ds.config.ds_schema import DsConfig, PerformanceOptions
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import find_model_folder
from dino_ds.models.specs.backbones import BACKBONES, ViTSpec
from dino_ds.models.specs.base import BackboneSpec


@dataclass(frozen=True)
class RehearsalSettings:
    """The part of a ds config that a rehearsed micro-batch depends on; window: micro-batches of a step.

    Settings that are not rehearsed have a fixed value, so that one rehearsal serves many configs: compiled blocks
    and the EMA teacher's low-precision copy, without which its matrices are cast at each use.
    """

    precision: str
    checkpoint_blocks: int | str
    performance: PerformanceOptions
    window: int

    @staticmethod
    def from_config(config: DsConfig, on_gpu: bool) -> RehearsalSettings:
        performance = dataclasses.replace(
            config.performance,
            compile="off",
            deterministic=False,
            teacher_copy=False,
            fast_paths=True,
        )
        return RehearsalSettings(config.precision, config.checkpoint_blocks, performance, config.accumulation)


def frozen_spec(recipe: Recipe) -> ViTSpec | None:
    """The backbone of teacher.source, by its name or the JSON file beside it; None: another kind, or unknown."""
    return None if recipe.teacher.source is None else _stated(recipe.teacher.source)


@functools.cache
def _stated(source: str) -> ViTSpec | None:
    base, path = source.partition(".")[0], Path(source)
    spec: BackboneSpec | None = BACKBONES.get(base) if not path.exists() else None
    if isinstance(spec, ViTSpec):
        return spec
    beside = find_model_folder(source).folder / "teacher.json" if path.is_dir() else path.with_suffix(".json")
    try:
        about = read_object(beside)
        return replace(ViTSpec(**about["architecture"]), local_cls_norm=False)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def not_counted(recipe: Recipe) -> list[str]:
    """Notes on a distilled teacher whose memory can't be counted before its file is read."""
    teacher = recipe.teacher
    if teacher.distill is not None and teacher.source is None:
        return [
            f"teacher.distill {teacher.distill} and no teacher.source: an EMA teacher is counted; add --teacher.source"
        ]
    if teacher.source is None or frozen_spec(recipe) is not None:
        return []
    return [
        f"teacher.source {teacher.source} does not say its architecture without being read: its memory is not counted"
    ]

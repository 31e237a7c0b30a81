"""Helpers that all benches use: what they do before and after they measure."""

from __future__ import annotations

from typing import Any

import torch

from dino_ds.config.crops import describe_crops
from dino_ds.config.recipe import Recipe
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError
from dino_ds.planning.measure.host import describe_host, host_line
from dino_ds.planning.measure.trial import join

MEMORY_STEPS = 2
"""The second step is the first with Adam's moments: the highest."""


def begin(batch: int | None, threads: int, one_process: str = "") -> int:
    """Join the process group and return the images per process. `one_process` names a command that runs on one only."""
    join(threads)
    if one_process and distributed.world_size() > 1:
        raise ConfigError(f"{one_process} measures in one process: start it without deepspeed or torchrun")
    return batch or (64 if torch.cuda.is_available() else 8)


def about(recipe: Recipe, batch: int) -> dict[str, Any]:
    """The part of a result that describes what was measured, and where."""
    return {
        "backbone": recipe.model.backbone,
        "crops": describe_crops(recipe.groups),
        "prototypes": recipe.head.prototypes,
        "batch": batch,
        "processes": distributed.world_size(),
        "host": describe_host(),
    }


def heading(title: str, result: dict[str, Any]) -> str:
    """The lines above a table."""
    what = (
        f"{result['backbone']}, crops {result['crops']} pixels, {result['prototypes']} prototypes, "
        f"{result['batch']} images per process, {result['processes']} process(es)"
    )
    return f"{title}: {what}\n{host_line(result['host'])}\n"


def clock_name(clock: str) -> str:
    return "CPU time of one thread" if clock == "cpu" else "wall time"

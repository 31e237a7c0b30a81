"""What all benches do before and after they measure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dino_ds import distributed
from dino_ds.config.crops import describe_crops
from dino_ds.config.recipe import Recipe
from dino_ds.costs.flops import HeadSizes, step_flops, vit_of
from dino_ds.errors import ConfigError
from dino_ds.measure.host import describe_host, host_line
from dino_ds.measure.memory import ChildResult, run_in_child
from dino_ds.measure.trial import build_trial, join, resolve

MEMORY_STEPS = 2
"""The second step is the first with Adam's moments: the highest."""


def begin(batch: int | None, threads: int, one_process: str = "") -> int:
    """Join the process group; images per process. `one_process` names a command that runs on one only."""
    join(threads)
    if one_process and distributed.world_size() > 1:
        raise ConfigError(f"{one_process} measures in one process: start it without deepspeed or torchrun")
    return batch or (64 if torch.cuda.is_available() else 8)


def memory_of_step(recipe: Recipe, ds: Mapping[str, Any], ds_path: str, batch: int, threads: int) -> ChildResult:
    """Peak memory of the training step, in a process of its own. Raises ChildFailed."""
    return run_in_child(
        "dino_ds.bench.common:take_steps",
        threads,
        recipe=recipe.model_dump(mode="json"),
        ds=dict(ds),
        ds_path=ds_path,
        batch=batch,
    )


def take_steps(recipe: dict[str, Any], ds: dict[str, Any], ds_path: str, batch: int) -> None:
    """What `memory_of_step` runs."""
    trial = build_trial(*resolve(Recipe.model_validate(recipe), ds, ds_path, batch))
    for _ in range(MEMORY_STEPS):
        trial.run()


def recipe_flops(recipe: Recipe, cls_only_last_block: bool = False) -> dict[str, int]:
    """`step_flops` of a recipe: per image, by part."""
    head = recipe.head
    sizes = HeadSizes(head.prototypes, head.hidden, head.bottleneck, head.layers)
    return step_flops(vit_of(recipe), sizes, recipe.crops.groups, cls_only_last_block)


def about(recipe: Recipe, batch: int) -> dict[str, Any]:
    """The part of a result that says what was measured and where."""
    return {
        "backbone": recipe.model.backbone,
        "crops": describe_crops(recipe.crops.groups),
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

"""`dino-ds plan`: does it fit, how fast would it be, which ds config to take. Needs no GPU and no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.errors import ConfigError
from dino_ds.measure.tables import print_result
from dino_ds.options.machine import PlanOptions
from dino_ds.plan.config_advice import advise
from dino_ds.plan.fit import Fit, Setup, micro_batches, with_backbone
from dino_ds.plan.gpus import named_gpu
from dino_ds.plan.recommend import recommend, write_ds
from dino_ds.plan.report import describe, page
from dino_ds.plan.speed import Cluster

_RECOMMENDED = "the recommended config"


def run(options: PlanOptions, *, recipe: Recipe, ds: dict[str, Any] | None, ds_path: str | None) -> None:
    """Print what `plan` finds."""
    result = plan(options, recipe=recipe, ds=ds, ds_path=ds_path)
    print_result(page(result), result, options.json)


def plan(options: PlanOptions, *, recipe: Recipe, ds: dict[str, Any] | None, ds_path: str | None) -> dict[str, Any]:
    """Describe this ds JSON, or recommend one if it is None. Raises ConfigError."""
    if ds is not None and options.write:
        raise ConfigError("--write is for the recommended config: leave --ds_config out")
    stage_alone = recipe.stage_start is not None and "backbone" not in recipe.model.model_fields_set
    recipe = with_backbone(recipe, options.backbone)
    card = named_gpu(options.gpu, options.memory_gib)
    network = card.network if options.network_gbit is None else options.network_gbit / 8
    cluster = Cluster(card, options.gpus, options.nodes, network)
    recipe, warnings = _divisible(recipe, cluster.world_size)
    if stage_alone and options.backbone is None:
        warnings.append(
            f"the recipe is a stage and names no backbone: planned with {recipe.model.backbone}; --config RECIPE,STAGE "
            "plans it over the recipe of the run that it begins with"
        )
    if options.gpu is None:
        warnings.append(f"no --gpu is given: speed is estimated as of {card.name}")
    if ds is None or ds_path is None:
        result = _recommended(recipe, cluster)
    else:
        result = _given(Setup(recipe, ds, ds_path, cluster))
    result["warnings"] = warnings + result["warnings"]
    if options.write:
        write_ds(result["ds_config"], Path(options.write))
    result["written"] = options.write
    return result


def _divisible(recipe: Recipe, world_size: int) -> tuple[Recipe, list[str]]:
    batch = recipe.data.global_batch
    if batch % world_size == 0:
        return recipe, []
    below, above = batch // world_size * world_size, -(-batch // world_size) * world_size
    nearest = below if below and batch - below <= above - batch else above
    line = f"global batch {batch} is not a multiple of {world_size} GPUs: planned with --data.global_batch {nearest}"
    return change_recipe(recipe, {"data.global_batch": str(nearest)}), [line]


def _recommended(recipe: Recipe, cluster: Cluster) -> dict[str, Any]:
    limit = cluster.gpu.memory_gib
    best = recommend(recipe, cluster, limit)
    result = describe(Setup(recipe, best.ds, _RECOMMENDED, cluster), best.fit, best.time)
    verdict = (
        f"recommended: {best.shape}, {best.fit.config.precision}, micro-batch {best.fit.config.micro_batch}: "
        f"{best.fit.memory.gib:.1f} of {limit:g} GiB; largest micro-batch that fits {result['max_micro_batch']}"
    )
    return result | {"verdict": verdict, "refused": best.refused, "warnings": []}


def _given(setup: Setup) -> dict[str, Any]:
    found = setup.fit()
    result = describe(setup, found, setup.time())
    return result | {"verdict": _verdict(setup, found), "refused": [], "warnings": advise(setup)}


def _verdict(setup: Setup, found: Fit) -> str:
    """The answer in one line: it fits, it fits with a change, or it does not fit."""
    recipe, cluster = setup.recipe, setup.cluster
    needs, largest = f"{found.memory.gib:.1f} of {found.limit_gib:g} GiB", setup.largest_micro_batch()
    if found.fits:
        return f"fits: {needs}; largest micro-batch that fits {largest}"
    sizes = micro_batches(recipe.data.global_batch, cluster.world_size)
    for size in sizes:
        if size <= largest:
            accumulation = recipe.data.global_batch // cluster.world_size // size
            return f"fits with micro-batch {size}, accumulation {accumulation}: as it is it needs {needs}"
    if "activation_checkpointing" not in setup.ds:
        lighter = setup.with_ds({**setup.ds, "activation_checkpointing": {}})
        for size in sizes:
            if size <= found.config.micro_batch and lighter.fit(size).fits:
                return f"fits with activation checkpointing and micro-batch {size}: as it is it needs {needs}"
    try:
        other = recommend(recipe, cluster, found.limit_gib)
    except ConfigError as error:
        return f"does not fit: it needs {needs}; {error}"
    return f"does not fit: it needs {needs}; {other.shape} with micro-batch {other.fit.config.micro_batch} would"

"""`dino-ds plan`: does it fit, how fast would it be, which ds config to take. Needs no GPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from dino_ds.config.ds_values import offloads_optimizer, offloads_weights
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.step_costs import count_parameters
from dino_ds.errors import ConfigError
from dino_ds.options.machine import PlanOptions
from dino_ds.planning.fit import Fit, Setup, micro_batches, with_backbone
from dino_ds.planning.gpus import named_gpu
from dino_ds.planning.measure.tables import print_result
from dino_ds.planning.recommend import RECOMMENDED, recommend, write_ds
from dino_ds.planning.report import describe, page
from dino_ds.planning.speed import Cluster


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
    result = describe(Setup(recipe, best.ds, RECOMMENDED, cluster), best.fit, best.time)
    verdict = (
        f"recommended: {best.shape}, {best.fit.config.precision}, micro-batch {best.fit.config.micro_batch}: "
        f"{best.fit.memory.gib:.1f} of {limit:g} GiB; largest micro-batch that fits {result['max_micro_batch']}"
    )
    return result | {"verdict": verdict, "refused": best.refused, "warnings": []}


def _given(setup: Setup) -> dict[str, Any]:
    found = setup.fit()
    result = describe(setup, found, setup.time())
    return result | {"verdict": _verdict(setup, found), "refused": [], "warnings": costly_settings(setup)}


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


def costly_settings(setup: Setup) -> list[str]:
    """Settings that cost more than they give for this model on these GPUs: a sentence each, with what to do."""
    weights, ds, gpu = count_parameters(setup.recipe), setup.ds, setup.cluster.gpu
    zero = ds.get("zero_optimization", {})
    found = [
        f"{key} {zero[key]:,} is more than the {weights:,} weights: one bucket, as large, and nothing to overlap; "
        'write "auto"'
        for key in ("reduce_bucket_size", "allgather_bucket_size")
        if isinstance(zero.get(key), int) and zero[key] > weights
    ]
    if ds.get("fp16", {}).get("enabled") and gpu.bf16:
        found.append("fp16 needs a loss scale and skips steps: these GPUs have bf16, which needs neither")
    if ds.get("bf16", {}).get("enabled") and not gpu.bf16:
        found.append(f"{gpu.name} has no bf16 units: use fp16")
    seconds = setup.time().seconds
    if "activation_checkpointing" in ds:
        other = {key: value for key, value in ds.items() if key != "activation_checkpointing"}
        found += _unneeded("activation checkpointing", setup.with_ds(other), seconds)
    if offloads_optimizer(zero) or offloads_weights(zero):
        other = copy.deepcopy(dict(ds))
        for key in ("offload_optimizer", "offload_param"):
            other["zero_optimization"].pop(key, None)
        found += _unneeded("offloading", setup.with_ds(other), seconds)
    if zero.get("stage") == 3 and not offloads_weights(zero):
        kept = {key: value for key, value in zero.items() if not key.startswith(("stage3_", "zero_", "sub_group"))}
        lower = setup.with_ds({**ds, "zero_optimization": {**kept, "stage": 2}})
        needed, faster = lower.fit(), seconds - lower.time().seconds
        if needed.fits and faster >= 0:
            found.append(
                f"ZeRO 3 gathers every weight for each micro-batch: ZeRO 2 needs {needed.memory.gib:.1f} of "
                f"{gpu.memory_gib:g} GiB and is about {100 * faster / seconds:.0f} % faster"
            )
    return found


def _unneeded(name: str, without: Setup, seconds: float) -> list[str]:
    needed = without.fit()
    if not needed.fits:
        return []
    gain = 1 - without.time().seconds / seconds
    shorter = f", and the step is about {100 * gain:.0f} % shorter" if gain > 0.005 else ""
    limit = f"{needed.limit_gib:g} GiB"
    return [f"{name} is not needed: without it this micro-batch needs {needed.memory.gib:.1f} of {limit}{shorter}"]

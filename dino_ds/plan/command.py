"""`dino-ds plan`: does it fit, how fast would it be, which ds config to take. Needs no GPU and no torch."""

from __future__ import annotations

import dataclasses
import json as jsons
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.errors import ConfigError, StorageError
from dino_ds.measure.tables import print_result
from dino_ds.options.machine import PlanOptions
from dino_ds.plan.backbones import with_backbone
from dino_ds.plan.fit import Fit, fit, fit_with, largest_micro_batch, micro_batches
from dino_ds.plan.gpus import GPUS, Gpu, find_gpu, similar_gpu
from dino_ds.plan.habits import find_bad_habits
from dino_ds.plan.recommend import recommend, write_ds
from dino_ds.plan.report import describe, page
from dino_ds.plan.scaling import scaling_page, simulate_scaling
from dino_ds.plan.speed import Cluster, estimate_step
from dino_ds.plan.sweep import sweep as run_sweep
from dino_ds.plan.sweep import sweep_page

_RECOMMENDED = "the recommended config"


def run(options: PlanOptions, *, recipe: Recipe, ds: dict[str, Any] | None, ds_path: str | None) -> None:
    """`ds` None: recommend one. Raises ConfigError; StorageError if `out` can't be written."""
    recipe = with_backbone(recipe, options.backbone)
    if options.sweep or options.scaling:
        if (options.sweep and options.scaling) or options.out is None:
            raise ConfigError("--sweep and --scaling are two things, each with a folder: --out FOLDER")
        if ds is not None or options.write:
            raise ConfigError("--sweep and --scaling try configs of their own: leave --ds_config and --write out")
        if options.sweep and (options.gpu or options.memory_gib or options.network_gbit):
            raise ConfigError("--sweep tries all cards: leave --gpu, --memory_gib and --network_gbit out")
        if options.scaling and options.nodes > 1:
            raise ConfigError("--scaling goes from 1 to 1024 GPUs: leave --nodes out")
        if options.sweep:
            _sweep(recipe, options.gpus * options.nodes, Path(options.out), options.json)
        else:
            _scaling(
                recipe,
                _cluster(options.gpu, options.memory_gib, options.gpus, options.nodes, options.network_gbit),
                Path(options.out),
                options.json,
            )
        return
    if options.out:
        raise ConfigError("--out is the folder of --sweep or --scaling: give one of them")
    if ds is not None and options.write:
        raise ConfigError("--write is for the recommended config: leave --ds_config out")
    cluster = _cluster(options.gpu, options.memory_gib, options.gpus, options.nodes, options.network_gbit)
    recipe, warnings = _divisible(recipe, cluster.world_size)
    if options.gpu is None:
        warnings.append(f"no --gpu is given: speed is estimated as of {cluster.gpu.name}")
    if ds is None or ds_path is None:
        result = _recommended(recipe, cluster)
        ds = result["ds_config"]
    else:
        result = _given(recipe, ds, ds_path, cluster)
    result["warnings"] = warnings + result["warnings"]
    if options.write:
        write_ds(result["ds_config"], Path(options.write))
    result["written"] = options.write
    print_result(page(result), result, options.json)


def _sweep(recipe: Recipe, world_size: int, folder: Path, json: bool) -> None:
    from dino_ds.plan.pictures import draw_sweep

    result = run_sweep(recipe, world_size)
    _save(result, sweep_page(result), draw_sweep(result), folder / "plan")
    print_result(sweep_page(result), result, json)


def _scaling(recipe: Recipe, cluster: Cluster, folder: Path, json: bool) -> None:
    from dino_ds.plan.pictures import draw_scaling

    result = simulate_scaling(recipe, cluster.gpu, cluster.gpus, cluster.network)
    _save(result, scaling_page(result), draw_scaling(result), folder / "scaling")
    print_result(scaling_page(result), result, json)


def _save(result: dict[str, Any], text: str, figure: Any, place: Path) -> None:
    """`place`.json, .md and .png. Raises StorageError."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.with_suffix(".json").write_text(jsons.dumps(result, indent=1) + "\n", encoding="utf-8")
        place.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
        figure.savefig(place.with_suffix(".png"), dpi=85, pil_kwargs={"optimize": True})
    except OSError as error:
        raise StorageError(f"--out {place.parent} can't be written to: {error.strerror}") from error


def _cluster(name: str | None, memory_gib: float | None, gpus: int, nodes: int, gbit: float | None) -> Cluster:
    card = _card(name, memory_gib)
    return Cluster(card, gpus, nodes, card.network if gbit is None else gbit / 8)


def _card(name: str | None, memory_gib: float | None) -> Gpu:
    """A card of the table, with `memory_gib` if that is given; without a name the one that has nearest to it."""
    if name is None and memory_gib is None:
        raise ConfigError(f"no GPU is given: --gpu NAME ({', '.join(GPUS)}) or --memory_gib N")
    if name is None:
        assert memory_gib is not None
        return similar_gpu(memory_gib)
    card = find_gpu(name)
    return card if memory_gib is None else dataclasses.replace(card, memory_gib=memory_gib)


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
    result = describe(recipe, best.ds, _RECOMMENDED, cluster, best.fit, best.time)
    verdict = (
        f"recommended: {best.shape}, {best.fit.config.precision}, micro-batch {best.fit.config.micro_batch}: "
        f"{best.fit.memory.gib:.1f} of {limit:g} GiB; largest micro-batch that fits {result['max_micro_batch']}"
    )
    about = {"verdict": verdict, "ds_path": _RECOMMENDED, "refused": best.refused, "warnings": []}
    return result | about


def _given(recipe: Recipe, ds: Mapping[str, Any], ds_path: str, cluster: Cluster) -> dict[str, Any]:
    limit = cluster.gpu.memory_gib
    found = fit(recipe, ds, ds_path, cluster.world_size, limit)
    time = estimate_step(recipe, found.config, cluster)
    result = describe(recipe, ds, ds_path, cluster, found, time)
    verdict = _verdict(recipe, ds, ds_path, cluster, found)
    warnings = find_bad_habits(recipe, ds, ds_path, cluster, limit)
    return result | {"verdict": verdict, "ds_path": ds_path, "refused": [], "warnings": warnings}


def _verdict(recipe: Recipe, ds: Mapping[str, Any], ds_path: str, cluster: Cluster, found: Fit) -> str:
    """fits, fits with a change, does not fit."""
    limit, world = cluster.gpu.memory_gib, cluster.world_size
    needs = f"{found.memory.gib:.1f} of {limit:g} GiB"
    largest = largest_micro_batch(recipe, ds, ds_path, world, limit)
    if found.fits:
        return f"fits: {needs}; largest micro-batch that fits {largest}"
    smaller = [size for size in micro_batches(recipe.data.global_batch, world) if size <= largest]
    if smaller:
        accumulation = recipe.data.global_batch // world // smaller[0]
        return f"fits with micro-batch {smaller[0]}, accumulation {accumulation}: as it is it needs {needs}"
    lighter = {**ds, "activation_checkpointing": {}}
    if "activation_checkpointing" not in ds:
        fewer = [s for s in micro_batches(recipe.data.global_batch, world) if s <= found.config.micro_batch]
        for size in fewer:
            if fit_with(recipe, lighter, ds_path, world, limit, size).fits:
                return f"fits with activation checkpointing and micro-batch {size}: as it is it needs {needs}"
    try:
        other = recommend(recipe, cluster, limit)
    except ConfigError as error:
        return f"does not fit: it needs {needs}; {error}"
    return f"does not fit: it needs {needs}; {other.shape} with micro-batch {other.fit.config.micro_batch} would"

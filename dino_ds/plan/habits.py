"""What in a ds config costs more than it gives, for this model on these GPUs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from dino_ds.config.ds_check import offloads_optimizer
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import count_parameters
from dino_ds.plan.fit import Fit, fit
from dino_ds.plan.speed import Cluster, estimate_step

Ds = dict[str, Any]


def find_bad_habits(
    recipe: Recipe, ds: Mapping[str, Any], ds_path: str, cluster: Cluster, limit_gib: float
) -> list[str]:
    """One sentence each, with what to do."""
    weights = count_parameters(recipe)
    zero = ds.get("zero_optimization", {})
    found = [
        f"{key} {zero[key]:,} is more than the {weights:,} weights: one bucket, as large, and nothing to overlap; "
        'write "auto"'
        for key in ("reduce_bucket_size", "allgather_bucket_size")
        if isinstance(zero.get(key), int) and zero[key] > weights
    ]
    if ds.get("fp16", {}).get("enabled") and cluster.gpu.bf16:
        found.append("fp16 needs a loss scale and skips steps: these GPUs have bf16, which needs neither")
    if ds.get("bf16", {}).get("enabled") and not cluster.gpu.bf16:
        found.append(f"{cluster.gpu.name} has no bf16 units: use fp16")
    seconds = _seconds(recipe, ds, ds_path, cluster, limit_gib)
    for without, words in _LIGHTER:
        other = without(ds)
        if other is None:
            continue
        needed = fit(recipe, other, ds_path, cluster.world_size, limit_gib)
        if needed.fits:
            gain = 1 - _seconds(recipe, other, ds_path, cluster, limit_gib) / seconds
            found.append(
                f"{words}: without it this micro-batch needs {needed.memory.gib:.1f} of {limit_gib:g} GiB"
                + (f", and the step is about {100 * gain:.0f} % shorter" if gain > 0.005 else "")
            )
    return found + _lower_stage(recipe, ds, ds_path, cluster, limit_gib, seconds)


def _lower_stage(
    recipe: Recipe, ds: Mapping[str, Any], ds_path: str, cluster: Cluster, limit_gib: float, seconds: float
) -> list[str]:
    """ZeRO 3 where less would do."""
    zero = ds.get("zero_optimization", {})
    if zero.get("stage") != 3 or zero.get("offload_param", {}).get("device", "none") != "none":
        return []
    kept = {key: value for key, value in zero.items() if not key.startswith(("stage3_", "zero_", "sub_group"))}
    other = {**ds, "zero_optimization": {**kept, "stage": 2}}
    needed = fit(recipe, other, ds_path, cluster.world_size, limit_gib)
    faster = seconds - _seconds(recipe, other, ds_path, cluster, limit_gib)
    if not needed.fits or faster < 0:
        return []
    return [
        f"ZeRO 3 gathers every weight for each micro-batch: ZeRO 2 needs {needed.memory.gib:.1f} of {limit_gib:g} GiB "
        f"and is about {100 * faster / seconds:.0f} % faster"
    ]


def _seconds(recipe: Recipe, ds: Mapping[str, Any], ds_path: str, cluster: Cluster, limit_gib: float) -> float:
    found: Fit = fit(recipe, ds, ds_path, cluster.world_size, limit_gib)
    return estimate_step(recipe, found.config, cluster).seconds


def _without_checkpointing(ds: Mapping[str, Any]) -> Ds | None:
    if "activation_checkpointing" not in ds:
        return None
    return {key: value for key, value in ds.items() if key != "activation_checkpointing"}


def _without_offload(ds: Mapping[str, Any]) -> Ds | None:
    zero = ds.get("zero_optimization", {})
    if not offloads_optimizer(zero) and zero.get("offload_param", {}).get("device", "none") == "none":
        return None
    lighter = copy.deepcopy(dict(ds))
    for key in ("offload_optimizer", "offload_param"):
        lighter["zero_optimization"].pop(key, None)
    return lighter


_LIGHTER: tuple[tuple[Callable[[Mapping[str, Any]], Ds | None], str], ...] = (
    (_without_checkpointing, "activation checkpointing is not needed"),
    (_without_offload, "offloading is not needed"),
)

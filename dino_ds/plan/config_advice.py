"""Finds settings of a ds config that cost more than they give, for this model on these GPUs."""

from __future__ import annotations

import copy
from typing import Any

from dino_ds.config.ds_check import offloads_optimizer
from dino_ds.costs.memory import count_parameters
from dino_ds.plan.fit import Setup

Ds = dict[str, Any]


def advise(setup: Setup) -> list[str]:
    """One sentence for each costly setting, with what to do."""
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
    if offloads_optimizer(zero) or _offloads_weights(zero):
        other = copy.deepcopy(dict(ds))
        for key in ("offload_optimizer", "offload_param"):
            other["zero_optimization"].pop(key, None)
        found += _unneeded("offloading", setup.with_ds(other), seconds)
    if zero.get("stage") == 3 and not _offloads_weights(zero):
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


def _offloads_weights(zero: Ds) -> bool:
    return bool(zero.get("offload_param", {}).get("device", "none") != "none")

"""Finds the fastest ds config that fits, and why each faster one does not."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dino_ds.basics.digits import short
from dino_ds.basics.durable import replacing
from dino_ds.config.ds_config import change_ds_config, load_ds_config
from dino_ds.config.recipe import Recipe
from dino_ds.errors import ConfigError
from dino_ds.planning.fit import Fit, fit_with, micro_batches, rehearsed, with_batch
from dino_ds.planning.speed import Cluster, StepTime, estimate_step

# Estimates that are nearer than this are taken as equal: the simpler config wins.
_EQUAL = 0.03
RECOMMENDED = "the recommended config"
_FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_CPU = {"device": "cpu", "pin_memory": True}


@dataclass(frozen=True)
class Shape:
    """The settings of a ds config that decide memory and speed. offload: "", "optimizer" or "optimizer and weights"."""

    stage: int
    offload: str
    checkpointing: bool

    def __str__(self) -> str:
        offload = f", {self.offload} on the host" if self.offload else ""
        return f"ZeRO {self.stage}{', checkpointing' if self.checkpointing else ''}{offload}"


# The simplest first.
SHAPES = [
    Shape(stage, offload, checkpointing)
    for stage, offload in ((1, ""), (2, ""), (3, ""), (2, "optimizer"), (3, "optimizer"), (3, "optimizer and weights"))
    for checkpointing in (False, True)
]


@dataclass(frozen=True)
class _Candidate:
    """fits: every micro-batch that makes up the global batch and fits, with its seconds at the work of the whole batch
    at once, `work`; unlimited: seconds of the whole batch, if memory were no limit."""

    shape: Shape
    fits: list[tuple[Fit, float]]
    work: float
    unlimited: float


@dataclass(frozen=True)
class Recommendation:
    ds: dict[str, Any]
    shape: Shape
    fit: Fit
    time: StepTime
    refused: list[str]


def recommend(recipe: Recipe, cluster: Cluster, limit_gib: float) -> Recommendation:
    """Recommend a config for the recipe's global batch, a multiple of the GPUs. Raises ConfigError if nothing fits."""
    # DeepSpeed clips an offloaded optimizer's gradients itself, by one norm.
    shapes = [shape for shape in SHAPES if not shape.offload or recipe.optimizer.clip_by == "network"]
    candidates = [_try(shape, recipe, cluster, limit_gib) for shape in shapes]
    fitting = [(i, fit, seconds) for i, candidate in enumerate(candidates) for fit, seconds in candidate.fits]
    while fitting:
        best = min(seconds for _, _, seconds in fitting)
        equal = [entry for entry in fitting if entry[2] <= best * (1 + _EQUAL)]
        choice = min(equal, key=lambda entry: (entry[0], entry[2]))
        index, fit, _ = choice
        fit = rehearsed(fit, recipe, cluster.world_size)
        if fit.fits:
            break
        fitting.remove(choice)
    if not fitting:
        least = min((_at(shape, recipe, cluster, limit_gib, 1).memory.gib, str(shape)) for shape in shapes)
        offload = "" if len(shapes) == len(SHAPES) else ", or optimizer.clip_by network, which allows offloading"
        raise ConfigError(
            f"nothing fits {limit_gib:g} GiB: {least[1]} with one image at a time needs {least[0]:.1f} GiB. "
            f"Take more GPUs, larger ones or a smaller model{offload}"
        )
    time = estimate_step(recipe, fit.config, cluster)
    seconds = time.seconds_at(candidates[index].work)
    better = [c for i, c in enumerate(candidates) if i < index or c.unlimited < seconds * (1 - _EQUAL)]
    return Recommendation(
        with_batch(ds_of(shapes[index], cluster.gpu.bf16), fit.config.micro_batch, "auto"),
        shapes[index],
        fit,
        time,
        [_reason(candidate, recipe, cluster, fit) for candidate in better if candidate.shape != shapes[index]],
    )


def write_ds(ds: Mapping[str, Any], path: Path) -> None:
    """Write a new file that `load_ds_config` accepts. Raises ConfigError if that is not possible."""
    if path.exists():
        raise ConfigError(f"--write {path} exists: name a new file")
    if not (path.absolute().parent.is_dir() and os.access(path.absolute().parent, os.W_OK)):
        raise ConfigError(f"--write {path}: its folder is missing or can't be written to")
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(ds, indent=2) + "\n", encoding="utf-8")
        load_ds_config(str(temporary), {})


def ds_of(shape: Shape, bf16: bool) -> dict[str, Any]:
    """A ds JSON without batch sizes, as those in ds_configs/."""
    zero: dict[str, Any] = {"stage": shape.stage, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
    if shape.stage > 1:
        zero["overlap_comm"] = True
    if shape.stage < 3:
        zero["allgather_bucket_size"] = "auto"
    else:
        zero |= {
            "stage3_prefetch_bucket_size": 20_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 200_000_000,
            "stage3_max_reuse_distance": 200_000_000,
        }
    if shape.offload:
        zero["offload_optimizer"] = dict(_CPU)
    if shape.offload == "optimizer and weights":
        zero["offload_param"] = dict(_CPU)
    precision: dict[str, Any] = {"bf16": {"enabled": True}} if bf16 else {"fp16": dict(_FP16)}
    ds = {"gradient_clipping": 3.0, **precision, "zero_optimization": zero}
    if shape.stage == 3 or shape.offload:
        ds["dino_ds"] = {"teacher_copy": False}  # 2 bytes a weight on every GPU
    if shape.checkpointing:
        ds["activation_checkpointing"] = {"number_checkpoints": "auto"}
    return change_ds_config(ds, RECOMMENDED, {})


def _try(shape: Shape, recipe: Recipe, cluster: Cluster, limit_gib: float) -> _Candidate:
    sizes = micro_batches(recipe.data.global_batch, cluster.world_size)
    found = [_at(shape, recipe, cluster, limit_gib, size) for size in sizes]
    times = [estimate_step(recipe, fit.config, cluster, exact=False) for fit in found]
    # Stage 1 would accumulate in low precision.
    allowed = slice(0, 1 if shape.stage == 1 else None)
    work = times[0].once
    tried = zip(found[allowed], times[allowed], strict=True)
    return _Candidate(shape, [(fit, time.seconds_at(work)) for fit, time in tried if fit.fits], work, times[0].seconds)


def _at(shape: Shape, recipe: Recipe, cluster: Cluster, limit_gib: float, micro_batch: int) -> Fit:
    ds = ds_of(shape, cluster.gpu.bf16)
    return fit_with(recipe, ds, RECOMMENDED, cluster.world_size, limit_gib, micro_batch)


def _reason(candidate: _Candidate, recipe: Recipe, cluster: Cluster, chosen: Fit) -> str:
    """Why a candidate is not recommended, though it is simpler or, with enough memory, faster."""
    shape, limit = candidate.shape, chosen.limit_gib
    if candidate.fits:
        fit, seconds = min(candidate.fits, key=lambda entry: entry[1])
        return f"{shape}: {short(seconds)} s at best, with micro-batch {fit.config.micro_batch}"
    if shape.stage == 1:
        whole = recipe.data.global_batch // cluster.world_size
        needed = _at(shape, recipe, cluster, limit, whole).memory.gib
        return (
            f"{shape}: the whole batch of {whole} at once needs {needed:.1f} GiB of {limit:g}, "
            "and in parts it would be accumulated in low precision"
        )
    return f"{shape}: needs {_at(shape, recipe, cluster, limit, 1).memory.gib:.1f} GiB of {limit:g} with 1 image"

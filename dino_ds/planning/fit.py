"""Whether a training step fits on a GPU and with how many images, and the ds config that the planner recommends."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dino_ds.basics.files import check_absent, replacing
from dino_ds.config.ds_config import change_ds_config, load_ds_config, resolve_ds_config
from dino_ds.config.ds_schema import COMMUNICATES_IN_STEP, DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import GIB, Memory, estimate_memory
from dino_ds.costs.step_costs import count_parameters
from dino_ds.errors import ConfigError
from dino_ds.planning.host import Cluster

RECOMMENDED = "the recommended config"
SMALL = "small"
"""The recipe for few or small images, which takes the least memory of those that learn well."""
FILLED = 0.97
"""Share of a GPU's memory that a config may need, by prediction with margins, to be chosen by the planner."""
# Assumed, not measured: device memory of the driver and the libraries' kernels, NCCL's channels with several ranks,
# and what the allocator loses to fragmentation, as a part of the tensors' size.
_CONTEXT_BYTES = GIB // 2
_NCCL_BYTES = GIB // 2
FRAGMENTATION = 0.05
_MOST_IMAGES = 1 << 16
_ENOUGH = 8
"""Micro-batch from which on a shape that fits is taken; a smaller one is worth a second forward pass to enlarge it."""
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
class Fit:
    """A resolved config, the `memory` that it needs on each GPU, by part with margins, and the GPU's `limit_gib`."""

    config: DsConfig
    memory: Memory
    limit_gib: float

    @property
    def fits(self) -> bool:
        return self.memory.gib <= self.limit_gib


def fit(recipe: Recipe, ds: Mapping[str, Any], ds_path: str, world_size: int, limit_gib: float) -> Fit:
    """Resolve the ds JSON with the recipe's global batch on `world_size` GPUs, and rehearse its micro-batch.

    Raises ConfigError if the batch sizes contradict each other.
    """
    config = _resolved(recipe, ds, ds_path, recipe.data.global_batch, world_size)
    return _fit(recipe, config, world_size, limit_gib)


def fit_with(
    recipe: Recipe, ds: Mapping[str, Any], ds_path: str, world_size: int, limit_gib: float, micro_batch: int
) -> Fit:
    """Estimate the fit of this micro-batch, accumulated to the recipe's global batch or just above it. Fast, for a
    search: the costs lie on a line through those of two micro-batches, which alone are rehearsed."""
    accumulation = -(-recipe.data.global_batch // (micro_batch * world_size))
    batch = micro_batch * accumulation * world_size
    config = _resolved(recipe, with_batch(ds, micro_batch, accumulation), ds_path, batch, world_size)
    return _fit(recipe, config, world_size, limit_gib, exact=False)


def _resolved(recipe: Recipe, ds: Mapping[str, Any], ds_path: str, batch: int, world_size: int) -> DsConfig:
    return resolve_ds_config(dict(ds), ds_path, batch, world_size, parameters=count_parameters(recipe))


def _fit(recipe: Recipe, config: DsConfig, world_size: int, limit_gib: float, exact: bool = True) -> Fit:
    memory = estimate_memory(recipe, config, world_size, on_gpu=True, exact=exact)
    return Fit(config, with_margins(memory, world_size), limit_gib)


def largest_micro_batch(recipe: Recipe, ds: Mapping[str, Any], ds_path: str, world_size: int, limit_gib: float) -> int:
    """Return the largest micro-batch that fits, whether it divides the global batch or not; 0 if none fits."""
    low, high = 0, 64  # smaller ones are estimated only if this does not fit
    while high <= _MOST_IMAGES and fit_with(recipe, ds, ds_path, world_size, limit_gib, high).fits:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fit_with(recipe, ds, ds_path, world_size, limit_gib, middle).fits:
            low = middle
        else:
            high = middle
    return low


def micro_batches(global_batch: int, world_size: int) -> list[int]:
    """List the micro-batches that divide a GPU's share of the batch, largest first; [] without an equal share."""
    images, rest = divmod(global_batch, world_size)
    return [] if rest else [size for size in range(images, 0, -1) if images % size == 0]


def with_batch(ds: Mapping[str, Any], micro_batch: int, accumulation: int | str) -> dict[str, Any]:
    """Return `ds` with this micro-batch and accumulation."""
    kept = {key: value for key, value in ds.items() if key != "train_batch_size"}
    return kept | {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": accumulation}


def with_margins(memory: Memory, world_size: int) -> Memory:
    """Add to `memory` what is not in tensors: fragmentation, the CUDA context and NCCL."""
    margins = {
        "fragmentation margin": round(FRAGMENTATION * sum(memory.parts.values())),
        "CUDA context and NCCL": _CONTEXT_BYTES + (_NCCL_BYTES if world_size > 1 else 0),
    }
    return Memory(memory.moment, memory.parts | margins)


@dataclass(frozen=True)
class Shape:
    """The settings of a ds config that decide memory. offload: "", "optimizer" or "optimizer and weights"."""

    stage: int
    offload: str
    checkpointing: bool

    def __str__(self) -> str:
        offload = f", {self.offload} on the host" if self.offload else ""
        return f"ZeRO {self.stage}{', checkpointing' if self.checkpointing else ''}{offload}"


SHAPES = [
    Shape(1, "", False),
    *(
        Shape(stage, offload, checkpointing)
        for stage, offload in ((2, ""), (3, ""), (2, "optimizer"), (3, "optimizer"), (3, "optimizer and weights"))
        for checkpointing in (False, True)
    ),
]
"""In the order in which they are tried. Stage 1 takes the whole batch at once: it would accumulate in low precision."""


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
        ds["dino_ds"] = {"teacher_copy": False}  # a copy takes 2 bytes per weight on every GPU
    if shape.checkpointing:
        ds["activation_checkpointing"] = {"number_checkpoints": "auto"}
    return change_ds_config(ds, RECOMMENDED, {})


@dataclass(frozen=True)
class Recommendation:
    """A ds JSON, its shape, and its `fit`."""

    ds: dict[str, Any]
    shape: Shape
    fit: Fit


def recommend(
    recipe: Recipe,
    cluster: Cluster,
    limit_gib: float,
    shapes: Sequence[Shape] = SHAPES,
    make_ds: Callable[[Shape, bool], dict[str, Any]] = ds_of,
) -> Recommendation:
    """Recommend a config for the recipe's global batch, a multiple of the GPUs: lowest ZeRO stage that fits,
    recomputation before offload, largest micro-batch. Raises ConfigError, with remedies, if nothing fits.

    make_ds: (shape, whether the GPUs have bf16) -> ds JSON.
    """
    if recommendation := _search(recipe, cluster, limit_gib, shapes, make_ds):
        return recommendation
    changes = _changes_for_offloading(recipe)
    options = " and ".join(f"--optimizer.{key} {value}" for key, value in changes.items())
    offloading = f"{options}, which allows offloading, " if changes else ""
    allowed = {str(shape): make_ds(shape, cluster.gpu.bf16) for shape in shapes if not (shape.offload and changes)}
    alone = {name: fit_with(recipe, ds, RECOMMENDED, cluster.world_size, limit_gib, 1) for name, ds in allowed.items()}
    needed = min((fit.memory.gib, name) for name, fit in alone.items())
    raise ConfigError(
        f"nothing fits {limit_gib:g} GiB: {needed[1]} with one image at a time needs {needed[0]:.1f} GiB. Take "
        f"{offloading}more GPUs, larger ones, a smaller model or the recipe for small images, --config {SMALL}"
    )


def _changes_for_offloading(recipe: Recipe) -> dict[str, str]:
    """Changes of the optimizer that allow offloading; {} if it is allowed. An offloaded optimizer clips by one norm,
    and steps on the host, where LARS and Muon can't communicate."""
    changes = {"clip_by": "network"} if recipe.optimizer.clip_by == "part" else {}
    return changes | ({"kind": "adamw"} if recipe.optimizer.kind in COMMUNICATES_IN_STEP else {})


def _search(
    recipe: Recipe,
    cluster: Cluster,
    limit_gib: float,
    shapes: Sequence[Shape],
    make_ds: Callable[[Shape, bool], dict[str, Any]],
) -> Recommendation | None:
    """The first of the allowed shapes that fits, with its largest micro-batch."""
    allowed = [shape for shape in shapes if not (shape.offload and _changes_for_offloading(recipe))]
    ranks = cluster.world_size
    sizes = micro_batches(recipe.data.global_batch, ranks)

    def largest(shape: Shape) -> Fit | None:
        """The largest micro-batch that fits: found by linear estimates, then rehearsed."""
        ds = make_ds(shape, cluster.gpu.bf16)
        for size in sizes[: 1 if shape.stage == 1 else None]:
            fit = fit_with(recipe, ds, RECOMMENDED, ranks, limit_gib, size)
            if fit.fits and (fit := _fit(recipe, fit.config, ranks, limit_gib)).fits:
                return fit
        return None

    for shape in allowed:
        fit, recomputed = largest(shape), dataclasses.replace(shape, checkpointing=True)
        if fit and recomputed in allowed and fit.config.micro_batch < min(_ENOUGH, sizes[0]):
            larger = largest(recomputed)
            if larger and larger.config.micro_batch > fit.config.micro_batch:
                shape, fit = recomputed, larger
        if fit:
            ds = make_ds(shape, cluster.gpu.bf16)
            return Recommendation(with_batch(ds, fit.config.micro_batch, "auto"), shape, fit)
    return None


def check_new(path: Path) -> None:
    """Raises ConfigError where no new file can be written."""
    check_absent(path, "name another with --write")
    if not (path.absolute().parent.is_dir() and os.access(path.absolute().parent, os.W_OK)):
        raise ConfigError(f"--write {path}: its folder is missing or can't be written to")


def write_ds(ds: Mapping[str, Any], path: Path) -> None:
    """Write a new file that `load_ds_config` accepts. Raises ConfigError if that is not possible."""
    check_new(path)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(ds, indent=2) + "\n", encoding="utf-8")
        load_ds_config(str(temporary), {})

"""Whether a training step fits on a GPU, and with how many images: `dino_ds.costs` plus margins for the process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dino_ds.config.ds_config import resolve_ds_config
from dino_ds.config.ds_values import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import GIB, Memory, estimate_memory
from dino_ds.costs.step_costs import count_parameters

# Assumed, not measured: device memory of the driver and the libraries' kernels, NCCL's channels with several ranks,
# and what the allocator loses to fragmentation, as a part of the tensors' size.
CONTEXT_BYTES = GIB // 2
NCCL_BYTES = GIB // 2
FRAGMENTATION = 0.05
# Share of a GPU's memory that a config may need, by prediction with margins, to be chosen by the planner.
FILLED = 0.97
_MOST_IMAGES = 1 << 16


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


def rehearsed(candidate: Fit, recipe: Recipe, world_size: int) -> Fit:
    """Rehearse the micro-batch of a `candidate` that a search found, for its exact fit."""
    return _fit(recipe, candidate.config, world_size, candidate.limit_gib)


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
        "CUDA context and NCCL": CONTEXT_BYTES + (NCCL_BYTES if world_size > 1 else 0),
    }
    return Memory(memory.moment, memory.parts | margins)

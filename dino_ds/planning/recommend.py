"""Chooses a ds config by rule: lowest ZeRO stage that fits, recomputation before offload, largest micro-batch."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dino_ds.basics.durable import replacing
from dino_ds.config.ds_config import change_ds_config, load_ds_config
from dino_ds.config.ds_values import MEETING
from dino_ds.config.recipe import Recipe
from dino_ds.errors import ConfigError
from dino_ds.planning.fit import Fit, fit_with, micro_batches, rehearsed, with_batch
from dino_ds.planning.gpus import Cluster

RECOMMENDED = "the recommended config"
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


@dataclass(frozen=True)
class Recommendation:
    """A ds JSON, its `fit`, and in `refused` the reason against each shape that was tried before."""

    ds: dict[str, Any]
    shape: Shape
    fit: Fit
    refused: list[str]


def recommend(
    recipe: Recipe,
    cluster: Cluster,
    limit_gib: float,
    shapes: Sequence[Shape] = SHAPES,
    make_ds: Callable[[Shape, bool], dict[str, Any]] | None = None,
) -> Recommendation:
    """Recommend a config for the recipe's global batch, a multiple of the GPUs. Raises ConfigError if nothing fits.

    make_ds: (shape, whether the GPUs have bf16) -> ds JSON; None: `ds_of`.
    """
    # An offloaded optimizer clips by one norm, and steps on the host, where LARS and Muon can't communicate.
    remedies = ["optimizer.clip_by network"] if recipe.optimizer.clip_by == "part" else []
    remedies += ["optimizer.kind adamw"] if recipe.optimizer.kind in MEETING else []
    allowed = [shape for shape in shapes if not (shape.offload and remedies)]
    search, refused = _Search(recipe, cluster, limit_gib, make_ds or ds_of), dict[Shape, str]()
    for shape in allowed:
        fit = search.largest(shape)
        recomputed = dataclasses.replace(shape, checkpointing=True)
        if fit and recomputed in allowed and fit.config.micro_batch < min(_ENOUGH, search.sizes[0]):
            other = search.largest(recomputed)
            if other and other.config.micro_batch > fit.config.micro_batch:
                refused[shape] = f"{shape}: micro-batch {fit.config.micro_batch} at most"
                shape, fit = recomputed, other
        if fit:
            ds = with_batch(search.ds(shape), fit.config.micro_batch, "auto")
            return Recommendation(ds, shape, fit, list(refused.values()))
        refused[shape] = search.reason(shape)
    least = min((search.at(shape, 1).memory.gib, str(shape)) for shape in allowed)
    offload = "" if len(allowed) == len(shapes) else f", or {' and '.join(remedies)}, which allows offloading"
    raise ConfigError(
        f"nothing fits {limit_gib:g} GiB: {least[1]} with one image at a time needs {least[0]:.1f} GiB. "
        f"Take more GPUs, larger ones or a smaller model{offload}"
    )


@dataclass(frozen=True)
class _Search:
    recipe: Recipe
    cluster: Cluster
    limit_gib: float
    make_ds: Callable[[Shape, bool], dict[str, Any]]

    @property
    def sizes(self) -> list[int]:
        return micro_batches(self.recipe.data.global_batch, self.cluster.world_size)

    def ds(self, shape: Shape) -> dict[str, Any]:
        return self.make_ds(shape, self.cluster.gpu.bf16)

    def at(self, shape: Shape, micro_batch: int) -> Fit:
        return fit_with(self.recipe, self.ds(shape), RECOMMENDED, self.cluster.world_size, self.limit_gib, micro_batch)

    def largest(self, shape: Shape) -> Fit | None:
        """The fit of the largest micro-batch that fits, or None: found by linear estimates, then rehearsed."""
        for size in self.sizes[: 1 if shape.stage == 1 else None]:
            if (fit := self.at(shape, size)).fits:
                fit = rehearsed(fit, self.recipe, self.cluster.world_size)
                if fit.fits:
                    return fit
        return None

    def reason(self, shape: Shape) -> str:
        """Why a shape before the chosen one is not taken."""
        size = self.sizes[0] if shape.stage == 1 else 1
        needed = f"needs {self.at(shape, size).memory.gib:.1f} GiB of {self.limit_gib:g}"
        if shape.stage == 1:
            return (
                f"{shape}: the whole batch of {size} at once {needed}, and in parts it would be accumulated in low "
                "precision"
            )
        return f"{shape}: {needed} with 1 image"


def check_new(path: Path) -> None:
    """Raises ConfigError where no new file can be written."""
    if path.exists():
        raise ConfigError(f"--write {path} exists: name a new file")
    if not (path.absolute().parent.is_dir() and os.access(path.absolute().parent, os.W_OK)):
        raise ConfigError(f"--write {path}: its folder is missing or can't be written to")


def write_ds(ds: Mapping[str, Any], path: Path) -> None:
    """Write a new file that `load_ds_config` accepts. Raises ConfigError if that is not possible."""
    check_new(path)
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
        ds["dino_ds"] = {"teacher_copy": False}  # a copy takes 2 bytes per weight on every GPU
    if shape.checkpointing:
        ds["activation_checkpointing"] = {"number_checkpoints": "auto"}
    return change_ds_config(ds, RECOMMENDED, {})

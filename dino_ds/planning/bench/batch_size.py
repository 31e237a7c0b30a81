"""`dino-ds bench batch-size`: which micro-batches fit, and the fastest of them, on the real step.

Every size is tried in new processes: DeepSpeed's engines can't be taken apart after an out-of-memory error, and the end
of a process frees everything. The recipe's global batch stays; accumulation follows from it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from dino_ds.basics.digits import short
from dino_ds.config.recipe import Recipe
from dino_ds.engine import distributed
from dino_ds.engine.device import device
from dino_ds.errors import ConfigError, DataError
from dino_ds.options.commands import BenchBatchSizeOptions
from dino_ds.options.definition import Result
from dino_ds.planning.fit import micro_batches, with_batch
from dino_ds.planning.measure.host import describe_host, host_line
from dino_ds.planning.measure.machine import usable_memory_gib
from dino_ds.planning.measure.memory import ChildFailed, run_in_children
from dino_ds.planning.measure.tables import markdown_table
from dino_ds.planning.measure.timing import clock_of, now_by, synchronize
from dino_ds.planning.measure.trial import Trial, build_trial, resolve

_WARMUP = 2
"""Steps before those that are timed: memory peaks in the second, the first with Adam's moments."""
_OUT_OF_MEMORY = 77
_LEAST_GROWTH = 1.5
"""Each size that is tried is at least this many times the one before."""


@dataclass(frozen=True)
class Tried:
    """One micro-batch on the real step; where it fits, the rate and the peak of the fullest process."""

    micro_batch: int
    images_per_second: float | None = None
    memory_gib: float | None = None

    @property
    def fits(self) -> bool:
        return self.images_per_second is not None


def run(options: BenchBatchSizeOptions, *, recipe: Recipe, ds: Mapping[str, Any], ds_path: str) -> Result:
    """Try micro-batches that divide the recipe's global batch; print the table. Raises ConfigError if none fits."""
    gpus = torch.cuda.device_count()
    ranks = options.ranks or max(1, gpus)
    images = recipe.data.global_batch // ranks
    if distributed.world_size() > 1:
        raise ConfigError("bench batch-size starts its own processes: call it without deepspeed or torchrun")
    if gpus and ranks > gpus:
        raise ConfigError(f"--ranks {ranks}: this machine has {gpus} GPU(s)")
    if recipe.data.global_batch % ranks:
        raise ConfigError(f"global batch {recipe.data.global_batch} is not a multiple of {ranks} ranks")
    limit = options.memory_gib if gpus or options.memory_gib else usable_memory_gib()
    room = "the GPU's memory" if limit is None else f"{limit:.1f} GiB{' of a GPU' if gpus else ''}"
    trials = _Trials(recipe, ds, ds_path, ranks, limit, options)
    tried = search(images, trials.take)
    fitting = [trial for trial in tried if trial.fits]
    if not fitting:
        cures = "recompute activations (activation_checkpointing), shard or offload more (zero_optimization)"
        raise ConfigError(f"not one image fits into {room}: {cures}, or take a smaller model")
    best = max(fitting, key=lambda trial: trial.images_per_second or 0.0)
    result = {
        "backbone": recipe.model.backbone,
        "ranks": ranks,
        "memory_limit_gib": limit,
        "room": room,
        "largest": fitting[-1].micro_batch,
        "best": best.micro_batch,
        "accumulation": images // best.micro_batch,
        "global_batch": recipe.data.global_batch,
        "tried": [asdict(trial) | {"fits": trial.fits} for trial in tried],
        "host": describe_host(),
    }
    return Result(result, _page(result))


def search(images: int, take: Callable[[int], Tried]) -> list[Tried]:
    """Try divisors of `images`, each at least half as large again as the one before, until one does not fit."""
    tried = [take(1)]
    for size in micro_batches(images, 1)[-2::-1]:
        if tried[-1].fits and (size >= _LEAST_GROWTH * tried[-1].micro_batch or size == images):
            tried.append(take(size))
    return tried


@dataclass
class _Trials:
    """Runs the real step with a micro-batch size. limit_gib: of each GPU, or of all processes on a CPU."""

    recipe: Recipe
    ds: Mapping[str, Any]
    ds_path: str
    ranks: int
    limit_gib: float | None
    options: BenchBatchSizeOptions

    def take(self, micro_batch: int) -> Tried:
        tried = self._take(micro_batch)
        rate = f"{short(tried.images_per_second, 4)} images/s" if tried.images_per_second else "no room"
        tqdm.write(f"micro-batch {micro_batch}: {rate}", file=sys.stderr)
        return tried

    def _take(self, micro_batch: int) -> Tried:
        on_gpu = torch.cuda.is_available()
        accumulation = self.recipe.data.global_batch // (micro_batch * self.ranks)
        ds = with_batch(self.ds, micro_batch, min(accumulation, 2))  # a window of two stands for a longer one
        try:
            children = run_in_children(
                "dino_ds.planning.bench.batch_size:measure",
                self.ranks,
                self.options.threads,
                None if on_gpu or self.limit_gib is None else self.limit_gib * 1024,
                recipe=self.recipe.model_dump(mode="json"),
                ds=ds,
                ds_path=self.ds_path,
                steps=self.options.steps,
                accumulation=accumulation,
                limit_gib=self.limit_gib,
            )
        except ChildFailed as error:
            if error.returncode in (_OUT_OF_MEMORY, -signal.SIGKILL):
                return Tried(micro_batch)
            last = (error.log.strip().splitlines() or ["no message"])[-1].removeprefix("dino_ds.errors.ConfigError: ")
            raise DataError(f"the step fails at micro-batch {micro_batch}: {last}") from error
        peaks = [child.peak_mib / 1024 for child in children]
        if self.limit_gib is not None and (max(peaks) if on_gpu else sum(peaks)) > self.limit_gib:
            return Tried(micro_batch)
        seconds = max(child.value for child in children)
        return Tried(micro_batch, micro_batch * self.ranks / seconds, max(peaks))


def measure(
    recipe: dict[str, Any], ds: dict[str, Any], ds_path: str, steps: int, accumulation: int, limit_gib: float | None
) -> float:
    """Seconds per micro-batch in this process, its share of the optimizer step included, at this `accumulation`.

    Ends the process when memory runs out.
    """
    if torch.cuda.is_available() and limit_gib is not None:
        total = torch.cuda.get_device_properties(device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * 2**30 / total), device())
    batch = ds["train_micro_batch_size_per_gpu"] * ds["gradient_accumulation_steps"]
    try:
        trial = build_trial(*resolve(Recipe.model_validate(recipe), ds, ds_path, batch))
        # Training already holds the next batch on the GPU: so does this.
        ahead = [crop.clone() for group in trial.inputs.crops.values() for crop in group if crop.is_cuda]
        windows = [_window_seconds(trial) for _ in range(_WARMUP + steps)][_WARMUP:]
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        os._exit(_OUT_OF_MEMORY)  # ranks that still have room must not wait for this one
    del ahead
    inner, last = (median(seconds) for seconds in zip(*windows, strict=True))
    return ((accumulation - 1) * inner + last) / accumulation


def _window_seconds(trial: Trial) -> tuple[float, float]:
    """Seconds of a micro-batch inside the window (0 if there is none), and of the last one with the optimizer step."""
    where = trial.step.engine.device
    now = now_by(clock_of(where, distributed.world_size() > 1))
    synchronize(where)
    times = [now()]
    trial.begin()
    for _ in range(trial.accumulation):
        trial.step.micro_batch(trial.inputs)
        synchronize(where)
        times.append(now())
    return (times[-2] - times[0]) / max(1, trial.accumulation - 1), times[-1] - times[-2]


def _page(result: dict[str, Any]) -> str:
    rows = []
    for trial in result["tried"]:
        rate = short(trial["images_per_second"], 4) if trial["fits"] else "no room"
        peak = f"{trial['memory_gib']:.2f}" if trial["fits"] else ""
        rows.append((str(trial["micro_batch"]), rate, peak))
    best, ranks, accumulation = result["best"], result["ranks"], result["accumulation"]
    return "\n".join(
        [
            f"bench batch-size: {result['backbone']}, {ranks} process(es), {result['room']}",
            host_line(result["host"]),
            "",
            markdown_table(("micro-batch", "images/s", "peak GiB a process"), rows),
            "",
            f"recommended  --ds.train_micro_batch_size_per_gpu {best} --ds.gradient_accumulation_steps {accumulation}: "
            f"the fastest; global batch {result['global_batch']} = {best} x {accumulation} x ranks {ranks}",
        ]
    )

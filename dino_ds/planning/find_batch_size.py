"""`dino-ds find-batch-size`: the largest micro-batch that fits, and the fastest one, on the real step.

Every size is tried in new processes: DeepSpeed's engines can't be taken apart after an out-of-memory error, and the end
of a process gives everything back. The recipe's global batch stays; accumulation follows from it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from json import dumps
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from dino_ds.basics.digits import short
from dino_ds.basics.durable import replacing
from dino_ds.config.crops import all_crops
from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import estimate_memory
from dino_ds.costs.step_costs import count_parameters
from dino_ds.engine import distributed
from dino_ds.engine.device import device
from dino_ds.errors import ConfigError, DataError
from dino_ds.options.machine import FindBatchSizeOptions
from dino_ds.planning.fit import micro_batches, with_batch
from dino_ds.planning.measure.host import describe_host, host_line
from dino_ds.planning.measure.machine import usable_memory_gib
from dino_ds.planning.measure.memory import ChildFailed, run_in_children
from dino_ds.planning.measure.tables import markdown_table, print_result
from dino_ds.planning.measure.timing import clock_of, synchronize
from dino_ds.planning.measure.trial import Trial, build_trial, resolve

WARMUP = 2
"""The second step is the first with Adam's moments: the highest."""
_OUT_OF_MEMORY = 77


def run(options: FindBatchSizeOptions, *, recipe: Recipe, ds: Mapping[str, Any], ds_path: str) -> None:
    """Try micro-batches up to the recipe's global batch per rank; print the table, write the fastest if asked.

    Raises ConfigError if not one image fits, or if `write` can't be written.
    """
    gpus = torch.cuda.device_count()
    ranks = options.ranks or max(1, gpus)
    _check(recipe, ranks, gpus, options.write)
    limit = options.memory_gib if gpus or options.memory_gib else usable_memory_gib()
    trials = _Trials(recipe, ds, ds_path, ranks, limit, bool(gpus), options)
    images = recipe.data.global_batch // ranks
    largest = find_largest(lambda size: trials.take(size).fits, images)
    if largest == 0:
        what = "recompute activations (activation_checkpointing), shard or offload more (zero_optimization)"
        room = _memory_text(limit, bool(gpus))
        raise ConfigError(f"not one image fits into {room}: {what}, or take a smaller model")
    trials.take(next(size for size in micro_batches(recipe.data.global_batch, ranks) if size <= largest))
    best = fastest(trials.tried.values(), images)
    accumulation = images // best.micro_batch
    result = {
        "backbone": recipe.model.backbone,
        "ranks": ranks,
        "memory_limit_gib": limit,
        "largest": largest,
        "best": best.micro_batch,
        "accumulation": accumulation,
        "global_batch": recipe.data.global_batch,
        "tried": [asdict(t) | {"predicted_gib": trials.predicted_gib(s)} for s, t in sorted(trials.tried.items())],
        "written": options.write,
        "host": describe_host(),
    }
    if options.write:
        write_batch(Path(options.write), ds, ds_path, best.micro_batch)
    print_result(_page(result, bool(gpus)), result, options.json)


def _check(recipe: Recipe, ranks: int, gpus: int, write: str | None) -> None:
    if distributed.world_size() > 1:
        raise ConfigError("find-batch-size starts its own processes: call it without deepspeed or torchrun")
    if gpus and ranks > gpus:
        raise ConfigError(f"--ranks {ranks}: this machine has {gpus} GPU(s)")
    if recipe.data.global_batch % ranks:
        raise ConfigError(f"global batch {recipe.data.global_batch} is not a multiple of {ranks} ranks")
    if write and not (Path(write).absolute().parent.is_dir() and os.access(Path(write).absolute().parent, os.W_OK)):
        raise ConfigError(f"--write {write}: its folder is missing or can't be written to")


@dataclass(frozen=True)
class Tried:
    """One micro-batch on the real step. Without room: no rate. memory_gib: peak of the fullest process."""

    micro_batch: int
    fits: bool
    images_per_second: float | None = None
    memory_gib: float | None = None


@dataclass
class _Trials:
    """Takes the real step at each size once; `tried` by size. limit_gib: of each GPU, or of all processes on a CPU."""

    recipe: Recipe
    ds: Mapping[str, Any]
    ds_path: str
    ranks: int
    limit_gib: float | None
    on_gpu: bool
    options: FindBatchSizeOptions
    tried: dict[int, Tried] = field(default_factory=dict)
    _libraries: int = 0

    def take(self, micro_batch: int) -> Tried:
        if micro_batch not in self.tried:
            self.tried[micro_batch] = found = self._take(micro_batch)
            rate = "no room"
            if found.images_per_second is not None:
                rate = f"{short(found.images_per_second, 4)} images/s, {found.memory_gib:.2f} GiB"
            tqdm.write(f"micro-batch {micro_batch}: {rate}", file=sys.stderr)
        return self.tried[micro_batch]

    def _take(self, micro_batch: int) -> Tried:
        ds, accumulation = self._ds_of(micro_batch)
        in_process = None if self.on_gpu or self.limit_gib is None else self.limit_gib * 1024
        try:
            children = run_in_children(
                "dino_ds.planning.find_batch_size:measure",
                self.ranks,
                self.options.threads,
                in_process,
                recipe=self.recipe.model_dump(mode="json"),
                ds=ds,
                ds_path=self.ds_path,
                steps=self.options.steps,
                accumulation=accumulation,
                limit_gib=self.limit_gib,
            )
        except ChildFailed as error:
            if error.returncode in (_OUT_OF_MEMORY, -signal.SIGKILL):
                return Tried(micro_batch, False)
            last = (error.log.strip().splitlines() or ["no message"])[-1].removeprefix("dino_ds.errors.ConfigError: ")
            raise DataError(f"the step fails at micro-batch {micro_batch}: {last}") from error
        self._libraries = round(max(child.imports_mib for child in children) * 2**20)
        peaks = [child.peak_mib / 1024 for child in children]
        used = max(peaks) if self.on_gpu else sum(peaks)
        if self.limit_gib is not None and used > self.limit_gib:
            return Tried(micro_batch, False)
        images = micro_batch * self.ranks
        return Tried(micro_batch, True, images / max(child.value for child in children), max(peaks))

    def predicted_gib(self, micro_batch: int) -> float:
        """The predicted memory of one process; without a GPU it includes the libraries as they were found."""
        ds, _ = self._ds_of(micro_batch)
        total = micro_batch * ds["gradient_accumulation_steps"] * self.ranks
        config = resolve_ds_config(ds, self.ds_path, total, self.ranks, parameters=count_parameters(self.recipe))
        return estimate_memory(self.recipe, config, self.ranks, self.on_gpu, self._libraries).gib

    def _ds_of(self, micro_batch: int) -> tuple[dict[str, Any], int]:
        """The config of a trial, whose windows have two micro-batches at most, and the accumulation it stands for."""
        accumulation = -(-self.recipe.data.global_batch // (micro_batch * self.ranks))
        return with_batch(self.ds, micro_batch, min(accumulation, 2)), accumulation


def find_largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest size <= `most` that fits, to a 16th, by doubling and then bisection; 0 if not even one does."""
    size, low, high = 1 << max(0, (most // 64).bit_length() - 1), 0, most + 1  # a power of two, at most 64 times below
    while low < size < high:
        if fits(size):
            low, size = size, min(2 * size, most)
        else:
            high = size
    while high - low > max(1, low // 16) and low < most:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fastest(tried: Iterable[Tried], images_per_rank: int) -> Tried:
    """The best rate among the sizes whose multiples give `images_per_rank` exactly."""
    usable = [t for t in tried if t.fits and images_per_rank % t.micro_batch == 0]
    return max(usable, key=lambda t: t.images_per_second or 0.0)


def measure(
    recipe: dict[str, Any], ds: dict[str, Any], ds_path: str, steps: int, accumulation: int, limit_gib: float | None
) -> float:
    """Measure the seconds per micro-batch in each process, its share of the end of a step of `accumulation` included.

    Ends the process when memory runs out.
    """
    if torch.cuda.is_available() and limit_gib is not None:
        total = torch.cuda.get_device_properties(device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * 2**30 / total), device())
    batch = ds["train_micro_batch_size_per_gpu"] * ds["gradient_accumulation_steps"]
    try:
        trial = build_trial(*resolve(Recipe.model_validate(recipe), ds, ds_path, batch))
        # On a GPU training has the next batch there already.
        ahead = [crop.clone() for crop in all_crops(trial.inputs.crops) if crop.is_cuda]
        windows = [_window_seconds(trial) for _ in range(WARMUP + steps)][WARMUP:]
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        os._exit(_OUT_OF_MEMORY)  # ranks that still have room must not wait for this one
    del ahead
    inner, last = (median(seconds) for seconds in zip(*windows, strict=True))
    return ((accumulation - 1) * inner + last) / accumulation


def _window_seconds(trial: Trial) -> tuple[float, float]:
    """(of a micro-batch inside the window, 0 if there is none; of the last one, with the optimizer)."""
    where = trial.step.engine.device
    now = time.process_time if clock_of(where, distributed.world_size() > 1) == "cpu" else time.perf_counter
    synchronize(where)
    times = [now()]
    trial.begin()
    for _ in range(trial.accumulation):
        trial.step.micro_batch(trial.inputs)
        synchronize(where)
        times.append(now())
    return (times[-2] - times[0]) / max(1, trial.accumulation - 1), times[-1] - times[-2]


def write_batch(path: Path, ds: Mapping[str, Any], ds_path: str, micro_batch: int) -> None:
    """Set the micro-batch in the ds JSON `path`, and accumulation to "auto"; everything else stays, comments too.

    A new file begins as a copy of the config that was measured.
    """
    if path.exists():
        text = path.read_text(encoding="utf-8")
    elif load_ds_config(ds_path, {}) == ds:
        text = Path(ds_path).read_text(encoding="utf-8")
    else:
        text = dumps(ds, indent=2) + "\n"
    for key, value in (("gradient_accumulation_steps", '"auto"'), ("train_micro_batch_size_per_gpu", str(micro_batch))):
        text, found = re.subn(rf'("{key}"\s*:\s*)("auto"|\d+)', rf"\g<1>{value}", text)
        if not found:
            text = text.replace("{", f'{{\n  "{key}": {value},', 1)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        try:
            load_ds_config(str(temporary), {})
        except ConfigError as error:
            raise ConfigError(f"--write {path}: {str(error).replace(str(temporary), str(path))}") from error


def _memory_text(limit: float | None, on_gpu: bool) -> str:
    return "the GPU's memory" if limit is None else f"{limit:.1f} GiB{' of a GPU' if on_gpu else ''}"


def _page(result: dict[str, Any], on_gpu: bool) -> str:
    rows = []
    for tried in result["tried"]:
        rate, peak = tried["images_per_second"], tried["memory_gib"]
        found = (short(rate, 4), f"{peak:.2f}") if tried["fits"] else ("no room", "")
        rows.append((str(tried["micro_batch"]), *found, f"{tried['predicted_gib']:.2f}"))
    best, ranks = result["best"], result["ranks"]
    lines = [
        f"find-batch-size: {result['backbone']}, {ranks} process(es), "
        f"{_memory_text(result['memory_limit_gib'], on_gpu)}",
        host_line(result["host"]),
        "",
        markdown_table(("micro-batch", "images/s", "peak GiB a process", "predicted"), rows),
        "",
        f"largest that fits: {result['largest']}",
        f"fastest: {best}; global batch {result['global_batch']} = micro-batch {best} x accumulation "
        f"{result['accumulation']} x ranks {ranks}",
    ]
    return "\n".join([*lines, f"written into {result['written']}"] if result["written"] else lines)

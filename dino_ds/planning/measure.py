"""Measurements for the benches: a recipe's training step, interleaved times, peak memory, this host and its GPU."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from tqdm import tqdm

from dino_ds.basics.files import replace_file
from dino_ds.basics.machine import find_free_port
from dino_ds.basics.own_code import allow_code, allowed_code
from dino_ds.basics.ranges import listen, named_range
from dino_ds.config.crops import describe_crops
from dino_ds.config.ds_config import CHECKOUT, resolve_ds_config
from dino_ds.config.ds_schema import DsConfig
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.step_costs import count_parameters
from dino_ds.data.feed import Batch
from dino_ds.data.loader import DevicePrefetcher
from dino_ds.engine import distributed
from dino_ds.engine.process import fp16_supported, init_distributed, resident_mib
from dino_ds.errors import ConfigError, UserError, is_out_of_memory, one_line
from dino_ds.method.build import build_step
from dino_ds.method.fast_paths import synthetic_inputs
from dino_ds.method.specs.own import heads_of
from dino_ds.method.step import TrainingStep
from dino_ds.run.run_folder import versions

MIB = 2**20
EPOCH_STEPS = 1000  # steps of an epoch where no dataset gives them; only schedules depend on the number, no cost does
MEMORY_STEPS = 2  # steps after which the peak of memory is known: the second is the first with Adam's moments
_CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def begin(batch: int | None, threads: int, one_process: str = "") -> int:
    """Join the process group and return images per process. `one_process` names a command for one process."""
    init_distributed()
    torch.set_num_threads(threads)
    if one_process and distributed.world_size() > 1:
        raise ConfigError(f"{one_process} measures in one process: start it without deepspeed or torchrun")
    return batch or (64 if torch.cuda.is_available() else 8)


def resolve(recipe: Recipe, ds: Mapping[str, Any], ds_path: str, batch: int) -> tuple[Recipe, DsConfig]:
    """Resolve recipe and ds config for `batch` images per process and optimizer step. Raises ConfigError."""
    ranks = distributed.world_size()
    recipe = change_recipe(recipe, {"data.global_batch": str(batch * ranks)})
    weights, images = count_parameters(recipe), batch * ranks
    try:
        config = resolve_ds_config(dict(ds), ds_path, images, ranks, fp16_supported(), weights)
    except ConfigError as error:
        raise ConfigError(f"{error} (the global batch is here --batch {batch} x ranks {ranks})") from None
    return recipe, config


class Trial(NamedTuple):
    """A step and one micro-batch for it, on the device."""

    step: TrainingStep
    accumulation: int
    batch: Batch

    def run(self) -> Tensor:
        """One optimizer step; its loss (scalar on the device), the mean over the window. Does not synchronize."""
        if self.step.window > 1:
            self.step.prepare([self.batch] * self.step.window)
        losses = [self.step.micro_batch(self.batch).loss for _ in range(self.accumulation)]
        return torch.stack(losses).mean()


def build_trial(recipe: Recipe, config: DsConfig) -> Trial:
    """The step that `train` would make, past the frozen prototypes and the warm-up; every rank must call it."""
    step = build_step(recipe, config, EPOCH_STEPS)
    step.restore(step.state(), max(step.schedules.warmup_steps, step.schedules.freeze_steps + 1))
    return Trial(step, config.accumulation, synthetic_inputs(recipe, config.micro_batch, step.engine.device))


def run_on_data(trial: Trial, prefetcher: DevicePrefetcher) -> None:
    """Take one optimizer step on real images; the wait for them is the part "data"."""
    step = trial.step
    for _ in range(trial.accumulation // step.window):
        with named_range("data"):
            window = [next(prefetcher) for _ in range(step.window)]
        step.prepare(window)
        for batch in window:
            step.micro_batch(batch, prefetcher.prefetch)


class Timing(NamedTuple):
    """Seconds of each run, by the `clock` that `clock_of` chose; their median, and (largest - smallest) / median."""

    all_seconds: tuple[float, ...]
    clock: str

    @property
    def seconds(self) -> float:
        return median(self.all_seconds)

    @property
    def spread(self) -> float:
        return (max(self.all_seconds) - min(self.all_seconds)) / self.seconds


def clock_of(device: torch.device, waits: bool = False) -> str:
    """Return "cpu" for one thread that `waits` for no process: others' load doesn't lengthen its time; else "wall"."""
    return "cpu" if device.type == "cpu" and torch.get_num_threads() == 1 and not waits else "wall"


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_interleaved(
    runs: Mapping[str, Callable[[], object]],
    repeats: int,
    warmup: int,
    device: torch.device,
    waits: bool = False,
    parts: Mapping[str, PartTimes] | None = None,
) -> dict[str, Timing]:
    """Time each run `repeats` times after `warmup` calls, every second round in reverse order, and its `parts`."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    clock = clock_of(device, waits)
    for i in tqdm(range(warmup + repeats), desc="rounds", leave=False, disable=None):
        for name in list(runs)[:: -1 if i % 2 else 1]:
            synchronize(device)
            begin = _CLOCKS[clock]()
            with listen(parts[name]) if parts and i >= warmup else nullcontext():
                runs[name]()
            synchronize(device)
            if i >= warmup:
                seconds[name].append(_CLOCKS[clock]() - begin)
    return {name: Timing(tuple(times), clock) for name, times in seconds.items()}


class PartTimes:
    """Sums the seconds of each named range of `dino_ds.basics.ranges`; on a GPU by events, without waiting."""

    def __init__(self, device: torch.device, waits: bool = False) -> None:
        self._device, self._now = device, _CLOCKS[clock_of(device, waits)]
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            return
        start = self._now()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start

    def read(self) -> dict[str, float]:
        """Return the seconds of each part so far; waits for the device."""
        synchronize(self._device)
        for name, begin, end in self._events:
            self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1000
        self._events.clear()
        return dict(self._seconds)


def matmul_tflops(device: torch.device, dtype: torch.dtype, repeats: int = 7) -> float:
    """The best rate of a large square matrix product, in TFLOP/s: the ceiling that MFU is a share of."""
    side = 2048 if device.type == "cpu" else 8192
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    timing = time_interleaved({"product": lambda: torch.mm(a, b)}, repeats, 2, device)["product"]
    return 2 * side**3 / min(timing.all_seconds) / 1e12


def clock_name(clock: str) -> str:
    return "CPU time of one thread" if clock == "cpu" else "wall time"


def about(recipe: Recipe, batch: int) -> dict[str, Any]:
    """The part of a bench's result about network, batch and machine; "prototypes" are those of all heads."""
    prototypes = sum(head.prototypes for head in heads_of(recipe).values())
    facts = {"backbone": recipe.model.backbone, "crops": describe_crops(recipe.groups), "prototypes": prototypes}
    return facts | {"batch": batch, "processes": distributed.world_size(), "host": describe_host()}


def heading(title: str, result: dict[str, Any]) -> str:
    prototypes = f"{result['prototypes']} prototypes, " if result["prototypes"] else ""
    setting = f"{result['backbone']}, crops {result['crops']} pixels, {prototypes}{result['batch']} images per process"
    return f"{title}: {setting}, {result['processes']} process(es)\n{host_line(result['host'])}\n"


def describe_host() -> dict[str, Any]:
    """The host, its processor and GPU, the cores this process may use, threads, load average, date and versions."""
    cuda, path = torch.cuda.is_available(), Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    host: dict[str, Any] = {"host": platform.node(), "cpu": next(models, platform.machine())}
    host |= {"cores": len(distributed.usable_cores()), "threads": torch.get_num_threads()}
    host |= {"gpu": torch.cuda.get_device_name() if cuda else None, "cuda": torch.version.cuda if cuda else None}
    host["load_average"] = [round(load, 2) for load in os.getloadavg()]
    return host | {"date": datetime.date.today().isoformat(), "versions": versions()}


def host_line(host: dict[str, Any]) -> str:
    where = host["gpu"] or f"{host['cpu']}, {host['cores']} cores, {host['threads']} thread(s) used"
    packages = ", ".join(f"{name} {host['versions'][name]}" for name in ("torch", "deepspeed", "dino_ds"))
    return f"{where}; load average {host['load_average'][0]}; {packages}; {host['date']}"


class VisibleGpu(NamedTuple):
    """A GPU that torch sees; `free_gib` is the memory that other processes leave."""

    name: str
    capability: str
    memory_gib: float
    free_gib: float


def find_gpus() -> list[VisibleGpu]:
    if not torch.cuda.is_available():
        return []
    gpus = []
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        gpus.append(VisibleGpu(about.name, f"{about.major}.{about.minor}", total / 2**30, free / 2**30))
    return gpus


class ChildFailed(UserError, exit_code=1):
    """A process ended without a result."""


class ChildResult(NamedTuple):
    """Result of a function in a new process.

    value: what the function returned.
    peak_mib: peak of the resident set.
    imports_mib: resident set before the function ran, with the libraries loaded.
    """

    value: Any
    peak_mib: float
    imports_mib: float


class ChildOutOfMemory(ChildFailed):
    """A process was ended for the memory that it took, or its allocator had none left."""


class GpuPeak:
    """Peak GPU memory since this object was made, beyond what the allocator held then."""

    def __init__(self) -> None:
        self._held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def mib(self) -> float:
        return (torch.cuda.max_memory_allocated() - self._held) / MIB


class ChildLimits(NamedTuple):
    """The processes of `run_in_child`, one a rank, and their limits: GiB of memory of each (of its GPU) and seconds."""

    ranks: int = 1
    gib: float | None = None
    seconds: float | None = None


def run_in_child(
    function: Callable[..., Any], threads: int, limits: ChildLimits | None = None, **kwargs: Any
) -> ChildResult:
    """Call a module's `function` with `kwargs` in new processes, one a rank; the result is rank 0's. Arguments and
    value must be plain JSON. Raises ChildFailed, and ChildOutOfMemory for lack of memory."""
    limits = limits or ChildLimits()
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(CHECKOUT), os.environ.get("PYTHONPATH")) if p)
    call: dict[str, Any] = {"module": function.__module__, "name": function.__name__, "kwargs": kwargs}
    call |= {"code": allowed_code(), "limit_gib": limits.gib}
    with tempfile.TemporaryDirectory() as folder:
        words, result, printed = (Path(folder, name) for name in ("call.json", "result.json", "printed.txt"))
        words.write_text(json.dumps(call))
        command = [sys.executable, "-c", "from dino_ds.planning.measure import _child; _child()", str(result)]
        processes, port, ranks = list[psutil.Popen](), find_free_port(), limits.ranks
        with printed.open("wb") as output:
            start = partial(psutil.Popen, command, stdout=output, stderr=subprocess.STDOUT)
            for rank in range(ranks):
                at = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                if ranks > 1:
                    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                    environment |= {name: str(value) for name, value in at.items()}
                with words.open() as question:
                    processes.append(start(env=environment, stdin=question))
        codes = _wait(processes, limits)
        if -signal.SIGKILL in codes:
            raise ChildOutOfMemory("a measuring process was killed, most likely for its memory: take a smaller batch")
        if any(codes) or not result.exists():
            lines = [line for line in printed.read_text(errors="replace").splitlines() if line.strip()]
            reason = lines[-1] if lines else "it printed nothing"
            raise ChildFailed(f"a measuring process ended without a result: {reason}")
        answer = json.loads(result.read_text())
        if "out_of_memory" in answer:
            raise ChildOutOfMemory(f"a measuring process ran out of memory: {answer['out_of_memory']}")
        if "refused" in answer:
            raise ChildFailed(answer["refused"])
        return ChildResult(**answer)


def _wait(processes: list[psutil.Popen], limits: ChildLimits) -> list[int | None]:
    """Return the exit codes, None for those that had not ended when another failed; raises ChildFailed at a limit."""
    end = float("inf") if limits.seconds is None else time.monotonic() + limits.seconds
    most = float("inf") if limits.gib is None or torch.cuda.is_available() else limits.gib  # the allocator limits a GPU
    try:
        while any(process.poll() is None for process in processes):
            time.sleep(0.03)
            for process in processes:
                with suppress(psutil.Error):  # it has ended meanwhile
                    if (gib := process.memory_info().rss / 2**30) > most:
                        raise ChildOutOfMemory(f"a measuring process took {gib:.2f} GiB, more than {most:.2f}")
            if any(process.poll() for process in processes):
                break
            if time.monotonic() > end:
                raise ChildFailed(f"a measuring process had not ended after {limits.seconds:.0f} s")
        return [process.poll() for process in processes]
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
            process.wait()


def _child() -> None:
    """Make the call in a new process; rank 0 writes the result, any rank a failure, to the file that argv names."""
    with suppress(OSError):  # the kernel, if memory runs out, ends this process rather than another
        Path("/proc/self/oom_score_adj").write_text("1000")
    call = json.load(sys.stdin)
    init_distributed()
    allow_code(call["code"])
    if torch.cuda.is_available() and call["limit_gib"] is not None:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, call["limit_gib"] * 2**30 / total))
    function = getattr(importlib.import_module(call["module"]), call["name"])
    imports = resident_mib()
    try:
        value = function(**call["kwargs"])
        result = {"value": value, "peak_mib": resident_mib(peak=True), "imports_mib": imports}
    except Exception as error:
        if not (isinstance(error, UserError) or is_out_of_memory(error)):
            raise
        result = {"out_of_memory" if is_out_of_memory(error) else "refused": one_line(error, 200)}
    if distributed.rank() == 0 or "value" not in result:
        replace_file(Path(sys.argv[1]), json.dumps(result))
    os._exit(0)  # an orderly exit gains nothing here, and DeepSpeed's takes a second

"""`dino-ds profile`: where the time of the training step goes, what bounds it and what to change.

The step is the real one, on real images if some are given, else on noise that is already on the device.
"""

from __future__ import annotations

import contextlib
import cProfile
import pstats
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler
from tqdm import tqdm

from dino_ds.basics.digits import short
from dino_ds.basics.ranges import PARTS, listen
from dino_ds.config.recipe import Recipe
from dino_ds.engine import distributed
from dino_ds.engine.device import device
from dino_ds.errors import ConfigError
from dino_ds.options.bench import ProfileOptions
from dino_ds.planning.bottleneck import Call, judge, kind_of
from dino_ds.planning.measure.host import describe_host, host_line
from dino_ds.planning.measure.tables import markdown_table, print_result
from dino_ds.planning.measure.timing import PartTimes, synchronize
from dino_ds.planning.measure.trial import build_trial, join, real_feed, resolve, run_on_data

_WAIT, _OPERATORS = 1, 15


def run(options: ProfileOptions, *, recipe: Recipe, ds: dict[str, Any], ds_path: str) -> None:
    """Profile `steps` steps; files into the folder `out`, the summary to stdout. Raises ConfigError."""
    folder = _folder(options.out, options.tool)
    join(options.threads)
    batch = options.batch or (64 if torch.cuda.is_available() else 8)
    recipe, config = resolve(recipe, ds, ds_path, batch)
    trial = build_trial(recipe, config)
    data = recipe.data
    real = data.root is not None or data.mixture or data.source == "photos" or ":" in data.source
    profiled = {"torch": profile_torch, "cprofile": profile_python, "nsight": run_for_nsight}[options.tool]
    if real:
        # Closed also after an error: the end of the process would wait for the workers for ever.
        with contextlib.closing(real_feed(recipe, trial)) as feed:
            result = profiled(lambda: run_on_data(trial, feed, recipe.seed), options.warmup, options.steps, folder)
    else:
        result = profiled(trial.run, options.warmup, options.steps, folder)
    if result is None:
        return
    images = batch * distributed.world_size()
    about = {
        "backbone": recipe.model.backbone,
        "data": recipe.data.place if real else "noise",
        "batch": batch,
        "processes": distributed.world_size(),
        "stage": config.stage,
        "precision": config.precision,
        "images_per_second": images / result["step_seconds"],
        "host": describe_host(),
    }
    result = about | result
    if distributed.rank() == 0:
        (folder / "summary.json").write_text(dumps(result, indent=1) + "\n")
    print_result(_page(result, folder), result, options.json)


def _folder(out: str, tool: str) -> Path:
    if tool == "nsight" and not torch.cuda.is_available():
        raise ConfigError("--tool nsight needs an NVIDIA GPU: use torch or cprofile")
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} can't be made: {error.strerror}") from None
    return folder


def profile_torch(step: Callable[[], object], warmup: int, steps: int, folder: Path) -> dict[str, Any]:
    """Steps under torch's profiler: one that waits, `warmup` that it sees and forgets, `steps` that it keeps."""
    where = device()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if where.type == "cuda" else [])]
    parts = PartTimes(where, waits=True)  # for data
    rank = distributed.rank()
    profiler = profile(
        activities=activities,
        schedule=schedule(wait=_WAIT, warmup=warmup, active=steps, repeat=1),
        on_trace_ready=tensorboard_trace_handler(str(folder / "tensorboard"), worker_name=f"rank{rank}"),
        profile_memory=True,
        acc_events=True,
    )
    with profiler, listen(_annotate), _memory_history(folder):
        for _ in _progress(_WAIT + warmup):
            step()
            profiler.step()
        with listen(parts):
            for _ in _progress(steps):
                step()
                synchronize(where)
                profiler.step()
    if rank == 0:
        newest = max((folder / "tensorboard").glob("rank0*.json*"), key=lambda path: path.stat().st_mtime)
        shutil.copy(newest, folder / "trace.json")
    return _summarise(profiler, parts.read(), steps, where.type == "cuda")


def _summarise(profiler: profile, parts: dict[str, float], steps: int, on_gpu: bool) -> dict[str, Any]:
    events = list(profiler.events() or [])
    seconds = sum(e.time_range.elapsed_us() for e in events if e.name.startswith("ProfilerStep")) / 1e6
    calls: list[Call] = []
    for event in events:
        if event.name in PARTS or event.name.startswith("ProfilerStep") or event.device_type.name != "CPU":
            continue  # kernels of a GPU are counted with the operator that launched them
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if own > 0:
            calls.append((event.name, own / 1e6))
    return {
        "tool": "torch",
        "steps": steps,
        "step_seconds": seconds / steps,
        "parts": {part: parts[part] / steps for part in PARTS if part in parts},
        "operators": _by_operator(calls, steps),
        **judge(seconds, parts.get("data", 0.0), calls, on_gpu),
    }


def _by_operator(calls: list[Call], steps: int) -> list[dict[str, Any]]:
    by_name: dict[str, list[float]] = {}
    for name, seconds in calls:
        by_name.setdefault(name, []).append(seconds)
    slowest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:_OPERATORS]
    return [
        {"name": name, "kind": kind_of(name), "calls": len(each) / steps, "seconds": sum(each) / steps}
        for name, each in slowest
    ]


def profile_python(step: Callable[[], object], warmup: int, steps: int, folder: Path) -> dict[str, Any]:
    """Steps under cProfile: which Python functions take the host's time. Only the main thread is seen."""
    parts = PartTimes(device(), waits=True)
    for _ in _progress(_WAIT + warmup):
        step()
    profiler = cProfile.Profile()
    with listen(parts):
        synchronize(device())
        profiler.enable()
        for _ in _progress(steps):
            step()
        synchronize(device())
        profiler.disable()
    file = folder / f"rank{distributed.rank()}.prof"
    profiler.dump_stats(file)
    stats: Any = pstats.Stats(profiler)
    rows = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:_OPERATORS]
    found = parts.read()
    return {
        "tool": "cprofile",
        "steps": steps,
        "step_seconds": stats.total_tt / steps,
        "parts": {part: found[part] / steps for part in PARTS if part in found},
        "operators": [
            {"name": _function_name(*where), "kind": "python", "calls": calls / steps, "seconds": own / steps}
            for where, (_, calls, own, _, _) in rows
        ],
    }


def run_for_nsight(step: Callable[[], object], warmup: int, steps: int, folder: Path) -> None:
    """Named ranges and the profiler's start and stop, for `nsys profile --capture-range=cudaProfilerApi`."""
    for _ in range(_WAIT + warmup):
        step()
    synchronize(device())
    torch.cuda.profiler.start()
    with listen(torch.cuda.nvtx.range):
        for _ in range(steps):
            with torch.cuda.nvtx.range("step"):
                step()
    synchronize(device())
    torch.cuda.profiler.stop()


@contextmanager
def _annotate(name: str) -> Iterator[None]:
    on_gpu = torch.cuda.is_available()
    with record_function(name), torch.cuda.nvtx.range(name) if on_gpu else contextlib.nullcontext():
        yield


@contextmanager
def _memory_history(folder: Path) -> Iterator[None]:
    """On a GPU every allocation, with what made it, for https://pytorch.org/memory_viz."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=200_000)
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(folder / f"memory_rank{distributed.rank()}.pickle"))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _progress(steps: int) -> Any:
    return tqdm(range(steps), desc="steps", leave=False, disable=None)


def _function_name(file: str, line: int, function: str) -> str:
    """The name of a function as `package/module.py:12 function`; built-in functions have no file."""
    return function if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {function}"


def _page(result: dict[str, Any], folder: Path) -> str:
    whole, parts = result["step_seconds"], result["parts"]
    rest = {**parts, "other": max(0.0, whole - sum(parts.values()))}
    part_rows = [(name, f"{1000 * s:.2f}", f"{100 * s / whole:.1f} %") for name, s in rest.items()]
    rows = [
        (
            o["name"],
            o["kind"],
            short(o["calls"], 4),
            f"{1000 * o['seconds']:.2f}",
            f"{100 * o['seconds'] / whole:.1f} %",
        )
        for o in result["operators"]
    ]
    torch_ran = result["tool"] == "torch"
    lines = [
        f"profile: {result['backbone']}, ZeRO {result['stage']}, {result['precision']}, {result['batch']} images per "
        f"process, {result['processes']} process(es), data: {result['data']}",
        host_line(result["host"]),
        f"{short(result['images_per_second'], 4)} images/s, {1000 * whole:.2f} ms a step, with the profiler's own cost",
        "",
        markdown_table(("part", "ms a step", "share"), part_rows),
        "",
        markdown_table(("operator" if torch_ran else "function", "kind", "calls a step", "own ms", "share"), rows),
        "",
    ]
    if torch_ran:
        lines += [f"bound by {result['bound_by']}: {result['reason']}", f"to change: {result['advice']}"]
        lines.append(f"files: {folder / 'trace.json'} (ui.perfetto.dev); tensorboard --logdir {folder}")
    else:
        lines.append(f"files: {folder / 'rank0.prof'} (snakeviz, pstats)")
    return "\n".join(lines)

"""`dino-ds bench step`: images/s, TFLOP/s, MFU, memory and the share of each part of the training step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dino_ds.basics.files import check_absent
from dino_ds.basics.formatting import markdown_table, short
from dino_ds.basics.own_code import allow_code
from dino_ds.basics.ranges import PARTS, listen
from dino_ds.config.ds_config import change_ds_config
from dino_ds.config.ds_schema import DsConfig
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import estimate_memory
from dino_ds.costs.step_costs import model_flops
from dino_ds.engine import distributed
from dino_ds.engine.process import DTYPES, device, memory_gib, release_memory
from dino_ds.errors import ConfigError
from dino_ds.options.commands import BenchStepOptions
from dino_ds.options.definition import Result
from dino_ds.planning import measure

_TRACE, _TRACED, _OPERATORS = "trace.json", 3, 15
Settings = dict[str, tuple[Recipe, dict[str, Any]]]
"""Recipe and ds JSON of each compared setting, by name."""


def run(options: BenchStepOptions, *, recipe: Recipe, ds: dict[str, Any], ds_path: str) -> Result:
    """Measure the step of `recipe` and `ds`, or of two settings with different values of a key: `compare` ("key=a,b").

    Raises ConfigError for a setting that does not exist.
    """
    settings = _settings(recipe, ds, ds_path, options.compare)
    if options.profile and options.compare:
        raise ConfigError("--compare with --profile: trace one setting, named by its own option")
    if options.profile:
        check_absent(Path(options.profile, _TRACE), "name another folder with --profile")
    batch = measure.begin(options.batch, options.threads)
    resolved = {name: measure.resolve(*setting, ds_path, batch) for name, setting in settings.items()}
    if torch.cuda.is_available():  # one at a time: two may not fit
        summaries = [summary for name, pair in resolved.items() for summary in _measure({name: pair}, {}, options)]
    else:
        memory = {name: _peak_memory(*pair, ds_path, batch, options.threads) for name, pair in settings.items()}
        summaries = _measure(resolved, memory, options)
    result = measure.about(recipe, batch) | {"settings": summaries}
    if options.compare:
        first, second = summaries
        result["ratio"] = second["images_per_second"] / first["images_per_second"]
    return Result(result, _page(result))


def _settings(recipe: Recipe, ds: dict[str, Any], ds_path: str, compare: str | None) -> Settings:
    if compare is None:
        return {"step": (recipe, ds)}
    key, _, text = compare.partition("=")
    values = text.split(",")
    if len(values) != 2 or not all(values) or values[0] == values[1]:
        raise ConfigError(
            f"--compare {compare!r} is not a key and two values: write --compare ds.dino_ds.packed=false,true"
        )
    if key == "data.global_batch":
        raise ConfigError("--compare data.global_batch: the batch is given with --batch; run the bench twice")
    if key.startswith("ds."):
        return {f"{key}={v}": (recipe, change_ds_config(ds, ds_path, {key[3:]: v})) for v in values}
    allow_code(values)
    return {f"{key}={v}": (change_recipe(recipe, {key: v}), ds) for v in values}


def _peak_memory(recipe: Recipe, ds: dict[str, Any], ds_path: str, batch: int, threads: int) -> dict[str, float]:
    """Measure peak memory in a child process; {} with several ranks, where it is read in this process later."""
    if distributed.world_size() > 1:
        return {}
    arguments: dict[str, Any] = {"recipe": recipe.model_dump(mode="json"), "ds": ds, "ds_path": ds_path}
    child = measure.run_in_child(take_steps, threads, batch=batch, **arguments)
    return {"peak_memory_mib": child.peak_mib, "imports_mib": child.imports_mib}


def take_steps(recipe: dict[str, Any], ds: dict[str, Any], ds_path: str, batch: int) -> None:
    """Run a few steps in the process whose memory is measured."""
    trial = measure.build_trial(*measure.resolve(Recipe.model_validate(recipe), ds, ds_path, batch))
    for _ in range(measure.MEMORY_STEPS):
        trial.run()


def _measure(
    resolved: dict[str, tuple[Recipe, DsConfig]], memory: dict[str, dict[str, float]], options: BenchStepOptions
) -> list[dict[str, Any]]:
    """Time the settings, interleaved. memory: of each setting; {} on a GPU, where it is measured here, for one."""
    peak, waits = None if memory else measure.GpuPeak(), distributed.world_size() > 1
    parts = {name: measure.PartTimes(device(), waits) for name in resolved}
    steps = {name: measure.build_trial(*pair).run for name, pair in resolved.items()}
    runs = {name: parts[name].after(options.warmup, step) for name, step in steps.items()}
    timings = measure.time_interleaved(runs, options.steps, options.warmup, device(), waits)
    traced = {name: trace_steps(steps[name], Path(options.profile)) if options.profile else {} for name in resolved}
    memory = memory if peak is None else {name: {"peak_memory_mib": peak.mib()} for name in resolved}
    steps.clear()
    runs.clear()
    release_memory()
    return [
        {"name": name, **_summary(timings[name], parts[name].read(), *pair, memory[name]), **traced[name]}
        for name, pair in resolved.items()
    ]


def trace_steps(step: Callable[[], object], folder: Path) -> dict[str, str]:
    """Profile a few steps with torch into trace.json, parts included; return its path and a table of operators."""
    on_gpu, rank = torch.cuda.is_available(), distributed.rank()
    path = folder / (f"trace_rank{rank}.json" if rank else _TRACE)
    with (
        profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler,
        listen(record_function),
        listen(torch.cuda.nvtx.range) if on_gpu else nullcontext(),
    ):
        for _ in range(_TRACED):
            step()
        measure.synchronize(device())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--profile {folder} can't be made: {error.strerror}") from None
    profiler.export_chrome_trace(str(path))
    by = f"self_{'cuda' if on_gpu else 'cpu'}_time_total"
    table = profiler.key_averages().table(sort_by=by, row_limit=_OPERATORS, max_name_column_width=40)
    return {"trace": str(path), "operators": table}


def _summary(
    timing: measure.Timing, spent: dict[str, float], recipe: Recipe, config: DsConfig, memory: dict[str, float]
) -> dict[str, Any]:
    cuda, libraries = torch.cuda.is_available(), int(memory.get("imports_mib", 0.0) * measure.MIB)
    predicted = estimate_memory(recipe, config, distributed.world_size(), cuda, libraries)
    images = config.micro_batch * config.accumulation
    flops = sum(model_flops(recipe).values())
    tflops = flops * images / timing.seconds / 1e12
    peak = measure.matmul_tflops(device(), DTYPES[config.precision])
    shares = {part: spent.get(part, 0.0) / sum(timing.all_seconds) for part in PARTS}
    return {
        "precision": config.precision,
        "stage": config.stage,
        "images_per_second": images * distributed.world_size() / timing.seconds,
        "step_seconds": timing.seconds,
        "spread": timing.spread,
        "clock": timing.clock,
        "gflop_per_image": flops / 1e9,
        "tflops": tflops,
        "matmul_tflops": peak,
        "mfu": tflops / peak,
        "parts": {**shares, "other": 1 - sum(shares.values())},
        "peak_memory_mib": memory_gib() * 1024,
        "predicted_memory_mib": predicted.gib * 1024,
        **memory,
    }


def _page(result: dict[str, Any]) -> str:
    settings = result["settings"]
    rows = {
        "images/s": [short(s["images_per_second"]) for s in settings],
        "step, s": [f"{s['step_seconds']:.4g}" for s in settings],
        "spread": [f"{100 * s['spread']:.0f} %" for s in settings],
        "TFLOP/s": [short(s["tflops"]) for s in settings],
        "matmul peak, TFLOP/s": [short(s["matmul_tflops"]) for s in settings],
        "MFU": [f"{100 * s['mfu']:.1f} %" for s in settings],
        "peak memory, MiB": [f"{s['peak_memory_mib']:.0f}" for s in settings],
        "predicted, MiB": [f"{s['predicted_memory_mib']:.0f}" for s in settings],
    }
    if "imports_mib" in settings[0]:
        rows["libraries' part, MiB"] = [f"{s['imports_mib']:.0f}" for s in settings]
    for part in (*PARTS, "other"):
        rows[f"part: {part}"] = [f"{100 * s['parts'][part]:.1f} %" for s in settings]
    lines = [
        measure.heading("bench step", result),
        markdown_table(["", *(s["name"] for s in settings)], [(name, *cells) for name, cells in rows.items()]),
        "",
        f"{measure.clock_name(settings[0]['clock'])}; median of the steps; FLOPs of the whole model",
    ]
    if "trace" in settings[0]:
        lines += ["", settings[0]["operators"], f"{settings[0]['trace']}: open it in ui.perfetto.dev"]
    if "ratio" in result:
        lines.append(f"ratio of images/s, second to first: {result['ratio']:.3f}")
    return "\n".join(lines)

"""`dino-ds bench step`: images/s, TFLOP/s, MFU, memory and the share of each part of the training step."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any

import torch

from dino_ds.basics.digits import short
from dino_ds.basics.ranges import AUGMENTATION, PARTS
from dino_ds.config.ds_config import change_ds_config
from dino_ds.config.ds_values import DsConfig
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import estimate_memory
from dino_ds.costs.step_costs import mean_costs, model_flops
from dino_ds.engine import distributed
from dino_ds.engine.device import DTYPES, device, memory_gib
from dino_ds.errors import ConfigError
from dino_ds.options.bench import BenchStepOptions
from dino_ds.planning.bench.common import MEMORY_STEPS, about, begin, clock_name, heading
from dino_ds.planning.measure.host import matmul_tflops
from dino_ds.planning.measure.memory import MIB, GpuPeak, run_in_child
from dino_ds.planning.measure.tables import markdown_table, print_result
from dino_ds.planning.measure.timing import PartTimes, Timing, time_interleaved
from dino_ds.planning.measure.trial import build_trial, free_memory, real_feed, resolve, run_on_data

Settings = dict[str, tuple[Recipe, dict[str, Any]]]
"""The settings that are compared: recipe and ds JSON by name."""


def run(options: BenchStepOptions, *, recipe: Recipe, ds: dict[str, Any], ds_path: str) -> None:
    """Measure the step of `recipe` and `ds`, or two settings that `compare` ("key=a,b") tells apart.

    Raises ConfigError for a setting that does not exist.
    """
    settings = _settings(recipe, ds, ds_path, options.compare)
    if options.data and options.compare:
        raise ConfigError("--compare with --data: the loader of one setting would work during the step of the other")
    if options.data and recipe.data.source == "folder" and not recipe.data.root and not recipe.data.mixture:
        raise ConfigError("--data needs images: --data.root FOLDER, or --data.source photos for the embedded ones")
    batch = begin(options.batch, options.threads)
    resolved = {name: resolve(*setting, ds_path, batch) for name, setting in settings.items()}
    if torch.cuda.is_available():  # one at a time: two may not fit
        summaries = [found for name, pair in resolved.items() for found in _measure({name: pair}, {}, options)]
    else:
        memory = {name: _peak_memory(*pair, ds_path, batch, options.threads) for name, pair in settings.items()}
        summaries = _measure(resolved, memory, options)
    result = about(recipe, batch) | {"settings": summaries}
    if options.compare:
        first, second = summaries
        result["ratio"] = second["images_per_second"] / first["images_per_second"]
    print_result(_page(result), result, options.json)


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
    return {f"{key}={v}": (change_recipe(recipe, {key: v}), ds) for v in values}


def _peak_memory(recipe: Recipe, ds: dict[str, Any], ds_path: str, batch: int, threads: int) -> dict[str, float]:
    """Measure it in a process of its own; with several ranks it is read in this one, later."""
    if distributed.world_size() > 1:
        return {}
    arguments = {"recipe": recipe.model_dump(mode="json"), "ds": ds}
    child = run_in_child("dino_ds.planning.bench.step:take_steps", threads, **arguments, ds_path=ds_path, batch=batch)
    return {"peak_memory_mib": child.peak_mib, "imports_mib": child.imports_mib}


def take_steps(recipe: dict[str, Any], ds: dict[str, Any], ds_path: str, batch: int) -> None:
    """Run a few steps in the process whose memory is measured."""
    trial = build_trial(*resolve(Recipe.model_validate(recipe), ds, ds_path, batch))
    for _ in range(MEMORY_STEPS):
        trial.run()


def _measure(
    resolved: dict[str, tuple[Recipe, DsConfig]], memory: dict[str, dict[str, float]], options: BenchStepOptions
) -> list[dict[str, Any]]:
    """Time the settings, interleaved. memory: of each, if known; a GPU's is measured here, for one setting."""
    peak, waits = None if memory else GpuPeak(), options.data or distributed.world_size() > 1
    with ExitStack() as open_feeds:
        steppers = {
            name: _Stepper(*pair, waits, open_feeds if options.data else None) for name, pair in resolved.items()
        }
        runs = {name: stepper.parts.after(options.warmup, stepper) for name, stepper in steppers.items()}
        timings = time_interleaved(runs, options.steps, options.warmup, device(), waits)
    memory = memory if peak is None else {name: {"peak_memory_mib": peak.mib()} for name in resolved}
    summaries = [_summary(name, timings[name], steppers[name], memory[name]) for name in steppers]
    steppers.clear()
    runs.clear()
    free_memory()
    return summaries


class _Stepper:
    """The step of one setting, on real images where `open_feeds` closes their loader."""

    def __init__(self, recipe: Recipe, config: DsConfig, waits: bool, open_feeds: ExitStack | None) -> None:
        self.recipe, self.config, self.trial = recipe, config, build_trial(recipe, config)
        self._feed = open_feeds.enter_context(closing(real_feed(recipe, self.trial))) if open_feeds else None
        self.parts = PartTimes(device(), waits)

    def __call__(self) -> None:
        if self._feed is None:
            self.trial.run()
        else:
            run_on_data(self.trial, self._feed, self.recipe.seed)


def _summary(name: str, timing: Timing, stepper: _Stepper, memory: dict[str, float]) -> dict[str, Any]:
    config, cuda = stepper.config, torch.cuda.is_available()
    libraries = int(memory.get("imports_mib", 0.0) * MIB)
    predicted = estimate_memory(stepper.recipe, config, distributed.world_size(), cuda, libraries)
    images = config.micro_batch * config.accumulation
    flops = sum(model_flops(stepper.recipe).values())
    executed = mean_costs(stepper.recipe, config, cuda).sum("flops") / config.micro_batch
    tflops = flops * images / timing.seconds / 1e12
    peak = matmul_tflops(device(), DTYPES[config.precision])
    spent, whole = stepper.parts.read(), sum(timing.all_seconds)
    shares = {part: spent.get(part, 0.0) / whole for part in PARTS}
    return {
        "name": name,
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
        "executed_gflop_per_image": executed / 1e9,
        "executed_mfu": tflops / peak * executed / flops,
        "parts": {**shares, "other": 1 - sum(shares.values())},
        "augmentation_share": spent.get(AUGMENTATION, 0.0) / whole,
        "peak_memory_mib": memory_gib() * 1024,
        "predicted_memory_mib": predicted.gib * 1024,
        **memory,
    }


def _page(result: dict[str, Any]) -> str:
    settings = result["settings"]
    rows: list[tuple[str, Any]] = [
        ("images/s", lambda s: short(s["images_per_second"])),
        ("step, s", lambda s: f"{s['step_seconds']:.4g}"),
        ("spread", lambda s: f"{100 * s['spread']:.0f} %"),
        ("TFLOP/s", lambda s: short(s["tflops"])),
        ("matmul peak, TFLOP/s", lambda s: short(s["matmul_tflops"])),
        ("MFU", lambda s: f"{100 * s['mfu']:.1f} %"),
        ("MFU of executed FLOPs", lambda s: f"{100 * s['executed_mfu']:.1f} %"),
        ("peak memory, MiB", lambda s: f"{s['peak_memory_mib']:.0f}"),
        ("predicted, MiB", lambda s: f"{s['predicted_memory_mib']:.0f}"),
    ]
    if "imports_mib" in settings[0] and not torch.cuda.is_available():
        rows.append(("libraries' part, MiB", lambda s: f"{s['imports_mib']:.0f}"))
    for part in (*PARTS, "other"):
        rows.append((f"part: {part}", lambda s, part=part: f"{100 * s['parts'][part]:.1f} %"))
    if settings[0]["augmentation_share"]:
        where = "beside the step" if torch.cuda.is_available() else "in data"
        rows.append((f"augmentation, {where}", lambda s: f"{100 * s['augmentation_share']:.1f} %"))
    table = markdown_table(
        ["", *(s["name"] for s in settings)], [(name, *(show(s) for s in settings)) for name, show in rows]
    )
    lines = [
        heading("bench step", result),
        table,
        "",
        f"{clock_name(settings[0]['clock'])}; median of the steps; FLOPs of the whole model",
    ]
    if "ratio" in result:
        lines.append(f"ratio of images/s, second to first: {result['ratio']:.3f}")
    return "\n".join(lines)

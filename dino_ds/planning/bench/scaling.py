"""`dino-ds bench scaling`: one process against several on this machine: images/s and the share of communication.

It starts its own ranks. Without a GPU each rank has one core to itself; with GPUs, one GPU.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from dino_ds.basics.digits import short
from dino_ds.config.recipe import Recipe
from dino_ds.engine import distributed
from dino_ds.engine.device import device
from dino_ds.errors import ConfigError
from dino_ds.options.bench import BenchScalingOptions
from dino_ds.planning.bench.common import about, begin, heading
from dino_ds.planning.bench.ladder_steps import CLIPPING
from dino_ds.planning.measure.memory import run_in_children
from dino_ds.planning.measure.tables import markdown_table, print_result
from dino_ds.planning.measure.timing import synchronize, time_interleaved
from dino_ds.planning.measure.trial import Trial, build_trial, resolve

STAGES = (0, 1, 2, 3)


def run(options: BenchScalingOptions, *, recipe: Recipe) -> None:
    """Measure the step at every ZeRO stage on 1 and on `ranks` processes, `batch` images each. Raises ConfigError."""
    ranks, batch = options.ranks, begin(options.batch, options.threads, "bench scaling")
    places = torch.cuda.device_count() if torch.cuda.is_available() else len(distributed.usable_cores())
    if not 1 < ranks <= places:
        raise ConfigError(f"--ranks {ranks}: bench scaling wants 2 or more, and this machine has {places} place(s)")
    arguments: dict[str, Any] = {
        "recipe": recipe.model_dump(mode="json"),
        "batch": batch,
        "steps": options.steps,
        "warmup": options.warmup,
        "stages": list(STAGES),
    }
    found = {
        n: run_in_children("dino_ds.planning.bench.scaling:take_steps", n, 1, **arguments)[0].value for n in (1, ranks)
    }
    rows = []
    for stage in STAGES:
        alone, several = (found[n][str(stage)] for n in (1, ranks))
        rate, rates = batch / alone["seconds"], ranks * batch / several["seconds"]
        rows.append(
            {
                "stage": stage,
                "images_per_second_1": rate,
                "images_per_second": rates,
                "speedup": rates / rate,
                "communication_share": several["communication_share"],
                "spread": several["spread"],
            }
        )
    result = about(recipe, batch) | {"processes": f"1 and {ranks}", "ranks": ranks, "stages": rows}
    print_result(_page(result), result, options.json)


def take_steps(
    recipe: dict[str, Any], batch: int, steps: int, warmup: int, stages: list[int]
) -> dict[str, dict[str, float]]:
    """Measure the step on one rank: by ZeRO stage its seconds and its share of communication."""
    if device().type == "cpu" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {distributed.usable_cores()[distributed.rank()]})
    trials = {}
    for stage in stages:
        ds = {"gradient_clipping": CLIPPING, "zero_optimization": {"stage": stage}}
        trials[str(stage)] = build_trial(*resolve(Recipe.model_validate(recipe), ds, "bench scaling", batch))
    runs = {stage: trial.run for stage, trial in trials.items()}
    timings = time_interleaved(runs, steps, warmup, device(), waits=True)  # on one rank too, to compare
    return {
        stage: {
            "seconds": timings[stage].seconds,
            "spread": timings[stage].spread,
            "communication_share": _communication_share(trial, timings[stage].seconds),
        }
        for stage, trial in trials.items()
    }


def _communication_share(trial: Trial, step_seconds: float) -> float:
    """The profiler's share of one step spent in collectives, waiting for the other ranks included."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        trial.run()
        synchronize(device())
    spans = [
        event.time_range.elapsed_us()
        for event in profile.events()
        if event.name.startswith("gloo:") or "ncclDevKernel" in event.name
    ]
    return sum(spans) / 1e6 / step_seconds


def _page(result: dict[str, Any]) -> str:
    ranks = result["ranks"]
    rows = [
        (
            f"ZeRO {row['stage']}",
            f"{short(row['images_per_second_1'])}",
            f"{short(row['images_per_second'])}",
            f"{row['speedup']:.2f}",
            f"{100 * row['communication_share']:.1f} %",
            f"{100 * row['spread']:.0f} %",
        )
        for row in result["stages"]
    ]
    header = ("", "images/s, 1 rank", f"images/s, {ranks} ranks", "ratio", "communication", "spread")
    place = "GPU" if result["host"]["gpu"] else "core"
    note = f"wall time, medians; a {place} for each rank; communication: waiting for other ranks included"
    return "\n".join([heading("bench scaling", result), markdown_table(header, rows), "", note])

"""The planner's bytes beside the resident set of real steps, each in a process of its own.

`python -m scripts.bench_plan [--batch 4] [--precision bf16]`: three recipes at every ZeRO stage, on one rank.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fire
from tqdm import tqdm

from dino_ds.basics.formatting import markdown_table
from dino_ds.config.loading import change_recipe, load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import GIB, estimate_memory
from dino_ds.engine.process import init_distributed, resident_mib
from dino_ds.options.definition import Result
from dino_ds.planning.bench.step import CLIPPING
from dino_ds.planning.measure import MEMORY_STEPS, MIB, build_trial, describe_host, heading, resolve, run_in_child

RECIPES = ("vitti16", "vits16", "vitb16")
STAGES = (0, 1, 2, 3)
_NAME = "bench plan"
# glibc maps blocks of 64 KiB and more one by one, and returns what is freed on top of the heap at once (mallopt(3)):
# slow, but the resident set is then what is in use.
_EXACT_HEAP = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_MMAP_MAX_": "1000000",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
}
# A step of this takes every path of the real one, so that libraries load and grow before what is measured.
_SMALL = {
    "model.width": "64",
    "model.heads": "2",
    "model.depth": "2",
    "crops.global_size": "32",
    "crops.local_size": "16",
    "head.prototypes": "256",
    "head.hidden": "64",
    "head.bottleneck": "32",
}


def main(batch: int = 4, precision: str = "fp32", as_json: bool = False) -> None:
    """Measure every recipe at every ZeRO stage. Raises ConfigError."""
    init_distributed()
    cells = [(name, stage) for name in RECIPES for stage in (STAGES if precision == "fp32" else STAGES[1:])]
    rows = []
    for name, stage in tqdm(cells, unit="cell", disable=None):
        found = measure_cell(load_recipe(name, {}), _ds_config(stage, precision), batch)
        rows.append({"recipe": name, "stage": stage, **found})
        tqdm.write(
            f"{name}, ZeRO {stage}: {found['measured_mib']:.0f} MiB, predicted {found['predicted_mib']:.0f}, "
            f"ratio {found['ratio']:.3f}",
            file=sys.stderr,
        )
    result = {
        "backbone": ", ".join(RECIPES),
        "crops": "as in the recipes",
        "prototypes": 65536,
        "batch": batch,
        "processes": 1,
        "precision": precision,
        "host": describe_host(),
        "cells": rows,
    }
    Result(result, _page(result)).show(as_json)


def measure_cell(recipe: Recipe, ds: dict[str, Any], batch: int) -> dict[str, float]:
    """`measured_mib`: growth of the resident set up to the fullest moment of two steps; `predicted_mib`.

    Raises ChildFailed.
    """
    from scripts import bench_plan as importable  # as a main program this module has no name

    arguments: dict[str, Any] = {"recipe": recipe.model_dump(mode="json"), "ds": ds, "batch": batch}
    with patch.dict(os.environ, _EXACT_HEAP):
        value = run_in_child(importable.take_steps, 1, **arguments).value
    return {**value, "ratio": value["predicted_mib"] / value["measured_mib"]}


def take_steps(recipe: dict[str, Any], ds: dict[str, Any], batch: int) -> dict[str, float]:
    """Measure in the process of `measure_cell`."""
    full = Recipe.model_validate(recipe)
    small = build_trial(*resolve(change_recipe(full, _SMALL), ds, _NAME, 2))
    for _ in range(MEMORY_STEPS):
        small.run()
    del small
    gc.collect()
    before = resident_mib()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident set begins anew
    changed, config = resolve(full, ds, _NAME, batch)
    trial = build_trial(changed, config)
    for _ in range(MEMORY_STEPS):
        trial.run()
    measured = resident_mib(peak=True) - before
    memory = estimate_memory(changed, config, 1, on_gpu=False)
    return {"measured_mib": measured, "predicted_mib": memory.gib * GIB / MIB, "libraries_mib": before}


def _ds_config(stage: int, precision: str) -> dict[str, Any]:
    ds: dict[str, Any] = {"gradient_clipping": CLIPPING, "zero_optimization": {"stage": stage}}
    return ds if precision == "fp32" else ds | {precision: {"enabled": True}}


def _page(result: dict[str, Any]) -> str:
    rows = [
        (
            row["recipe"],
            f"ZeRO {row['stage']}",
            f"{row['measured_mib']:.0f}",
            f"{row['predicted_mib']:.0f}",
            f"{row['ratio']:.3f}",
        )
        for row in result["cells"]
    ]
    header = (result["precision"], "", "measured MiB", "predicted MiB", "ratio")
    note = (
        "resident set of one process, libraries left out (what it is after a small step); glibc returns freed memory "
        f"at once. Worst: {max(abs(row['ratio'] - 1) for row in result['cells']):.1%}"
    )
    return "\n".join([heading(_NAME, result), markdown_table(header, rows), "", note])


if __name__ == "__main__":
    fire.Fire(main)

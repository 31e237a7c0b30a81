"""`dino-ds bench memory`: FP32 or mixed precision, with and without activation checkpointing: memory and time."""

from __future__ import annotations

import itertools
from typing import Any

from dino_ds.bench.common import about, begin, heading, memory_of_step
from dino_ds.bench.rungs import CLIPPING
from dino_ds.config.recipe import Recipe
from dino_ds.engine.device import device
from dino_ds.measure.tables import markdown_table, print_result
from dino_ds.measure.timing import time_interleaved
from dino_ds.measure.trial import build_trial, resolve
from dino_ds.options.bench import BenchMemoryOptions

_NAME = "bench memory"


def run(options: BenchMemoryOptions, *, recipe: Recipe) -> None:
    """Peak memory of each of the four in a process of its own, their steps by turns in this one; bf16 at ZeRO 1."""
    batch = begin(options.batch, options.threads, _NAME)
    variants = {
        (precision, checkpointing): _ds_config(precision, checkpointing)
        for precision, checkpointing in itertools.product(("fp32", "bf16"), (False, True))
    }
    memory = {key: memory_of_step(recipe, ds, _NAME, batch, options.threads) for key, ds in variants.items()}
    trials = {str(key): build_trial(*resolve(recipe, ds, _NAME, batch)) for key, ds in variants.items()}
    timings = time_interleaved(
        {name: trial.run for name, trial in trials.items()}, options.steps, options.warmup, device()
    )
    result = about(recipe, batch) | {
        "variants": [
            {
                "precision": key[0],
                "checkpointing": key[1],
                "peak_memory_mib": memory[key].peak_mib,
                "imports_mib": memory[key].imports_mib,
                "step_seconds": timings[str(key)].seconds,
                "spread": timings[str(key)].spread,
            }
            for key in variants
        ],
        "clock": timings[str(("fp32", False))].clock,
    }
    print_result(_page(result), result, options.json)


def _ds_config(precision: str, checkpointing: bool) -> dict[str, Any]:
    ds: dict[str, Any] = {"gradient_clipping": CLIPPING, "zero_optimization": {"stage": 1}}
    if precision != "fp32":
        ds[precision] = {"enabled": True}
    if checkpointing:
        ds["activation_checkpointing"] = {"number_checkpoints": "auto"}
    return ds


def _page(result: dict[str, Any]) -> str:
    first = result["variants"][0]
    rows = [
        (
            f"{row['precision']}, checkpointing {'on' if row['checkpointing'] else 'off'}",
            f"{row['peak_memory_mib']:.0f}",
            f"{row['peak_memory_mib'] - row['imports_mib']:.0f}",
            f"{row['peak_memory_mib'] / first['peak_memory_mib']:.2f}",
            f"{row['step_seconds']:.4g}",
            f"{row['step_seconds'] / first['step_seconds']:.2f}",
        )
        for row in result["variants"]
    ]
    header = ("setting", "peak MiB", "without libraries", "× first", "step, s", "× first")
    clock = "CPU time of one thread" if result["clock"] == "cpu" else "wall time"
    where = "resident set" if result["host"]["gpu"] is None else "the device's allocator"
    return "\n".join(
        [heading(_NAME, result), markdown_table(header, rows), "", f"memory: {where}, a process each; {clock}, medians"]
    )

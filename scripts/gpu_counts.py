"""Launches, traffic and FLOPs of a step on one GPU, without one: `python -m scripts.gpu_counts --config C --images N`.

The step is rehearsed in bf16 at ZeRO 1. Launches are operators, weighed by the kernels that they start; a function that
torch.compile fuses counts as Inductor's kernels, which tests compare. Gigabytes are what operators read and write,
products too, each argument and each result once. DeepSpeed's part, the optimizer, follows from the number of parameter
groups, and milliseconds are the planner's. `--compile`: launches and gigabytes of the blocks stay those of eager ones;
only the milliseconds are less, by the planner's assumption.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from json import dumps
from typing import Any

import fire

from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.ds_values import DsConfig
from dino_ds.config.loading import change_recipe, load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import estimate_memory
from dino_ds.costs.step_costs import Part, StepCosts, count_parameters, mean_costs, model_flops, student_facts
from dino_ds.planning.gpus import GPUS
from dino_ds.planning.measure.tables import markdown_table
from dino_ds.planning.speed import ASSUMPTIONS, Cluster, estimate_step

_DS = "ds_configs/zero1_bf16.json"
_CARDS = {"h100": "h100-80g", "h200": "h200-141g"}
_LAUNCHES_OF_GROUP = 7
"""Operators of DeepSpeed's step for each parameter group; counted on a CPU, as in tests/cuda/test_engine.py."""
_LAUNCHES_OF_EMA = 2
_CAST_BYTES = 6
"""Bytes that move where a weight is cast from FP32."""

Counts = dict[str, tuple[float, float]]
"""Launches and gigabytes by part."""


def main(config: str, images: int, compile: bool = False, json: bool = False) -> None:
    """A table of all parts, or with `json` one line."""
    found = count(load_recipe(config, {}), images, compile)
    print(dumps(found) if json else page(config, images, found))


def count(recipe: Recipe, images: int, compiled: bool = False) -> dict[str, Any]:
    """What `main` prints, in plain JSON."""
    ds = load_ds_config(_DS, {"dino_ds.compile": "default"} if compiled else {})
    recipe = change_recipe(recipe, {"data.global_batch": str(images)})
    config = resolve_ds_config(ds, _DS, images, 1, True, count_parameters(recipe))
    costs = mean_costs(recipe, config, on_gpu=True)
    counts = _counts(recipe, config, costs)
    times = {
        short: estimate_step(recipe, config, Cluster(GPUS[card], 1, 1, GPUS[card].network)).seconds
        for short, card in _CARDS.items()
    }
    return {
        "launches": {name: round(launches) for name, (launches, _) in counts.items()},
        "gigabytes": {name: round(gigabytes, 2) for name, (_, gigabytes) in counts.items()},
        "executed_tflop": round(costs.sum("flops") / 1e12, 2),
        "credited_tflop": round(sum(model_flops(recipe).values()) * images / 1e12, 2),
        "peak_gib": round(estimate_memory(recipe, config, 1, on_gpu=True).gib, 2),
        "milliseconds": {name: round(1000 * seconds, 1) for name, seconds in times.items()},
    }


def _counts(recipe: Recipe, config: DsConfig, costs: StepCosts) -> Counts:
    facts, weights = student_facts(recipe), count_parameters(recipe)
    parts = costs.parts
    counts = {name: _sum([parts[name]] if name in parts else []) for name in ("targets", "student", "loss", "backward")}
    teacher = _sum(part for name, part in parts.items() if name.startswith("teacher"))
    ema = _LAUNCHES_OF_EMA, ASSUMPTIONS["ema_bytes"] * weights / 1e9
    if config.keeps_teacher_copy(True, weights):  # the rehearsed teacher casts its matrices at each use
        cast = _CAST_BYTES * sum(facts.sizes[name] for name in facts.cast) / 1e9
        teacher = teacher[0] - len(facts.cast), teacher[1] - cast
        ema = ema[0] + math.ceil(len(facts.cast) / 100), ema[1] + cast
    return {
        "teacher": teacher,
        **counts,
        "optimizer": (_LAUNCHES_OF_GROUP * len(facts.groups), ASSUMPTIONS["optimizer_bytes"] * weights / 1e9),
        "ema": ema,
        "prototypes": _sum(costs.prototypes.values()),
    }


def _sum(parts: Iterable[Part]) -> tuple[float, float]:
    found = list(parts)
    moved = sum(part.moved + part.moved_by_products for part in found)
    return sum(part.launches for part in found), moved / 1e9


def page(config: str, images: int, found: dict[str, Any]) -> str:
    """Markdown of what `count` found."""
    names = [name for name in found["launches"] if name != "prototypes"]
    rows = [(name, f"{found['launches'][name]:,}", f"{found['gigabytes'][name]:.1f}") for name in names]
    launches, gigabytes = (sum(found[of][name] for name in names) for of in ("launches", "gigabytes"))
    rows.append(("all", f"{launches:,}", f"{gigabytes:.1f}"))
    rows.append(("of it prototypes", f"{found['launches']['prototypes']:,}", f"{found['gigabytes']['prototypes']:.1f}"))
    times = ", ".join(f"{name} {value:.0f} ms" for name, value in found["milliseconds"].items())
    return "\n".join(
        [
            f"{config}, {images} images, bf16, ZeRO 1, one GPU: estimated, no GPU",
            "",
            markdown_table(("part", "launches", "GB"), rows),
            "",
            f"{found['executed_tflop']} TFLOP executed, {found['credited_tflop']} credited, {found['peak_gib']} GiB, "
            + times,
        ]
    )


if __name__ == "__main__":
    fire.Fire(main)

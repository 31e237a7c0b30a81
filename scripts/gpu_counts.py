"""Launches, traffic and FLOPs of a step on one GPU, without one: `python -m scripts.gpu_counts --config C --images N`.

The step is rehearsed in bf16 at ZeRO 1. Launches are operators, weighed by the kernels that they start; a function that
torch.compile fuses counts as Inductor's kernels, which tests compare. Gigabytes are what operators read and write,
products too, each argument and each result once; blocks are eager. DeepSpeed's part, the optimizer, follows from the
number of parameter groups.
"""

from __future__ import annotations

import math
from json import dumps
from typing import Any

import fire

from dino_ds.basics.formatting import markdown_table
from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.ds_schema import DsConfig
from dino_ds.config.loading import change_recipe, load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import estimate_memory
from dino_ds.costs.step_costs import count_parameters, model_flops, student_facts
from scripts.counting import Counts, count_step

_DS = "ds_configs/zero1_bf16.json"
_LAUNCHES_OF_GROUP, _LAUNCHES_OF_NORM = 6, 18
"""Operators of DeepSpeed's step for each parameter group, and once; counted on a CPU."""
_LAUNCHES_OF_EMA = 2
_OPTIMIZER_BYTES, _EMA_BYTES = 30, 12
"""Bytes of a weight that AdamW and the teacher's average read and write."""
_CAST_BYTES = 6
"""Bytes that move where a weight is cast from FP32."""
_PARTS = ("targets", "student", "loss", "backward")


def main(config: str, images: int, json: bool = False) -> None:
    """A table of all parts, or with `json` one line."""
    found = count(load_recipe(config, {}), images)
    print(dumps(found) if json else page(config, images, found))


def count(recipe: Recipe, images: int) -> dict[str, Any]:
    """What `main` prints, in plain JSON."""
    recipe = change_recipe(recipe, {"data.global_batch": str(images)})
    config = resolve_ds_config(load_ds_config(_DS, {}), _DS, images, 1, True, count_parameters(recipe))
    counts = _counts(recipe, config)
    return {
        "launches": {name: round(part.launches) for name, part in counts.items()},
        "gigabytes": {name: round(part.moved / 1e9, 2) for name, part in counts.items()},
        "executed_tflop": round(sum(part.flops for name, part in counts.items() if name != "prototypes") / 1e12, 2),
        "credited_tflop": round(sum(model_flops(recipe).values()) * images / 1e12, 2),
        "peak_gib": round(estimate_memory(recipe, config, 1, on_gpu=True).gib, 2),
    }


def _counts(recipe: Recipe, config: DsConfig) -> dict[str, Counts]:
    """Counts by part, in the mean over the steps of all resolutions."""
    facts, weights = student_facts(recipe), count_parameters(recipe)
    found = {name: Counts() for name in ("teacher", *_PARTS, "optimizer", "ema", "prototypes")}
    for resolution in recipe.resolutions:
        step = count_step(recipe, config, recipe.groups_of(resolution))
        for name, part in (*step.parts.items(), ("prototypes", step.prototypes)):
            of = "teacher" if name.startswith("teacher") else name
            found[of].add(*(resolution.share * number for number in (part.launches, part.moved, part.flops)))
    found["optimizer"].add(_LAUNCHES_OF_NORM + _LAUNCHES_OF_GROUP * len(facts.groups), _OPTIMIZER_BYTES * weights)
    found["ema"].add(_LAUNCHES_OF_EMA, _EMA_BYTES * weights)
    if config.keeps_teacher_copy(True, weights):  # the rehearsed teacher casts its matrices at each use
        cast = _CAST_BYTES * sum(facts.sizes[name] for name in facts.cast)
        biases = sum(name.endswith("attn.q_bias") for name in facts.sizes)  # concatenated and cast at each use
        found["teacher"].add(-len(facts.cast) - 2 * biases, -cast)
        found["ema"].add(math.ceil(len(facts.cast) / 100), cast)
    return found


def page(config: str, images: int, found: dict[str, Any]) -> str:
    """Markdown of what `count` found."""
    names = [name for name in found["launches"] if name != "prototypes"]
    rows = [(name, f"{found['launches'][name]:,}", f"{found['gigabytes'][name]:.1f}") for name in names]
    launches, gigabytes = (sum(found[of][name] for name in names) for of in ("launches", "gigabytes"))
    rows.append(("all", f"{launches:,}", f"{gigabytes:.1f}"))
    rows.append(("of it prototypes", f"{found['launches']['prototypes']:,}", f"{found['gigabytes']['prototypes']:.1f}"))
    return "\n".join(
        [
            f"{config}, {images} images, bf16, ZeRO 1, one GPU: estimated, no GPU",
            "",
            markdown_table(("part", "launches", "GB"), rows),
            "",
            f"{found['executed_tflop']} TFLOP executed, {found['credited_tflop']} credited, {found['peak_gib']} GiB",
        ]
    )


if __name__ == "__main__":
    fire.Fire(main)

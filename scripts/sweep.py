"""Which model trains on which cards at which ZeRO stage, and with how many images at a time.

`python -m scripts.sweep --gpus 8 --out sweep` writes plan.json, plan.md and plan.png, the picture of
docs/notes/scaling.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fire

from dino_ds.basics.formatting import markdown_table
from dino_ds.config.crops import describe_crops
from dino_ds.config.loading import change_recipe, load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.step_costs import count_parameters
from dino_ds.models.specs.backbones import BACKBONES as KNOWN
from dino_ds.planning.fit import Shape, ds_of, largest_micro_batch
from dino_ds.planning.host import GPUS
from dino_ds.report.draw import INK
from scripts.results import write_result

BACKBONES = (
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "vit_large_patch16_224",
    "vit_huge_patch14_224",
    "vit_giant_patch14_dinov2",
    "vit_gigantic_patch14_224",
    "vit_3b_patch14_webssl",
    "vit_7b_patch16_reg4",
)
PLACES = {"1": (1, ""), "2": (2, ""), "3": (3, ""), "3+host": (3, "optimizer and weights")}
CARDS = (8, 12, 16, 24, 32, 40, 48, 80, 141)
_PATH = "the sweep"
_RAMPS = {"fits": ("#cfe8d5", "#2a9461"), "fits with activation checkpointing": ("#f6e3c4", "#dd8a2c")}
"""From the smallest micro-batch to the largest."""


def main(out: str, gpus: int = 8, config: str | None = None) -> None:
    """The recipe `config` (default: the schema's) with each backbone on `gpus` GPUs."""
    result = sweep(load_recipe(config, {}), gpus)
    write_result(Path(out) / "plan", result, sweep_page(result), draw_sweep(result))


def card_sizes() -> dict[int, float]:
    """GB on the box -> GiB of the smallest such card."""
    boxes = [(int(name.rsplit("-", 1)[1].removesuffix("g")), gpu.memory_gib) for name, gpu in GPUS.items()]
    return {size: min(gib for box, gib in boxes if box == size) for size in CARDS}


def sweep(recipe: Recipe, world_size: int) -> dict[str, Any]:
    """The recipe with each of BACKBONES, in 16 bits; the largest micro-batches, 0 for none."""
    cells = []
    for backbone in BACKBONES:
        changed = _with_backbone(recipe, backbone)
        for box, limit in card_sizes().items():
            for place, (stage, offload) in PLACES.items():
                plain, checked = (
                    largest_micro_batch(changed, ds_of(Shape(stage, offload, on), True), _PATH, world_size, limit)
                    for on in (False, True)
                )
                cells.append(
                    {
                        "backbone": backbone,
                        "weights": count_parameters(changed),
                        "card_gb": box,
                        "limit_gib": limit,
                        "place": place,
                        "largest": plain,
                        "largest_with_checkpointing": checked,
                    }
                )
    return {"gpus": world_size, "crops": describe_crops(recipe.groups), "cells": cells}


def _with_backbone(recipe: Recipe, backbone: str) -> Recipe:
    """`recipe` with this backbone, and crop sizes rounded to multiples of its patch: 96 pixels become 98 for 14."""
    patch = KNOWN[backbone].stride if backbone in KNOWN else 1
    crops = {"global_size": recipe.crops.global_size, "local_size": recipe.crops.local_size}
    sizes = {f"crops.{name}": str(max(1, round(size / patch)) * patch) for name, size in crops.items()}
    return change_recipe(recipe, {"model.backbone": backbone, **sizes})


def sweep_page(result: dict[str, Any]) -> str:
    """A table with a row for each model and place."""
    boxes = list(dict.fromkeys(cell["card_gb"] for cell in result["cells"]))
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for cell in result["cells"]:
        rows.setdefault((cell["backbone"], cell["place"]), {})[cell["card_gb"]] = cell_text(cell)
    table = markdown_table(
        ("", "ZeRO", *(f"{box} GB" for box in boxes)),
        [(name, place, *(found[box] for box in boxes)) for (name, place), found in rows.items()],
    )
    return (
        f"Largest micro-batch on each of {result['gpus']} GPU(s), crops {result['crops']}, bf16 or fp16; "
        "c: only with activation checkpointing; 3+host: optimizer and weights in host memory.\n\n"
        f"{table}"
    )


def cell_text(cell: dict[str, Any]) -> str:
    """The largest micro-batch, with a c if it needs checkpointing, or a dash."""
    if cell["largest"]:
        return str(cell["largest"])
    return f"c{cell['largest_with_checkpointing']}" if cell["largest_with_checkpointing"] else "-"


def draw_sweep(result: dict[str, Any]) -> Any:
    """A matplotlib Figure: models down, cards and stages across, largest micro-batches written into the cells."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    cells = result["cells"]
    models = list(dict.fromkeys((cell["backbone"], cell["weights"]) for cell in cells))
    boxes = list(dict.fromkeys(cell["card_gb"] for cell in cells))
    columns = [(box, place) for box in boxes for place in PLACES]
    figure = Figure(figsize=(0.38 * len(columns) + 2.6, 0.42 * len(models) + 2.3), layout="constrained")
    axes = figure.subplots(subplot_kw={"xlim": (-0.5, len(columns) - 0.5), "ylim": (len(models) - 0.5, -0.5)})
    ramps = [LinearSegmentedColormap.from_list("", ends) for ends in _RAMPS.values()]
    norm, counts = LogNorm(1, 2048), [0, 0, 0]
    for cell in cells:
        column = columns.index((cell["card_gb"], cell["place"]))
        row = models.index((cell["backbone"], cell["weights"]))
        size = cell["largest"] or cell["largest_with_checkpointing"]
        kind = 0 if cell["largest"] else 1 if size else 2
        counts[kind] += 1
        color, ink = (ramps[kind](norm(size)), "#222222") if size else ("none", INK)
        axes.add_patch(Rectangle((column - 0.47, row - 0.45), 0.94, 0.9, color=color, linewidth=0))
        text = cell_text(cell).removeprefix("c")
        axes.text(column, row, text, ha="center", va="center", fontsize=9, color=ink)
    axes.set_yticks(range(len(models)), [f"{name}\n{weights / 1e6:,.0f} M weights" for name, weights in models])
    axes.set_xticks(range(len(columns)), [place for _, place in columns], rotation=90)
    axes.tick_params(length=0, labelsize=9)
    for i, box in enumerate(boxes):
        middle = i * len(PLACES) + (len(PLACES) - 1) / 2
        axes.text(middle, -0.6, f"{box} GB", ha="center", va="bottom", fontsize=11)
        if i:
            axes.axvline(i * len(PLACES) - 0.5, color=INK, linewidth=0.8)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("ZeRO stage; 3+host: optimizer and weights in host memory", fontsize=10)
    shown = f"{len(models)} networks on {result['gpus']} GPUs of {len(boxes)} sizes at {len(PLACES)} stages"
    title = f"Largest micro-batch of a GPU, predicted: {shown}, crops {result['crops']}, 16 bits"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    names = (*_RAMPS, "does not fit")
    shades: list[Any] = [*(ramp(0.5) for ramp in ramps), "none"]
    patches = [Patch(facecolor=shade, edgecolor=INK) for shade in shades]
    labels = [f"{name}: {count} of {len(cells)}" for name, count in zip(names, counts, strict=True)]
    figure.legend(patches, labels, loc="outside lower center", ncols=3, fontsize=10, frameon=False)
    return figure


if __name__ == "__main__":
    fire.Fire(main)

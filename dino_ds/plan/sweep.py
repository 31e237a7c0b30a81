"""`dino-ds plan --sweep`: which model trains on which cards at which ZeRO stage, and with how many images at a time."""

from __future__ import annotations

from typing import Any

from dino_ds.config.crops import describe_crops
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import count_parameters
from dino_ds.measure.tables import markdown_table
from dino_ds.plan.backbones import with_backbone
from dino_ds.plan.fit import largest_micro_batch
from dino_ds.plan.gpus import GPUS
from dino_ds.plan.recommend import Shape, ds_of

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


def card_sizes() -> dict[int, float]:
    """GB on the box -> GiB of the smallest such card."""
    boxes = [(int(name.rsplit("-", 1)[1].removesuffix("g")), gpu.memory_gib) for name, gpu in GPUS.items()]
    return {size: min(gib for box, gib in boxes if box == size) for size in CARDS}


def sweep(recipe: Recipe, world_size: int) -> dict[str, Any]:
    """The recipe with each of BACKBONES, in 16 bits; the largest micro-batches, 0 for none."""
    cells = []
    for backbone in BACKBONES:
        changed = with_backbone(recipe, backbone)
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
    return {"gpus": world_size, "crops": describe_crops(recipe.crops.groups), "cells": cells}


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

"""ds configs by GPU tier: one of each kind (CASES), by the planner's rule; `dino-ds plan --write` makes others.

`make tiers` (`python -m scripts.tiers`) rewrites ds_configs/tiers/ and the tables of ds_configs/tiers/README.md and
docs/notes/scaling.md.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dino_ds.config.ds_config import CHECKOUT
from dino_ds.config.ds_schema import DsConfig
from dino_ds.config.loading import change_recipe, load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import GIB, Memory
from dino_ds.costs.step_costs import count_parameters
from dino_ds.errors import ConfigError
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.planning.fit import FILLED, GPUS, SHAPES, Cluster, Gpu, Shape, ds_of, fit, recommend

FOLDER = CHECKOUT / "ds_configs" / "tiers"
README, SCALING = FOLDER / "README.md", CHECKOUT / "docs" / "notes" / "scaling.md"
# The card of each tier with the least memory that torch finds.
CARDS = {
    "8gb": "rtx4060-8g",
    "12gb": "rtx5070-12g",
    "16gb": "rtx4080-16g",
    "t4_16gb": "t4-16g",
    "v100_16gb": "v100-16g",
    "24gb": "a10-24g",
    "v100_32gb": "v100-32g",
    "40gb": "a100-40g",
    "80gb": "a100-80g",
    "141gb": "h200-141g",
}
_BEGIN, _END = "<!-- made by: make tiers -->", "<!-- end of what make tiers makes -->"


@dataclass(frozen=True)
class Case:
    """`gpus` cards of a tier (CARDS) in each of `nodes`, and the recipe that they train, `stage` laid over it.

    On several nodes the weights are sharded, with a second copy of the shards in each node (ZeRO++'s hpZ), so that the
    backward pass gathers them inside it. `quantized`: ZeRO++'s other two, which change the numbers. `clipping`: the
    largest norm of gradients.
    """

    tier: str
    recipe: str
    gpus: int = 1
    nodes: int = 1
    quantized: bool = False
    stage: str | None = None
    clipping: float = 3.0

    def load(self) -> Recipe:
        recipe = load_recipe(self.recipe, {})
        return recipe if self.stage is None else change_recipe(recipe, {}, self.stage)

    @property
    def card(self) -> Gpu:
        return GPUS[CARDS[self.tier]]

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes


CASES = [
    # One card, from 8 GB on.
    Case("8gb", "vits16"),
    Case("8gb", "vitl16"),
    Case("12gb", "vitb16"),
    Case("16gb", "resnet50"),
    Case("24gb", "vitl16"),
    Case("24gb", "vitg14"),
    # A node of several: without bf16, with small cards, and with large ones.
    Case("t4_16gb", "vits16", 4),
    Case("t4_16gb", "vitb16", 4),
    Case("v100_32gb", "vitl16", 8),
    Case("24gb", "resnet50", 8),
    Case("24gb", "vitl16", 8),
    Case("24gb", "vit3b14", 8),
    Case("24gb", "vit7b16", 8),
    Case("40gb", "vitb16", 8),
    Case("40gb", "vit7b16", 8),
    Case("80gb", "dinov2_vitl14", 8),
    Case("80gb", "dinov3_vit7b16", 8, stage="dinov3_gram", clipping=30.0),
    Case("141gb", "dinov3_vit7b16", 8, clipping=30.0),
    # Several nodes.
    Case("40gb", "dinov3_vit7b16", 8, nodes=32, clipping=30.0),
    Case("40gb", "dinov3_vit7b16", 8, nodes=32, stage="dinov3_gram", clipping=30.0),
    Case("80gb", "vit7b16", 8, nodes=8),
    Case("80gb", "vit7b16", 8, nodes=8, quantized=True),
    Case("80gb", "dinov3_vit7b16", 8, nodes=8, stage="dinov3_gram", clipping=30.0),
]


@dataclass(frozen=True)
class TierConfig:
    """The config of a case: `ds` is the content of the file `name`, and it needs `memory` on the case's GPUs."""

    name: str
    ds: dict[str, Any]
    config: DsConfig
    memory: Memory


Planned = list[tuple[Case, TierConfig | None]]
"""Each case and its config, or None where nothing fits."""


def plan_all() -> Planned:
    """The config of each case."""
    return [(case, plan_case(case)) for case in CASES]


def plan_case(case: Case) -> TierConfig | None:
    """The config of a case by the planner's rule; None where nothing fits."""
    recipe, cluster = case.load(), Cluster(case.card, case.gpus, case.nodes)
    shapes = SHAPES if case.nodes == 1 else [Shape(3, "", False), Shape(3, "", True)]
    make_ds = functools.partial(_ds_json, case, recipe)
    try:
        shape, ds, config, memory = recommend(recipe, cluster, FILLED * case.card.memory_gib, shapes, make_ds)
    except ConfigError:
        return None
    return TierConfig(_name(case, shape), ds, config, memory)


def _name(case: Case, shape: Shape) -> str:
    stage = [] if case.stage is None else [case.stage.rpartition("_")[2]]
    parts = [
        case.tier,
        f"{case.ranks}gpu",
        case.recipe,
        *stage,
        f"zero{shape.stage}",
        "bf16" if case.card.bf16 else "fp16",
    ]
    parts += ["checkpointing"] * shape.checkpointing + ["offload"] * (shape.offload == "optimizer")
    parts += ["offload_all"] * (shape.offload == "optimizer and weights")
    parts += ["zeropp" if case.quantized else "hpz"] * (case.nodes > 1)
    return "_".join(parts)


def _ds_json(case: Case, recipe: Recipe, shape: Shape, bf16: bool) -> dict[str, Any]:
    """The planner's ds JSON, with more at stage 3 for large blocks, and on several nodes."""
    ds = {"train_micro_batch_size_per_gpu": "auto", **ds_of(shape, bf16)}
    zero, ds["gradient_clipping"] = ds["zero_optimization"], case.clipping
    if shape.stage == 3:
        block = _block_weights(recipe)
        # A block in use, the next one on its way, and the last one that is not yet released.
        live = max(zero["stage3_max_live_parameters"], _round_up(3 * block))
        zero["stage3_prefetch_bucket_size"] = max(zero["stage3_prefetch_bucket_size"], _round_up(block))
        zero |= {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": live}
    if case.nodes > 1:
        zero["zero_hpz_partition_size"] = case.gpus
    if case.quantized:
        zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    return ds


def _block_weights(recipe: Recipe) -> int:
    arch = recipe.model.spec()
    if not isinstance(arch, ViTSpec):
        return count_parameters(recipe) // arch.depth
    return 4 * arch.width**2 + arch.width * sum(arch.mlp_widths)


def _round_up(elements: int, to: int = 10_000_000) -> int:
    return -(-elements // to) * to


def file_text(config: TierConfig) -> str:
    return json.dumps(config.ds, indent=2) + "\n"


def table(planned: Planned) -> str:
    """Markdown: a line a case."""
    head = ["card", "GPUs", "recipe", "local crops", "micro-batch", "accumulation", "ZeRO", "precision", "recomputed"]
    head += ["on the host", "GiB predicted", "of", "file"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(_cells(case, found))} |" for case, found in planned)])


def _cells(case: Case, found: TierConfig | None) -> list[str]:
    recipe, memory = case.load(), f"{case.card.memory_gib:g}"
    gpus = f"{case.gpus} x {case.nodes} nodes" if case.nodes > 1 else str(case.gpus)
    name = case.recipe if case.stage is None else f"{case.recipe}, {case.stage}"
    start = [case.tier.replace("_", " "), gpus, name, str(recipe.crops.num_local)]
    if found is None:
        ds = _ds_json(case, recipe, Shape(3, "", True), case.card.bf16)
        parts = fit(recipe, ds, "", case.ranks, 1)[1].parts
        teachers, least = sum(n for part, n in parts.items() if "teacher" in part), sum(parts.values())
        why = f"{least / GIB:.1f} with one image, {teachers / GIB:.1f} of it teachers"
        return [*start, *["–"] * 6, "does not fit", memory, why]
    config, zero = found.config, found.ds["zero_optimization"]
    host = [word for key, word in (("optimizer", "optimizer"), ("param", "weights")) if f"offload_{key}" in zero]
    return [
        *start,
        str(config.micro_batch),
        str(config.accumulation),
        f"{config.stage}{' hpZ' if case.nodes > 1 else ''}{' qwZ qgZ' if case.quantized else ''}",
        config.precision,
        "all blocks" if config.checkpoint_blocks == "all" else "–",
        " and ".join(host) or "–",
        f"{found.memory.gib:.1f}",
        memory,
        f"`{found.name}`",
    ]


def parts_table(recipe_name: str, micro_batch: int, nodes: tuple[int, ...] = (1, 8, 32)) -> str:
    """Markdown: GiB on a GPU by part, on nodes of 8; ZeRO 3 with all blocks recomputed, hpZ on several nodes."""
    recipe, shape = load_recipe(recipe_name, {}), Shape(3, "", True)
    columns = []
    for n in nodes:
        case = Case("80gb", recipe_name, 8, n)
        _, memory = fit(recipe, _ds_json(case, recipe, shape, bf16=True), "", case.ranks, micro_batch)
        columns.append({name: size / GIB for name, size in memory.parts.items()})
    names = sorted({name for column in columns for name in column}, key=lambda name: -columns[0].get(name, 0.0))
    rows = [(name, [column.get(name, 0.0) for column in columns]) for name in names]
    rows.append(("**sum**", [sum(column.values()) for column in columns]))
    lines = [f"| GiB on a GPU | {' | '.join(f'{8 * n} GPUs' for n in nodes)} |", "|" + " --- |" * (1 + len(nodes))]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(f'{gib:.2f}' for gib in row)} |" for name, row in rows)])


def with_table(text: str, made: str) -> str:
    """`text` of a page with another table between its two marks."""
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}\n\n{made}\n\n{_END}{after}"


def pages(planned: Planned) -> dict[Path, str]:
    """The two pages with new tables."""
    tables = {README: table(planned), SCALING: parts_table("vit7b16", 8)}
    return {page: with_table(page.read_text(), made) for page, made in tables.items()}


def write() -> None:
    planned = plan_all()
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for _, found in planned:
        if found is not None:
            (FOLDER / f"{found.name}.json").write_text(file_text(found))
    for page, text in pages(planned).items():
        page.write_text(text)


if __name__ == "__main__":
    write()

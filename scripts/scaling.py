"""Weak scaling from 1 to 1024 GPUs at each ZeRO stage, simulated, beside published runs.

`python -m scripts.scaling --gpu h100-80g --config vit7b16 --out scaling` writes scaling.json, scaling.md and
scaling.png, the picture of docs/scaling.md.

Volumes are those of `costs/communication.py`, links the cards' own, everything assumed in `planning/speed.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fire

from dino_ds.config.loading import change_recipe, load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.errors import ConfigError
from dino_ds.planning.fit import fit_with
from dino_ds.planning.gpus import Gpu, find_gpu
from dino_ds.planning.measure.tables import markdown_table
from dino_ds.planning.recommend import Shape, ds_of
from dino_ds.planning.speed import ASSUMPTIONS, Cluster, estimate_step
from scripts.published import PUBLISHED, measured_share, simulate
from scripts.results import write_result

WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
STAGES = (1, 2, 3)
ETHERNET = 12.5
"""A node on 100 Gbit/s, beside the network that is sold with the cards; 10^9 bytes/s each way."""
_PATH = "the simulation"
_MOST, _ENOUGH = 64, 8
_COLOURS = {1: "#3b6ea5", 2: "#2f7d4f", 3: "#b3483a"}


def main(out: str, gpu: str, config: str | None = None, gpus: int = 8) -> None:
    """The recipe `config` on nodes of `gpus` cards of this kind."""
    card = find_gpu(gpu)
    result = simulate_scaling(load_recipe(config, {}), card, gpus, card.network)
    write_result(Path(out) / "scaling", result, scaling_page(result), draw_scaling(result))


def simulate_scaling(recipe: Recipe, gpu: Gpu, gpus_per_node: int, network: float) -> dict[str, Any]:
    """The recipe with the same images on every GPU, without accumulation. Raises ConfigError if nothing fits."""
    micro, checkpointing = _micro_batch(recipe, gpu)
    rows = []
    for world in WORLDS:
        for stage in STAGES:
            shape = Shape(stage, "", checkpointing)
            batch = change_recipe(recipe, {"data.global_batch": str(micro * world)})
            found = fit_with(batch, ds_of(shape, gpu.bf16), _PATH, world, gpu.memory_gib, micro)
            row: dict[str, Any] = {"gpus": world, "stage": stage, "fits": found.fits, "gib": found.memory.gib}
            for name, speed in (("as_sold", network), ("ethernet", ETHERNET)):
                cluster = Cluster(gpu, min(world, gpus_per_node), -(-world // gpus_per_node), speed)
                time = estimate_step(batch, found.config, cluster)
                alone = sum(time.parts.get(part, 0.0) for part in ("computation", "recomputation"))
                row[name] = {
                    "images_per_second": time.images_per_second,
                    "efficiency": alone / time.seconds,
                    "parts": time.parts,
                }
            rows.append(row)
    return {
        "backbone": recipe.model.backbone,
        "gpu": gpu.name,
        "gpus_per_node": gpus_per_node,
        "network_gbit": 8 * network,
        "micro_batch": micro,
        "checkpointing": checkpointing,
        "rows": rows,
        "published": [
            {
                "name": run.name,
                "measured": measured_share(run),
                "simulated": simulate(run),
            }
            for run in PUBLISHED
        ],
        "assumptions": {**ASSUMPTIONS, "matmul_share": gpu.matmul_share},
    }


def _micro_batch(recipe: Recipe, gpu: Gpu) -> tuple[int, bool]:
    """(images, with checkpointing): the most, in powers of 2, that ZeRO 3 has room for on 8 GPUs."""
    for checkpointing in (False, True):
        ds = ds_of(Shape(3, "", checkpointing), gpu.bf16)
        micro = _MOST
        while micro and not fit_with(recipe, ds, _PATH, 8, gpu.memory_gib, micro).fits:
            micro //= 2
        if micro >= _ENOUGH or (checkpointing and micro):
            return micro, checkpointing
    raise ConfigError(f"{recipe.model.backbone} does not fit {gpu.name} at ZeRO 3 on 8 GPUs: name a larger --gpu")


def scaling_page(result: dict[str, Any]) -> str:
    """Two tables: ours simulated, and the published runs beside their simulation."""
    rows = []
    for world in WORLDS:
        own = {row["stage"]: row for row in result["rows"] if row["gpus"] == world}
        cells = [
            f"{100 * own[stage][name]['efficiency']:.1f} %" + ("" if own[stage]["fits"] else " (does not fit)")
            for name in ("as_sold", "ethernet")
            for stage in STAGES
        ]
        rows.append((str(world), *cells, f"{own[3]['as_sold']['images_per_second']:.0f}"))
    header = [f"ZeRO {stage}{where}" for where in ("", ", 100 Gbit/s") for stage in STAGES]
    ours = markdown_table(("GPUs", *header, "images/s at ZeRO 3"), rows)
    others = [
        (run["name"], str(gpus), f"{100 * share:.1f} %", f"{100 * run['simulated'][gpus]:.1f} %")
        for run in result["published"]
        for gpus, share in run["measured"].items()
        if gpus != min(run["measured"])
    ]
    theirs = markdown_table(("published", "GPUs", "rate of the smallest number", "simulated"), others)
    checkpointing = "with" if result["checkpointing"] else "without"
    return (
        f"Simulated, not measured: {result['backbone']}, {result['micro_batch']} images on each {result['gpu']}, "
        f"{checkpointing} checkpointing, {result['gpus_per_node']} to a node, {result['network_gbit']:.0f} Gbit/s a "
        "node, bf16. The part of the step that computes the model:\n\n"
        f"{ours}\n\n{theirs}"
    )


def draw_scaling(result: dict[str, Any]) -> Any:
    """A matplotlib Figure: our simulation, and published runs beside theirs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_ours(left, result)
    _draw_published(right, result["published"])
    ours = {row["gpus"] for row in result["rows"]}
    theirs = {world for run in result["published"] for world in run["measured"]}
    for axes, worlds in ((left, ours), (right, theirs)):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(worlds), [str(world) for world in sorted(worlds)])
        axes.set_xlabel("GPUs")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_ours(axes: Any, result: dict[str, Any]) -> None:
    for stage, colour in _COLOURS.items():
        rows = [row for row in result["rows"] if row["stage"] == stage]
        worlds = [row["gpus"] for row in rows]
        networks = {"as_sold": ("-", f"{result['network_gbit']:.0f}"), "ethernet": ("--", "100")}
        for name, (line, gbit) in networks.items():
            shares = [100 * row[name]["efficiency"] for row in rows]
            axes.plot(worlds, shares, line, color=colour, label=f"ZeRO {stage}, {gbit} Gbit/s a node")
        full = [(row["gpus"], 100 * row["as_sold"]["efficiency"]) for row in rows if row["fits"]]
        axes.plot(*zip(*full, strict=True), "o", color=colour, markersize=4) if full else None
    axes.set_ylim(0, 102)
    axes.set_ylabel("part of the step that computes, %")
    axes.set_title(
        f"Simulated: {result['backbone']}, {result['micro_batch']} images on each {result['gpu']}\n"
        "weak scaling; dots: fits its memory",
        fontsize=10,
    )
    axes.legend(fontsize=8)


def _draw_published(axes: Any, runs: list[dict[str, Any]]) -> None:
    for i, run in enumerate(runs):
        colour = f"C{i}"
        worlds = list(run["measured"])
        axes.plot(
            worlds, [100 * run["measured"][w] for w in worlds], "o-", color=colour, label=run["name"], markersize=4
        )
        axes.plot(worlds, [100 * run["simulated"][w] for w in worlds], ":", color=colour)
    axes.set_ylim(90, 101)
    axes.set_ylabel("rate of a GPU, % of that on the fewest")
    axes.set_title("Published FSDP runs (lines) and the same model's simulation (dotted)", fontsize=10)
    axes.legend(fontsize=8)


if __name__ == "__main__":
    fire.Fire(main)

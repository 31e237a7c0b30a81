"""`dino-ds plan --scaling`: weak scaling from 1 to 1024 GPUs at each ZeRO stage, simulated.

Volumes are those of `dino_ds.costs.communication`, links the cards' own, everything assumed in `dino_ds.plan.speed`.
"""

from __future__ import annotations

from typing import Any

from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.errors import ConfigError
from dino_ds.measure.tables import markdown_table
from dino_ds.plan.fit import fit_with
from dino_ds.plan.gpus import Gpu
from dino_ds.plan.published import PUBLISHED, measured_share, simulate
from dino_ds.plan.recommend import Shape, ds_of
from dino_ds.plan.speed import ASSUMPTIONS, Cluster, estimate_step

WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
STAGES = (1, 2, 3)
ETHERNET = 12.5
"""A node on 100 Gbit/s, beside the network that is sold with the cards; 10^9 bytes/s each way."""
_PATH = "the simulation"
_MOST, _ENOUGH = 64, 8


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

"""`dino-ds plan`: whether a training fits on given GPUs, and which ds config to take. Needs no GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dino_ds.basics.formatting import markdown_table
from dino_ds.config.crops import describe_crops
from dino_ds.config.ds_schema import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import GIB
from dino_ds.costs.step_costs import count_parameters, mean_flops, not_counted, step_costs, student_facts
from dino_ds.errors import ConfigError
from dino_ds.method.specs.own import accumulation_notes
from dino_ds.models.specs.backbones import ALL, ViTSpec
from dino_ds.options.commands import PlanOptions
from dino_ds.options.definition import Result
from dino_ds.planning import fit

_WORKSPACES = "cuDNN's workspaces are not counted, which networks with convolutions need beside their tensors"
_IMAGES = 1_000_000
"""Images whose hours are estimated if the recipe's length is in epochs: the planner does not see the dataset."""


def run(options: PlanOptions, *, recipe: Recipe, ds: dict[str, Any] | None, ds_path: str | None) -> Result:
    """Return the result of `plan`, and its page."""
    result = plan(options, recipe=recipe, ds=ds, ds_path=ds_path)
    return Result(result, page(result))


def plan(options: PlanOptions, *, recipe: Recipe, ds: dict[str, Any] | None, ds_path: str | None) -> dict[str, Any]:
    """Describe this ds JSON, or recommend one if it is None. Raises ConfigError."""
    if ds is not None and options.write:
        raise ConfigError("--write is for the recommended config: leave --ds_config out")
    if options.write:
        fit.check_new(Path(options.write))
    cluster = fit.Cluster(fit.named_gpu(options.gpu, options.memory_gib), options.gpus, options.nodes)
    batch, ranks = recipe.data.global_batch, cluster.world_size
    if batch % ranks:
        nearest = max(1, round(batch / ranks)) * ranks
        raise ConfigError(f"global batch {batch} is not a multiple of {ranks} GPUs: add --data.global_batch {nearest}")
    result = _recommended(recipe, cluster) if ds is None or ds_path is None else _given(recipe, ds, ds_path, cluster)
    if recipe.stage_start is not None and "backbone" not in recipe.model.model_fields_set:
        line = f"a stage alone: planned with {recipe.model.backbone}; --config RECIPE,STAGE takes its backbone"
        result["warnings"].append(line)
    if options.write:
        fit.write_ds(result["ds_config"], Path(options.write))
    result["written"] = options.write
    return result


def _recommended(recipe: Recipe, cluster: fit.Cluster) -> dict[str, Any]:
    best = fit.recommend(recipe, cluster, cluster.gpu.memory_gib)
    result = describe(recipe, best.ds, fit.RECOMMENDED, cluster, best.fit)
    config = best.fit.config
    verdict = (
        f"recommended: {best.shape}, {config.precision}, micro-batch {config.micro_batch}: {best.fit.memory.gib:.1f} "
        f"of {best.fit.limit_gib:g} GiB; largest micro-batch that fits {result['max_micro_batch']}"
    )
    return result | {"verdict": verdict, "warnings": []}


def _given(recipe: Recipe, ds: dict[str, Any], path: str, cluster: fit.Cluster) -> dict[str, Any]:
    as_given = fit.fit(recipe, ds, path, cluster.world_size, cluster.gpu.memory_gib)
    result = describe(recipe, ds, path, cluster, as_given)
    warnings = []
    if ds.get("fp16", {}).get("enabled") and cluster.gpu.bf16:
        warnings.append("fp16 needs a loss scale and skips steps: these GPUs have bf16, which needs neither")
    if ds.get("bf16", {}).get("enabled") and not cluster.gpu.bf16:
        warnings.append(f"{cluster.gpu.name} has no bf16 units: use fp16")
    return result | {"verdict": _verdict(recipe, cluster, as_given, result), "warnings": warnings}


def _verdict(recipe: Recipe, cluster: fit.Cluster, as_given: fit.Fit, result: Mapping[str, Any]) -> str:
    """Answer in one line: it fits, it fits with a change, or it does not fit."""
    needs = f"{as_given.memory.gib:.1f} of {as_given.limit_gib:g} GiB"
    largest = result["max_micro_batch_of_global_batch"]
    if as_given.fits:
        return f"fits: {needs}; largest micro-batch that fits {result['max_micro_batch']}"
    if largest:
        accumulation = recipe.data.global_batch // cluster.world_size // largest
        return f"fits with micro-batch {largest}, accumulation {accumulation}: as it is it needs {needs}"
    try:
        other = fit.recommend(recipe, cluster, as_given.limit_gib)
    except ConfigError as error:
        return f"does not fit: it needs {needs}; {error}"
    return f"does not fit: it needs {needs}; {other.shape} with micro-batch {other.fit.config.micro_batch} would"


def describe(recipe: Recipe, ds: Mapping[str, Any], path: str, cluster: fit.Cluster, needed: fit.Fit) -> dict[str, Any]:
    """Return the result of `dino-ds plan` without the verdict, as plain values for JSON."""
    world, config, batch = cluster.world_size, needed.config, recipe.data.global_batch
    largest = fit.largest_micro_batch(recipe, ds, path, world, cluster.gpu.memory_gib)
    notes = accumulation_notes(recipe, config.micro_batch, config.accumulation, world)
    flops = sum(mean_flops(recipe, config, on_gpu=True).values()) * config.accumulation
    flops += student_facts(recipe).optimizer_flops / world
    by_epochs = recipe.length.unit == "epochs"
    steps = -(-_IMAGES // batch) if by_epochs else recipe.length.in_steps(batch, 1)
    work = f"{_IMAGES:,} images" if by_epochs else f"length {recipe.length}"
    return {
        "fits": needed.fits,
        "backbone": recipe.model.backbone,
        "our_vit": isinstance(recipe.model.spec(), ViTSpec),
        "weights": count_parameters(recipe),
        "trained_weights": sum(student_facts(recipe).trained.values()),
        "trained": recipe.model.train,
        "crops": describe_crops(recipe.groups),
        "gpu": cluster.gpu.name,
        "gpus_per_node": cluster.gpus,
        "nodes": cluster.nodes,
        "limit_bytes": round(needed.limit_gib * GIB),
        "moment": needed.memory.moment,
        "bytes_per_gpu": needed.memory.parts,
        "activation_bytes": _activations(recipe, config),
        "bytes_per_node": fit.host_bytes(recipe, config, cluster.gpus, world),
        "checkpoint_bytes": fit.checkpoint_bytes(recipe),
        "global_batch": batch,
        "micro_batch": config.micro_batch,
        "accumulation": config.accumulation,
        "max_micro_batch": largest,
        "max_micro_batch_of_global_batch": max((n for n in fit.micro_batches(batch, world) if n <= largest), default=0),
        "flops_per_gpu": flops,
        "time": fit.describe_hours(cluster.gpu, flops * steps, work),
        "assumptions": {"fragmentation": fit.FRAGMENTATION},
        "ds_config": dict(ds),
        "ds_path": path,
        "notes": [*config.notes, *(text for texts in notes for text in texts), *not_counted(recipe)],
    }


def _activations(recipe: Recipe, config: DsConfig) -> dict[str, int]:
    """Return the bytes that autograd keeps for one micro-batch, without and with activation checkpointing."""
    without = dataclasses.replace(config, checkpoint_blocks=0)
    all_blocks = dataclasses.replace(without, checkpoint_blocks="all")
    variants = {"without_checkpointing": without, "with_checkpointing": all_blocks}
    return {name: round(step_costs(recipe, variant, True).saved) for name, variant in variants.items()}


def page(result: Mapping[str, Any]) -> str:
    """Format the result as text for people."""
    gpus = result["gpus_per_node"] * result["nodes"]
    total, limit = sum(result["bytes_per_gpu"].values()), result["limit_bytes"]
    nodes = f" in {result['nodes']} nodes" if result["nodes"] > 1 else ""
    batch = f"micro-batch {result['micro_batch']} x accumulation {result['accumulation']} x {gpus} GPU(s)"
    learning = f", {result['trained_weights'] / 1e6:.1f} M trained ({result['trained']} and heads)"
    weights = f"{result['weights'] / 1e6:.1f} M weights{learning if result['trained'] != ALL else ''}"
    activations = [f"{result['activation_bytes'][f'{word}_checkpointing'] / GIB:.2f}" for word in ("without", "with")]
    lines = [
        f"plan: {result['backbone']}, {weights}, crops {result['crops']}",
        f"on {gpus} x {result['gpu']}{nodes}, {limit / GIB:.1f} GiB each; {result['ds_path']}",
        f"global batch {result['global_batch']} = {batch}",
        "",
        f"{result['verdict']}",
        "",
        markdown_table(
            (f"a GPU at {result['moment']}", "GiB"),
            [*_sizes(result["bytes_per_gpu"]), ("sum", f"{total / GIB:.2f}")],
        ),
        "",
        f"activations without checkpointing {activations[0]} GiB, with {activations[1]}",
        f"a node's host memory {sum(result['bytes_per_node'].values()) / GIB:.1f} GiB: "
        + ", ".join(f"{name} {gib}" for name, gib in _sizes(result["bytes_per_node"])),
        f"a checkpoint {result['checkpoint_bytes'] / GIB:.2f} GiB",
        result["time"],
        *([] if result["our_vit"] else [f"note: {_WORKSPACES}"]),
        *[f"warning: {line}" for line in result["warnings"]],
        *[f"note: {line}" for line in result["notes"]],
    ]
    lines.append("note: measured on the machine itself, not predicted: dino-ds bench tune")
    if result["written"]:
        lines.append(f"written: {result['written']}")
    return "\n".join(lines)


def _sizes(parts: Mapping[str, int]) -> list[tuple[str, str]]:
    ordered = sorted(parts.items(), key=lambda entry: -entry[1])
    return [(name, f"{size / GIB:.2f}") for name, size in ordered]

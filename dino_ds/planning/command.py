"""`dino-ds plan`: whether a training fits on given GPUs, and which ds config to take. Needs no GPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dino_ds.basics.files import replace_file
from dino_ds.basics.formatting import markdown_table
from dino_ds.config.crops import describe_crops
from dino_ds.config.ds_schema import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import GIB, Memory
from dino_ds.costs.step_costs import count_parameters, mean_flops, not_counted, step_costs, student_facts
from dino_ds.errors import ConfigError
from dino_ds.method.specs.own import accumulation_notes
from dino_ds.models.specs.backbones import ALL, ViTSpec
from dino_ds.options.commands import PlanOptions
from dino_ds.options.definition import Result
from dino_ds.planning import fit

_IMAGES = 1_000_000  # number for which hours are estimated if the length is in epochs, as the dataset is not read


def run(options: PlanOptions, *, recipe: Recipe, ds: dict[str, Any] | None, ds_path: str | None) -> Result:
    """Describe this ds JSON, or recommend one if it is None. Raises ConfigError."""
    if ds is not None and options.write:
        raise ConfigError("--write is for the recommended config: leave --ds_config out")
    if options.write:
        fit.check_new(Path(options.write))
    cluster = fit.Cluster(fit.named_gpu(options.gpu, options.memory_gib), options.gpus, options.nodes)
    batch, ranks, limit = recipe.data.global_batch, cluster.world_size, cluster.gpu.memory_gib
    if batch % ranks:
        nearest = max(1, round(batch / ranks)) * ranks
        raise ConfigError(f"global batch {batch} is not a multiple of {ranks} GPUs: add --data.global_batch {nearest}")
    if ds is None or ds_path is None:
        shape, recommended, config, memory = fit.recommend(recipe, cluster, limit)
        result = _describe(recipe, recommended, fit.RECOMMENDED, cluster, config, memory)
        chosen = f"{shape}, {config.precision}, micro-batch {config.micro_batch}: {memory.gib:.1f} of {limit:g} GiB"
        verdict = f"recommended: {chosen}; largest micro-batch that fits {result['max_micro_batch']}"
        result |= {"verdict": verdict, "warnings": []}
    else:
        result = _describe(recipe, ds, ds_path, cluster, *fit.fit(recipe, ds, ds_path, ranks))
        warnings, bf16 = [], cluster.gpu.bf16
        if ds.get("fp16", {}).get("enabled") and bf16:
            warnings.append("fp16 needs a loss scale and skips steps: these GPUs have bf16, which needs neither")
        if ds.get("bf16", {}).get("enabled") and not bf16:
            warnings.append(f"{cluster.gpu.name} has no bf16 units: use fp16")
        result |= {"verdict": _verdict(recipe, cluster, result), "warnings": warnings}
    if recipe.stage_start is not None and "backbone" not in recipe.model.model_fields_set:
        line = f"a stage alone: planned with {recipe.model.backbone}; --config RECIPE,STAGE takes its backbone"
        result["warnings"].append(line)
    if options.write:
        replace_file(Path(options.write), json.dumps(result["ds_config"], indent=2) + "\n")
    result["written"] = options.write
    return Result(result, _page(result))


def _verdict(recipe: Recipe, cluster: fit.Cluster, result: Mapping[str, Any]) -> str:
    needs = f"{sum(result['bytes_per_gpu'].values()) / GIB:.1f} of {cluster.gpu.memory_gib:g} GiB"
    largest = result["max_micro_batch_of_global_batch"]
    if result["fits"]:
        return f"fits: {needs}; largest micro-batch that fits {result['max_micro_batch']}"
    if largest:
        accumulation = recipe.data.global_batch // cluster.world_size // largest
        return f"fits with micro-batch {largest}, accumulation {accumulation}: as it is it needs {needs}"
    try:
        shape, _, config, _ = fit.recommend(recipe, cluster, cluster.gpu.memory_gib)
    except ConfigError as error:
        return f"does not fit: it needs {needs}; {error}"
    return f"does not fit: it needs {needs}; {shape} with micro-batch {config.micro_batch} would"


def _describe(
    recipe: Recipe, ds: Mapping[str, Any], path: str, cluster: fit.Cluster, config: DsConfig, memory: Memory
) -> dict[str, Any]:
    world, batch, limit = cluster.world_size, recipe.data.global_batch, cluster.gpu.memory_gib
    largest = fit.largest_micro_batch(recipe, ds, path, world, limit)
    notes = accumulation_notes(recipe, config.micro_batch, config.accumulation, world)
    flops = sum(mean_flops(recipe, config, on_gpu=True).values()) * config.accumulation
    flops += student_facts(recipe).optimizer_flops / world
    by_epochs = recipe.length.unit == "epochs"
    steps = -(-_IMAGES // batch) if by_epochs else recipe.length.in_steps(batch, 1)
    work = f"{_IMAGES:,} images" if by_epochs else f"length {recipe.length}"
    blocks: dict[str, int | str] = {"without": 0, "with": "all"}
    kept = {name: dataclasses.replace(config, checkpoint_blocks=number) for name, number in blocks.items()}
    activations = {name: round(step_costs(recipe, other, on_gpu=True).saved) for name, other in kept.items()}
    fitting = [size for size in fit.micro_batches(batch, world) if size <= largest]
    result: dict[str, Any] = {"fits": memory.gib <= limit, "backbone": recipe.model.backbone}
    result |= {"our_vit": isinstance(recipe.model.spec(), ViTSpec), "weights": count_parameters(recipe)}
    result |= {"trained_weights": sum(student_facts(recipe).trained.values()), "trained": recipe.model.train}
    result |= {"crops": describe_crops(recipe.groups), "gpu": cluster.gpu.name, "gpus_per_node": cluster.gpus}
    result |= {"nodes": cluster.nodes, "limit_bytes": round(limit * GIB), "moment": memory.moment}
    result |= {"bytes_per_gpu": memory.parts}
    result |= {"activation_bytes": {f"{name}_checkpointing": size for name, size in activations.items()}}
    result |= {"bytes_per_node": fit.host_bytes(recipe, config, cluster.gpus, world)}
    result |= {"checkpoint_bytes": fit.checkpoint_bytes(recipe), "global_batch": batch}
    result |= {"micro_batch": config.micro_batch, "accumulation": config.accumulation, "max_micro_batch": largest}
    result |= {"max_micro_batch_of_global_batch": max(fitting, default=0), "flops_per_gpu": flops}
    result |= {"time": fit.describe_hours(cluster.gpu, flops * steps, work)}
    result |= {"assumptions": {"fragmentation": fit.FRAGMENTATION}, "ds_config": dict(ds), "ds_path": path}
    return result | {"notes": [*config.notes, *(text for texts in notes for text in texts), *not_counted(recipe)]}


def _page(result: Mapping[str, Any]) -> str:
    gpus = result["gpus_per_node"] * result["nodes"]
    total, limit = sum(result["bytes_per_gpu"].values()), result["limit_bytes"]
    nodes = f" in {result['nodes']} nodes" if result["nodes"] > 1 else ""
    batch = f"micro-batch {result['micro_batch']} x accumulation {result['accumulation']} x {gpus} GPU(s)"
    learning = f", {result['trained_weights'] / 1e6:.1f} M trained ({result['trained']} and heads)"
    weights = f"{result['weights'] / 1e6:.1f} M weights{learning if result['trained'] != ALL else ''}"
    activations = [f"{result['activation_bytes'][f'{word}_checkpointing'] / GIB:.2f}" for word in ("without", "with")]
    workspaces = "cuDNN's workspaces are not counted, which networks with convolutions need beside their tensors"
    rows = [*_sizes(result["bytes_per_gpu"]), ("sum", f"{total / GIB:.2f}")]
    host = ", ".join(f"{name} {gib}" for name, gib in _sizes(result["bytes_per_node"]))
    lines = [f"plan: {result['backbone']}, {weights}, crops {result['crops']}"]
    lines += [f"on {gpus} x {result['gpu']}{nodes}, {limit / GIB:.1f} GiB each; {result['ds_path']}"]
    lines += [f"global batch {result['global_batch']} = {batch}", "", result["verdict"], ""]
    lines += [markdown_table((f"a GPU at {result['moment']}", "GiB"), rows), ""]
    lines += [f"activations without checkpointing {activations[0]} GiB, with {activations[1]}"]
    lines += [f"a node's host memory {sum(result['bytes_per_node'].values()) / GIB:.1f} GiB: {host}"]
    lines += [f"a checkpoint {result['checkpoint_bytes'] / GIB:.2f} GiB", result["time"]]
    lines += [] if result["our_vit"] else [f"note: {workspaces}"]
    lines += [*(f"warning: {line}" for line in result["warnings"]), *(f"note: {line}" for line in result["notes"])]
    lines += ["note: measured on the machine itself, not predicted: dino-ds bench tune"]
    return "\n".join([*lines, *([f"written: {result['written']}"] if result["written"] else [])])


def _sizes(parts: Mapping[str, int]) -> list[tuple[str, str]]:
    ordered = sorted(parts.items(), key=lambda entry: -entry[1])
    return [(name, f"{size / GIB:.2f}") for name, size in ordered]

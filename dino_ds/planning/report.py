"""Reports what the planner found for one config: numbers for programs, a page for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dino_ds.basics.digits import short
from dino_ds.config.crops import describe_crops
from dino_ds.config.recipe import Recipe
from dino_ds.costs.communication import recipe_traffic
from dino_ds.costs.frozen_spec import not_counted
from dino_ds.costs.memory import GIB
from dino_ds.costs.step_costs import count_parameters, model_flops, step_costs, student_facts
from dino_ds.method.specs.of_recipe import accumulation_notes, teachers_of
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.models.specs.trained import ALL
from dino_ds.planning.fit import FRAGMENTATION, Fit, Setup, micro_batches
from dino_ds.planning.host import checkpoint_bytes, host_bytes
from dino_ds.planning.measure.tables import markdown_table
from dino_ds.planning.speed import ASSUMPTIONS, StepTime

_NO_FIGURES = (
    "no GPU figures were measured for this backbone: its FLOPs and bytes are those of its operators, which are taken "
    "to be as fast as matrix products and memory; cuDNN's workspaces are not counted"
)
_TOGGLE = "activation_checkpointing"


def describe(setup: Setup, found: Fit, time: StepTime) -> dict[str, Any]:
    """The result of `dino-ds plan`, but for its verdict: plain JSON, bytes and seconds."""
    recipe, cluster, config = setup.recipe, setup.cluster, found.config
    world, largest = cluster.world_size, setup.largest_micro_batch()
    traffic = recipe_traffic(recipe, config, world)
    about_terms = [
        text for texts in accumulation_notes(recipe, config.micro_batch, config.accumulation, world) for text in texts
    ]
    whole = [size for size in micro_batches(recipe.data.global_batch, world) if size <= largest]
    return {
        "fits": found.fits,
        "backbone": recipe.model.backbone,
        "our_vit": isinstance(recipe.model.spec(), ViTSpec),
        "weights": count_parameters(recipe),
        "trained_weights": sum(student_facts(recipe).trained.values()),
        "trained": recipe.model.train,
        "crops": describe_crops(recipe.groups),
        "gpu": cluster.gpu.name,
        "gpus_per_node": cluster.gpus,
        "nodes": cluster.nodes,
        "limit_bytes": round(found.limit_gib * GIB),
        "moment": found.memory.moment,
        "bytes_per_gpu": found.memory.parts,
        "activation_bytes": _activations(setup, config.micro_batch),
        "bytes_per_node": host_bytes(recipe, config, cluster.gpus, world),
        "checkpoint_bytes": checkpoint_bytes(recipe),
        "global_batch": recipe.data.global_batch,
        "micro_batch": config.micro_batch,
        "accumulation": config.accumulation,
        "max_micro_batch": largest,
        "max_micro_batch_of_global_batch": max(whole, default=0),
        "traffic": [
            {
                "name": one.name,
                "operation": one.operation,
                "payload_bytes": one.payload,
                "sent_bytes_per_gpu": one.sent,
                "calls": one.calls,
                "ranks": one.ranks,
                "during": one.during,
            }
            for one in traffic
        ],
        "flops_per_gpu": time.flops,
        "executed_flops_per_gpu": time.executed,
        "flops_share": _shares(recipe),
        "step_seconds": time.parts,
        "images_per_second": time.images_per_second,
        "mfu": time.mfu,
        "executed_mfu": time.executed_mfu,
        "assumptions": {**ASSUMPTIONS, "matmul_share": cluster.gpu.matmul_share, "fragmentation": FRAGMENTATION},
        "ds_config": dict(setup.ds),
        "ds_path": setup.path,
        "notes": [*config.notes, *about_terms, *not_counted(recipe)],
    }


def _shares(recipe: Recipe) -> dict[str, float]:
    """Share of a step's FLOPs spent in each network, and in making targets of what teachers give."""
    names = {one.name: one.title for one in teachers_of(recipe)}
    flops, found = model_flops(recipe), dict[str, float]()
    for part, n in flops.items():
        kind, _, teacher = part.partition(" ")
        name = names[teacher] if teacher else "targets" if kind == "targets" else "student"
        found[name] = found.get(name, 0.0) + n / sum(flops.values())
    return found


def _activations(setup: Setup, micro_batch: int) -> dict[str, int]:
    """The bytes that autograd keeps of one micro-batch without and with checkpointing."""
    without = {key: value for key, value in setup.ds.items() if key != _TOGGLE}
    variants = {"without_checkpointing": without, "with_checkpointing": {**without, _TOGGLE: {}}}
    configs = {name: setup.with_ds(ds).fit(micro_batch).config for name, ds in variants.items()}
    return {name: round(step_costs(setup.recipe, config, True).saved) for name, config in configs.items()}


def page(result: Mapping[str, Any]) -> str:
    """The result as text for people."""
    gpus = result["gpus_per_node"] * result["nodes"]
    total, limit = sum(result["bytes_per_gpu"].values()), result["limit_bytes"]
    nodes = f" in {result['nodes']} nodes" if result["nodes"] > 1 else ""
    batch = f"micro-batch {result['micro_batch']} x accumulation {result['accumulation']} x {gpus} GPU(s)"
    learning = f", {result['trained_weights'] / 1e6:.1f} M trained ({result['trained']} and heads)"
    weights = f"{result['weights'] / 1e6:.1f} M weights{learning if result['trained'] != ALL else ''}"
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
        _activation_line(result["activation_bytes"]),
        f"a node's host memory {sum(result['bytes_per_node'].values()) / GIB:.1f} GiB: "
        + ", ".join(f"{name} {gib}" for name, gib in _sizes(result["bytes_per_node"])),
        f"a checkpoint {result['checkpoint_bytes'] / GIB:.2f} GiB",
        *_traffic_lines(result),
        "",
        *_speed_lines(result),
        *[f"warning: {line}" for line in result["warnings"]],
        *[f"note: {line}" for line in result["notes"]],
    ]
    if result["refused"]:
        lines += ["", "Simpler or faster, if there were memory, and why not:", *[f"- {r}" for r in result["refused"]]]
    if result["written"]:
        lines.append(f"written: {result['written']}")
    return "\n".join(lines)


def _sizes(parts: Mapping[str, int]) -> list[tuple[str, str]]:
    ordered = sorted(parts.items(), key=lambda entry: -entry[1])
    return [(name, f"{size / GIB:.2f}") for name, size in ordered]


def _activation_line(sizes: Mapping[str, int]) -> str:
    without, with_it = (sizes[f"{word}_checkpointing"] / GIB for word in ("without", "with"))
    return f"activations without checkpointing {without:.2f} GiB, with {with_it:.2f}"


def _traffic_lines(result: Mapping[str, Any]) -> list[str]:
    if not result["traffic"]:
        return []
    rows = [
        (
            one["name"],
            one["operation"],
            f"{one['payload_bytes'] / 2**20:.1f}",
            f"{one['sent_bytes_per_gpu'] / 2**20:.1f}",
            str(one["calls"]),
            one["during"] or "-",
        )
        for one in result["traffic"]
    ]
    header = ("collectives of a step", "", "payload MiB", "sent by a GPU, MiB", "calls", "hidden behind")
    return ["", markdown_table(header, rows)]


def _speed_lines(result: Mapping[str, Any]) -> list[str]:
    parts = ", ".join(f"{name} {short(1000 * seconds)} ms" for name, seconds in result["step_seconds"].items())
    return [
        f"estimate: {short(result['images_per_second'])} images/s, MFU {100 * result['mfu']:.0f} % "
        f"({100 * result['executed_mfu']:.0f} % of executed FLOPs), {short(result['flops_per_gpu'] / 1e12)} TFLOP a "
        f"step and GPU ({short(result['executed_flops_per_gpu'] / 1e12)} executed): {parts}",
        "of its FLOPs: " + ", ".join(f"{name} {short(100 * share)} %" for name, share in result["flops_share"].items()),
        f"assumed, not measured: matrix products reach {100 * result['assumptions']['matmul_share']:.0f} % of the "
        f"card's peak, links {100 * ASSUMPTIONS['link_share']:.0f} % of theirs, collectives hide behind "
        f"{100 * ASSUMPTIONS['overlap']:.0f} % of the computation (docs/scaling.md)",
        *([] if result["our_vit"] else [_NO_FIGURES]),
    ]

"""Estimates how long an optimizer step takes, from figures of the hardware and from assumptions, all of which are here.

Bytes and launches are those of the operators that a step of ViT-S/16 calls, counted on fake CUDA tensors, or of the
backbone itself where it is not one of our ViTs (`planning/work.py`); nothing was timed by us: there was no GPU. They
rank configs; they promise no throughput. docs/scaling.md puts published runs beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dino_ds.config.ds_check import offloads_optimizer, offloads_weights
from dino_ds.config.ds_config import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.costs.activations import element_bytes
from dino_ds.costs.communication import Traffic, recipe_traffic
from dino_ds.costs.flops import recipe_step_flops
from dino_ds.costs.objective import ObjectiveCosts
from dino_ds.costs.parameters import recipe_sizes
from dino_ds.planning.gpus import Gpu
from dino_ds.planning.work import ASSUMPTIONS as OF_WORK
from dino_ds.planning.work import Work

ASSUMPTIONS = {
    **OF_WORK,
    "link_share": 0.75,  # of a link's bandwidth that collectives and copies reach
    "overlap": 0.7,  # of the computation behind which DeepSpeed can hide collectives
    "ring_hop_us": 3.0,  # a rank's part in the latency of an all-gather or reduce-scatter
    "tree_hop_us": 10.0,  # a level's part in the latency of an all-reduce, up and down
    "waiting": 0.01,  # of the step for each doubling of the nodes: ranks wait for the slowest
    "launch_us": 5.0,  # an operator's time on the host
    "zero3_us_per_block": 1000.0,  # of DeepSpeed's hooks on the host that fetch and release weights
    # How often a logit is read or written: mm, scale, softmax, sums and, of the student, its gradient.
    "student_logit_passes": 19,
    "teacher_logit_passes": 12,
    "sinkhorn_logit_passes": 9,  # in each iteration
    "optimizer_bytes": 30,  # per weight: AdamW reads and writes
    "ema_bytes": 12,  # per weight: the teacher's average
    "host_bandwidth": 100.0,  # 10^9 bytes/s of a node's memory, for an optimizer on the host
}
_MICRO = 1e-6
_GIGA = 1e9


@dataclass(frozen=True)
class Cluster:
    """`gpus` in each of `nodes`; network: of a node, each way, 10^9 bytes/s."""

    gpu: Gpu
    gpus: int
    nodes: int
    network: float

    @property
    def world_size(self) -> int:
        return self.gpus * self.nodes


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step by part; flops: of the whole model on one GPU, nothing counted that is computed
    twice; images: of all GPUs."""

    parts: dict[str, float]
    flops: float
    images: int
    gpu: Gpu

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs against the card's peak."""
        return self.flops / self.seconds / (self.gpu.tflops * 1e12)


def estimate_step(recipe: Recipe, config: DsConfig, cluster: Cluster) -> StepTime:
    """Estimate the step of a resolved config."""
    gpu, world, times = cluster.gpu, cluster.world_size, config.accumulation
    work = Work.of(recipe, config)
    compute, again = _micro_batch_seconds(recipe, config, gpu, work)
    backward = compute * _backward_share(work.flops) + again
    traffic = recipe_traffic(recipe, config, world)
    parts = {
        "computation": times * compute,
        "recomputation": times * again,
        "optimizer and EMA": _optimizer_seconds(recipe, config, cluster, work.in_step),
        "communication": exposed_seconds(traffic, cluster, times * (compute + again), times * backward),
        "offload": _offload_seconds(recipe, config, cluster, work.kept),
    }
    parts["waiting for other ranks"] = waiting_share(cluster) * sum(parts.values())
    whole = sum(recipe_step_flops(recipe, False, config.precision, config.micro_batch).values())
    return StepTime(
        {name: seconds for name, seconds in parts.items() if seconds},
        whole * config.micro_batch * times,
        config.micro_batch * times * world,
        gpu,
    )


def exposed_seconds(traffic: Iterable[Traffic], cluster: Cluster, step: float, backward: float) -> float:
    """What of the collectives is not hidden behind `step` seconds of computation, `backward` of them the backward
    pass: gradients can hide behind the backward pass, gathered weights behind all that gradients leave."""
    by_time = dict.fromkeys(("backward", "micro-batch", ""), 0.0)
    for one in traffic:
        by_time[one.during] += collective_seconds(one, cluster)
    share = ASSUMPTIONS["overlap"]
    gradients = max(0.0, by_time["backward"] - share * backward)
    hidden = by_time["backward"] - gradients
    weights = max(0.0, by_time["micro-batch"] - max(0.0, share * step - hidden))
    return gradients + weights + by_time[""]


def waiting_share(cluster: Cluster) -> float:
    """The share of the step that is spent waiting for the slowest of many nodes."""
    return ASSUMPTIONS["waiting"] * math.log2(cluster.nodes)


def collective_seconds(traffic: Traffic, cluster: Cluster) -> float:
    """Time of a collective by bandwidth (rings: what leaves each rank, and what leaves each node) and latency."""
    inside = traffic.ranks <= cluster.gpus
    slowest = cluster.gpu.link if inside else min(cluster.gpu.link, cluster.network)
    ring = (traffic.ranks - 1) * ASSUMPTIONS["ring_hop_us"]
    if traffic.operation == "all-reduce":
        ring = min(2 * ring, 2 * math.ceil(math.log2(traffic.ranks)) * ASSUMPTIONS["tree_hop_us"])
    return traffic.sent / (slowest * _GIGA * ASSUMPTIONS["link_share"]) + traffic.calls * ring * _MICRO


def logit_bytes(recipe: Recipe) -> float:
    """Bytes of FP32 logits that the loss of an image reads and writes, tile by tile."""
    objective = ObjectiveCosts.of(recipe)
    teacher = ASSUMPTIONS["teacher_logit_passes"] + ASSUMPTIONS["sinkhorn_logit_passes"] * (
        objective.teacher_passes - 1
    )
    student = ASSUMPTIONS["student_logit_passes"]
    return sum(
        4 * one.sizes.prototypes * (student * one.student_rows + teacher * one.teacher_rows)
        for one in objective.cross_entropies
    )


def _micro_batch_seconds(recipe: Recipe, config: DsConfig, gpu: Gpu, work: Work) -> tuple[float, float]:
    """(what a micro-batch computes, what checkpointing computes again): matrix products, then what only moves memory;
    at least what launching all of it takes."""
    segments = recipe.model.spec().depth
    # Half as fast in FP32.
    low = element_bytes(config) == 2
    rate = gpu.tflops * 1e12 * gpu.matmul_share * (1.0 if low else 0.5)
    bandwidth = gpu.bandwidth * _GIGA
    # Prototypes in TF32, half as fast as bf16.
    flops = sum(work.flops.values()) + (_of_prototypes(work.flops) if low else 0)
    moved = work.moved + config.micro_batch * logit_bytes(recipe)
    compute = flops / rate + moved / bandwidth
    hooks = ASSUMPTIONS["zero3_us_per_block"] if config.stage == 3 else 0.0
    launched = (work.operators * ASSUMPTIONS["launch_us"] + segments * hooks) * _MICRO
    again = work.again.flops / rate + work.again.moved / bandwidth
    return max(compute, launched), max(again, work.again.operators * ASSUMPTIONS["launch_us"] * _MICRO)


def _backward_share(flops: dict[str, int]) -> float:
    """What the gradient of the prototypes costs is part of the forward pass."""
    student = sum(n for name, n in flops.items() if name.startswith("student")) - flops["student_prototypes"]
    return 2 / 3 * student / sum(flops.values())


def _of_prototypes(flops: dict[str, int]) -> int:
    return flops["student_prototypes"] + flops.get("teacher_prototypes", 0)


def _optimizer_seconds(recipe: Recipe, config: DsConfig, cluster: Cluster, operators: int) -> float:
    """Time on the GPU; the teacher's average is sharded if its masters lie in one flat buffer."""
    weights, shards = sum(recipe_sizes(recipe).values()), cluster.world_size if config.stage else 1
    flat = config.stage in (1, 2) and config.precision != "fp32"
    moved = ASSUMPTIONS["ema_bytes"] * weights / (shards if flat else 1)
    if not offloads_optimizer(config.raw["zero_optimization"]):
        moved += ASSUMPTIONS["optimizer_bytes"] * weights / shards
    launched = operators * ASSUMPTIONS["launch_us"] * _MICRO
    return max(moved / (cluster.gpu.bandwidth * _GIGA), launched)


def _offload_seconds(recipe: Recipe, config: DsConfig, cluster: Cluster, kept: float) -> float:
    """Copies over PCIe and AdamW on the host; nothing is hidden, which is the worst case. kept: bytes of a
    micro-batch's checkpoints."""
    zero, weights = config.raw["zero_optimization"], sum(recipe_sizes(recipe).values())
    mine, element = weights / cluster.world_size, element_bytes(config)
    pcie = cluster.gpu.pcie * _GIGA * ASSUMPTIONS["link_share"]
    seconds = 0.0
    if offloads_optimizer(zero):
        # Gradients down after each micro-batch at stage 2 and 3, new weights up, masters up for the teacher.
        copies = element * mine * (config.accumulation if config.stage > 1 else 1) + element * mine + 4 * mine
        on_host = ASSUMPTIONS["optimizer_bytes"] * mine * cluster.gpus / (ASSUMPTIONS["host_bandwidth"] * _GIGA)
        seconds += copies / pcie + on_host
    if offloads_weights(zero):
        seconds += 2 * config.accumulation * element * mine / pcie
    if config.checkpoint_on_cpu:
        seconds += 2 * config.accumulation * kept / pcie
    return seconds

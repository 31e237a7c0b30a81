"""Estimates how long an optimizer step takes, from figures of the hardware and from assumptions, all of which are here.

Bytes and launches are those of the operators that a step of ViT-S/16 calls, counted on fake CUDA tensors; nothing was
timed by us: there was no GPU. They rank configs; they promise no throughput. docs/scaling.md puts published runs beside
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dino_ds.config.crops import student_sizes, teacher_sizes
from dino_ds.config.ds_check import offloads_optimizer
from dino_ds.config.ds_config import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.costs.activations import element_bytes, recomputed_blocks
from dino_ds.costs.communication import Traffic, recipe_traffic
from dino_ds.costs.flops import recipe_step_flops, tokens_of, vit_of
from dino_ds.costs.objective import ObjectiveCosts
from dino_ds.costs.parameters import recipe_sizes
from dino_ds.plan.gpus import Gpu

ASSUMPTIONS = {
    "link_share": 0.75,  # of a link's bandwidth that collectives and copies reach
    "overlap": 0.7,  # of the computation behind which DeepSpeed can hide collectives
    "ring_hop_us": 3.0,  # a rank's part in the latency of an all-gather or reduce-scatter
    "tree_hop_us": 10.0,  # a level's part in the latency of an all-reduce, up and down
    "waiting": 0.01,  # of the step for each doubling of the nodes: ranks wait for the slowest
    "launch_us": 5.0,  # an operator's time on the host
    "launches_per_block": 74,  # of student and teacher, forward and backward
    "launches_of_head_and_loss": 165,
    "bucket_launches_per_block": 26,  # DeepSpeed copies gradients into buckets, at stages 1 to 3
    "optimizer_launches_per_block": 5,  # in a step, at stages 1 to 3
    "zero3_us_per_block": 1000.0,  # of DeepSpeed's hooks on the host that fetch and release weights
    "elementwise_bytes": 159,  # per token, block and unit of width: norms, activation, residuals and their gradients
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
    flops = recipe_step_flops(recipe, config.performance.cls_only_last_block)
    compute, again = _micro_batch_seconds(recipe, config, gpu, flops)
    backward = compute * _backward_share(flops) + again
    traffic = recipe_traffic(recipe, config, world)
    parts = {
        "computation": times * compute,
        "recomputation": times * again,
        "optimizer and EMA": _optimizer_seconds(recipe, config, cluster),
        "communication": exposed_seconds(traffic, cluster, times * (compute + again), times * backward),
        "offload": _offload_seconds(recipe, config, cluster),
    }
    parts["waiting for other ranks"] = waiting_share(cluster) * sum(parts.values())
    whole = sum(recipe_step_flops(recipe, False).values())
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


def elementwise_bytes(recipe: Recipe, config: DsConfig) -> float:
    """Bytes that a micro-batch moves outside matrix products and attention; compiled blocks move half as many."""
    arch = vit_of(recipe)
    tokens = _student_tokens(recipe)
    seen = sum(tokens_of(arch, side) for side in teacher_sizes(recipe.crops.groups))
    return config.micro_batch * _bytes_per_token(recipe, config) * (tokens + seen / 3)


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


def launches(recipe: Recipe, config: DsConfig) -> tuple[int, int]:
    """The number of operators of a micro-batch, and of the optimizer's step."""
    depth, in_engine = vit_of(recipe).depth, config.stage > 0
    per_block = ASSUMPTIONS["launches_per_block"] + in_engine * ASSUMPTIONS["bucket_launches_per_block"]
    micro_batch = depth * per_block + ASSUMPTIONS["launches_of_head_and_loss"]
    return int(micro_batch), int(in_engine * depth * ASSUMPTIONS["optimizer_launches_per_block"])


def _bytes_per_token(recipe: Recipe, config: DsConfig) -> float:
    arch = vit_of(recipe)
    moved = ASSUMPTIONS["elementwise_bytes"] * arch.width * arch.depth * element_bytes(config) / 2
    return moved * (0.5 if config.performance.compile != "off" else 1.0)


def _micro_batch_seconds(recipe: Recipe, config: DsConfig, gpu: Gpu, flops: dict[str, int]) -> tuple[float, float]:
    """(what a micro-batch computes, what checkpointing computes again): matrix products, then what only moves memory;
    at least what launching all of it takes."""
    arch, images = vit_of(recipe), config.micro_batch
    # Half as fast in FP32.
    low = element_bytes(config) == 2
    rate = gpu.tflops * 1e12 * gpu.matmul_share * (1.0 if low else 0.5)
    bandwidth = gpu.bandwidth * _GIGA
    # Prototypes in TF32, half as fast as bf16.
    work = sum(flops.values()) + (_of_prototypes(flops) if low else 0)
    moved = elementwise_bytes(recipe, config) + images * logit_bytes(recipe)
    compute = images * work / rate + moved / bandwidth
    hooks = ASSUMPTIONS["zero3_us_per_block"] if config.stage == 3 else 0.0
    launched = (launches(recipe, config)[0] * ASSUMPTIONS["launch_us"] + arch.depth * hooks) * _MICRO
    share = recomputed_blocks(recipe, config) / arch.depth
    moved = _bytes_per_token(recipe, config) * _student_tokens(recipe) / 3
    forward = images * ((flops["student_linear"] + flops["student_attention"]) / 3 / rate + moved / bandwidth)
    # The student's forward pass is a fifth of the blocks' launches.
    again = arch.depth * ASSUMPTIONS["launches_per_block"] / 5 * ASSUMPTIONS["launch_us"] * _MICRO
    return max(compute, launched), share * max(forward, again)


def _backward_share(flops: dict[str, int]) -> float:
    """What the gradient of the prototypes costs is part of the forward pass."""
    student = sum(n for name, n in flops.items() if name.startswith("student")) - flops["student_prototypes"]
    return 2 / 3 * student / sum(flops.values())


def _of_prototypes(flops: dict[str, int]) -> int:
    return flops["student_prototypes"] + flops["teacher_prototypes"]


def _optimizer_seconds(recipe: Recipe, config: DsConfig, cluster: Cluster) -> float:
    """Time on the GPU; the teacher's average is sharded if its masters lie in one flat buffer."""
    weights, shards = sum(recipe_sizes(recipe).values()), cluster.world_size if config.stage else 1
    flat = config.stage in (1, 2) and config.precision != "fp32"
    moved = ASSUMPTIONS["ema_bytes"] * weights / (shards if flat else 1)
    if not offloads_optimizer(config.raw["zero_optimization"]):
        moved += ASSUMPTIONS["optimizer_bytes"] * weights / shards
    launched = launches(recipe, config)[1] * ASSUMPTIONS["launch_us"] * _MICRO
    return max(moved / (cluster.gpu.bandwidth * _GIGA), launched)


def _offload_seconds(recipe: Recipe, config: DsConfig, cluster: Cluster) -> float:
    """Copies over PCIe and AdamW on the host; nothing is hidden, which is the worst case."""
    zero, weights = config.raw["zero_optimization"], sum(recipe_sizes(recipe).values())
    mine, element = weights / cluster.world_size, element_bytes(config)
    pcie = cluster.gpu.pcie * _GIGA * ASSUMPTIONS["link_share"]
    seconds = 0.0
    if offloads_optimizer(zero):
        # Gradients down after each micro-batch at stage 2 and 3, new weights up, masters up for the teacher.
        copies = element * mine * (config.accumulation if config.stage > 1 else 1) + element * mine + 4 * mine
        on_host = ASSUMPTIONS["optimizer_bytes"] * mine * cluster.gpus / (ASSUMPTIONS["host_bandwidth"] * _GIGA)
        seconds += copies / pcie + on_host
    if zero.get("offload_param", {}).get("device", "none") != "none":
        seconds += 2 * config.accumulation * element * mine / pcie
    if config.checkpoint_on_cpu:
        arch = vit_of(recipe)
        tokens = config.micro_batch * _student_tokens(recipe)
        kept = recomputed_blocks(recipe, config) * tokens * arch.width * element
        seconds += 2 * config.accumulation * kept / pcie
    return seconds


def _student_tokens(recipe: Recipe) -> int:
    """Of one image, over all its crops."""
    arch = vit_of(recipe)
    return sum(tokens_of(arch, size) for size in student_sizes(recipe.crops.groups))

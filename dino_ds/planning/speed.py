"""Estimates how long an optimizer step takes, from figures of the hardware and from assumptions, all of which are here.

FLOPs, bytes and launches are those of the operators that a rehearsed micro-batch calls (`planning/work.py`); nothing
was timed by us: there was no GPU. They rank configs; they promise no throughput. docs/scaling.md puts published runs
beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dino_ds.config.ds_values import DsConfig, offloads_optimizer, offloads_weights
from dino_ds.config.recipe import Recipe
from dino_ds.costs.communication import Traffic, recipe_traffic
from dino_ds.costs.memory import element_bytes
from dino_ds.costs.step_costs import count_parameters, model_flops, student_facts
from dino_ds.planning.gpus import Gpu
from dino_ds.planning.work import ASSUMPTIONS as OF_WORK
from dino_ds.planning.work import Amount, Work

ASSUMPTIONS = {
    **OF_WORK,
    "link_share": 0.75,  # of a link's bandwidth that collectives and copies reach
    "overlap": 0.7,  # of the computation behind which DeepSpeed can hide collectives
    "ring_hop_us": 3.0,  # a rank's part in the latency of an all-gather or reduce-scatter
    "tree_hop_us": 10.0,  # a level's part in the latency of an all-reduce, up and down
    "waiting": 0.01,  # of the step for each doubling of the nodes: ranks wait for the slowest
    "launch_us": 5.0,  # an operator's time on the host
    "zero3_us_per_block": 1000.0,  # of DeepSpeed's hooks on the host that fetch and release weights
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
    """Seconds of an optimizer step by part. FLOPs on one GPU: `flops` of the whole model, nothing counted that is
    computed twice, `executed`, without dropped branches and what the last block need not compute, and `once`, those
    of them that are not recomputed; images: of all GPUs."""

    parts: dict[str, float]
    flops: float
    executed: float
    once: float
    images: int
    gpu: Gpu

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def seconds_at(self, once: float) -> float:
        """Seconds of a step whose computation takes so many FLOPs before recomputation.

        Batched stochastic depth leaves out whole crops, so that small micro-batches drop more or less than others:
        only at equal work can their times be compared.
        """
        computed = self.parts["computation"] + self.parts.get("recomputation", 0.0)
        return self.seconds + computed * (once / self.once - 1)

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs against the card's peak."""
        return self.flops / self.seconds / (self.gpu.tflops * 1e12)

    @property
    def executed_mfu(self) -> float:
        """FLOPs that are executed against the card's peak."""
        return self.executed / self.seconds / (self.gpu.tflops * 1e12)


def estimate_step(recipe: Recipe, config: DsConfig, cluster: Cluster, exact: bool = True) -> StepTime:
    """Estimate the step of a resolved config; exact: as of `step_costs`. Raises NotEstimated."""
    gpu, world, times = cluster.gpu, cluster.world_size, config.accumulation
    work = Work.of(recipe, config, world, exact)
    compute, again = _seconds(work.all, recipe, config, gpu), _seconds(work.again, recipe, config, gpu, hooks=0.0)
    backward = compute * work.backward + again
    traffic = recipe_traffic(recipe, config, world, exact=exact)
    parts = {
        "computation": times * compute,
        "recomputation": times * again,
        "optimizer and EMA": _optimizer_seconds(recipe, config, cluster, work.in_step),
        "communication": exposed_seconds(traffic, cluster, times * (compute + again), times * backward),
        "offload": _offload_seconds(recipe, config, cluster, work.kept),
    }
    parts["waiting for other ranks"] = waiting_share(cluster) * sum(parts.values())
    images = config.micro_batch * times
    return StepTime(
        {name: seconds for name, seconds in parts.items() if seconds},
        sum(model_flops(recipe).values()) * images,
        work.executed * times,
        work.once * times,
        images * world,
        gpu,
    )


def exposed_seconds(traffic: Iterable[Traffic], cluster: Cluster, step: float, backward: float) -> float:
    """The seconds of collectives that are not hidden behind `step` seconds of computation, `backward` of them the
    backward pass: gradients can hide behind the backward pass, gathered weights behind all that gradients leave."""
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


def _seconds(
    work: Amount, recipe: Recipe, config: DsConfig, gpu: Gpu, hooks: float = ASSUMPTIONS["zero3_us_per_block"]
) -> float:
    """Time of products, then of what only moves memory; at least what launching all of it takes."""
    rate = gpu.tflops * 1e12 * gpu.matmul_share * (1.0 if element_bytes(config) == 2 else 0.5)  # half as fast in FP32
    compute = work.flops / rate + work.moved / (gpu.bandwidth * _GIGA)
    in_hooks = recipe.model.spec().depth * hooks if config.stage == 3 else 0.0
    return max(compute, (work.operators * ASSUMPTIONS["launch_us"] + in_hooks) * _MICRO)


def _optimizer_seconds(recipe: Recipe, config: DsConfig, cluster: Cluster, operators: float) -> float:
    """Time on the GPU; the teacher's average is sharded if its masters lie in one flat buffer."""
    weights, shards = sum(student_facts(recipe).trained.values()), cluster.world_size if config.stage else 1
    flat = config.stage in (1, 2) and config.precision != "fp32"
    moved = ASSUMPTIONS["ema_bytes"] * weights / (shards if flat else 1)
    if not offloads_optimizer(config.raw["zero_optimization"]):
        moved += ASSUMPTIONS["optimizer_bytes"] * weights / shards
    launched = operators * ASSUMPTIONS["launch_us"] * _MICRO
    return max(moved / (cluster.gpu.bandwidth * _GIGA), launched)


def _offload_seconds(recipe: Recipe, config: DsConfig, cluster: Cluster, kept: float) -> float:
    """Copies over PCIe and AdamW on the host; nothing is hidden, which is the worst case. kept: bytes of a
    micro-batch's checkpoints."""
    zero, weights = config.raw["zero_optimization"], count_parameters(recipe)
    mine, element = sum(student_facts(recipe).trained.values()) / cluster.world_size, element_bytes(config)
    pcie = cluster.gpu.pcie * _GIGA * ASSUMPTIONS["link_share"]
    seconds = 0.0
    if offloads_optimizer(zero):
        # Gradients down after each micro-batch at stage 2 and 3, new weights up, masters up for the teacher.
        copies = element * mine * (config.accumulation if config.stage > 1 else 1) + element * mine + 4 * mine
        on_host = ASSUMPTIONS["optimizer_bytes"] * mine * cluster.gpus / (ASSUMPTIONS["host_bandwidth"] * _GIGA)
        seconds += copies / pcie + on_host
    if offloads_weights(zero):
        seconds += 2 * config.accumulation * element * weights / cluster.world_size / pcie
    if config.checkpoint_on_cpu:
        seconds += 2 * config.accumulation * kept / pcie
    return seconds

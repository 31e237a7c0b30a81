"""GPUs that the planner knows, this machine's resources, and the hours, host memory and disk space that a run needs."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from dino_ds.basics.formatting import short
from dino_ds.basics.names import did_you_mean, suggestion
from dino_ds.config.ds_schema import DsConfig, offloads_optimizer, offloads_weights
from dino_ds.config.fields import MAX_WORKERS, PREFETCHED_BATCHES
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import GIB, element_bytes
from dino_ds.costs.step_costs import count_parameters, student_facts
from dino_ds.errors import ConfigError
from dino_ds.method.specs.own import teachers_of

REACHED = 0.3, 0.5
"""Parts of a card's peak that published trainings of such networks reach, low and high; nothing was measured here."""
FREE_PART = 0.9
"""Share of the host's free memory that training on a CPU may use."""
# Assumed memory of a training process with its CUDA libraries, and of a loader process without what others share.
_PROCESS_BYTES = 3 * GIB
_WORKER_BYTES = 350 * 2**20
_FP32 = 4
# Bytes per trained weight: FP32 master weight and Adam's two moments.
_STATE = 12
_SAVED = "checkpoint being written"


@dataclass(frozen=True)
class Gpu:
    """A card. tflops: its dense peak, 10^12/s; None where the card is not known."""

    name: str
    memory_gib: float
    tflops: float | None = None
    bf16: bool = True


@dataclass(frozen=True)
class Cluster:
    """`nodes` machines with `gpus` cards of the same kind in each."""

    gpu: Gpu
    gpus: int
    nodes: int

    @property
    def world_size(self) -> int:
        return self.gpus * self.nodes


@dataclass(frozen=True)
class Machine:
    """Resources that every rank can count on. card_gib: memory of a rank's GPU; None without a GPU. host_gib: memory of
    a node, which `ranks_per_node` share; without a GPU, what the ranks may use of it now. libraries: bytes of a process
    before it builds anything."""

    ranks: int
    ranks_per_node: int
    host_gib: float
    card_gib: float | None = None
    bf16: bool = True
    fp16: bool = True
    libraries: int = 0

    def in_common(self, other: Machine) -> Machine:
        """Return the resources that both machines have: every rank trains with the same config."""
        cards = [m.card_gib for m in (self, other) if m.card_gib is not None]
        return Machine(
            self.ranks,
            max(self.ranks_per_node, other.ranks_per_node),
            min(self.host_gib, other.host_gib),
            min(cards, default=None),
            self.bf16 and other.bf16,
            self.fp16 and other.fp16,
            max(self.libraries, other.libraries),
        )


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("rtx3070-8g", 7.7, 40.6),
        Gpu("rtx4060-8g", 7.6, 30.2),
        Gpu("rtx3080-10g", 9.7, 59.5),
        Gpu("rtx2080ti-11g", 10.7, 53.8, bf16=False),
        Gpu("rtx5070-12g", 11.4, 61.7),
        Gpu("rtx3060-12g", 11.6, 25.5),
        Gpu("rtx3080-12g", 11.6, 61.3),
        Gpu("rtx4070-12g", 11.6, 58.3),
        Gpu("t4-16g", 14.5, 65.0, bf16=False),
        Gpu("v100-16g", 15.7, 125.0, bf16=False),
        Gpu("rtx4080-16g", 15.6, 97.5),
        Gpu("a10-24g", 22.0, 125.0),
        Gpu("l4-24g", 22.0, 121.0),
        Gpu("rtx3090-24g", 23.6, 71.0),
        Gpu("rtx4090-24g", 23.6, 165.2),
        Gpu("v100-32g", 31.7, 125.0, bf16=False),
        Gpu("rtx5090-32g", 31.3, 209.5),
        Gpu("a100-40g", 39.4, 312.0),
        Gpu("l40s-48g", 44.4, 362.0),
        Gpu("a6000-48g", 47.4, 154.8),
        Gpu("a100-80g", 79.1, 312.0),
        Gpu("h100-80g", 79.1, 989.0),
        Gpu("h200-141g", 139.7, 989.0),
        Gpu("b200-180g", 178.3, 2250.0),
    )
}
"""Peaks are dense TFLOP/s of bf16 (fp16 without bf16) with FP32 accumulation, by NVIDIA's data sheets of T4, V100, A10,
A100, A6000, L4, L40S, H100, H200 and HGX B200, and whitepapers of the GeForce cards (Turing to Blackwell).
Memory is what torch finds on such a card, as its out-of-memory errors print it: less than the number on the box."""


def find_gpu(name: str) -> Gpu:
    """Find a card of the table by name, or by a part of it that one card has. Raises ConfigError."""
    word = re.sub(r"[^a-z0-9]", "", name.lower())
    near = [card for card in GPUS if len(word) > 1 and word in card.replace("-", "")]
    if name in GPUS or len(near) == 1:
        return GPUS[name if name in GPUS else near[0]]
    hint = suggestion(near[:3]) if near else did_you_mean(name, GPUS)
    raise ConfigError(
        f"--gpu {name}: this card is not in the table: there is {', '.join(GPUS)}, or give --memory_gib.{hint}"
    )


def named_gpu(name: str | None, memory_gib: float | None) -> Gpu:
    """Return the named card, with `memory_gib` if given; without a name, a card of which only `memory_gib` is known.

    Raises ConfigError.
    """
    if name is not None:
        card = find_gpu(name)
        return card if memory_gib is None else dataclasses.replace(card, memory_gib=memory_gib)
    if memory_gib is None:
        raise ConfigError(f"no GPU is given: --gpu NAME ({', '.join(GPUS)}) or --memory_gib N")
    return Gpu("a GPU", memory_gib)


def describe_hours(gpu: Gpu, flops: float, work: str) -> str:
    """Describe in a sentence the hours of `work`, which takes `flops` on each card."""
    if gpu.tflops is None:
        return f"{work}: {short(flops / 1e15)} PFLOP on each GPU, whose peak is not known here"
    least, most = (short(flops / (share * gpu.tflops * 1e12) / 3600) for share in reversed(REACHED))
    low, high = (f"{100 * share:.0f}" for share in REACHED)
    return (
        f"{work}: {least} to {most} hours, {short(flops / 1e15)} PFLOP on each GPU at {high} to {low} % of the peak of "
        f"{gpu.name}; not measured"
    )


def find_machine() -> Machine:
    """Find the resources of this rank."""
    import torch

    from dino_ds.basics.machine import host_memory_gib
    from dino_ds.engine import distributed
    from dino_ds.engine.process import device, fp16_supported, memory_gib

    card = torch.cuda.get_device_properties(device()) if device().type == "cuda" else None
    here, libraries = distributed.local_world_size(), memory_gib()
    total, free = host_memory_gib()
    return Machine(
        distributed.world_size(),
        here,
        # On a CPU the run itself is in host memory: what is free now, and the libraries that the ranks have loaded.
        total if card else FREE_PART * free + here * libraries,
        card.total_memory / 2**30 if card else None,
        bf16=card is None or card.major >= 8,
        fp16=fp16_supported(),
        libraries=round(libraries * 2**30),
    )


def checkpoint_bytes(recipe: Recipe) -> int:
    """Estimate a checkpoint's largest size: FP32 master weights and moments of trained weights, teachers, centers."""
    facts = student_facts(recipe)
    teachers = teachers_of(recipe)
    copies = _FP32 * sum(teacher.follows for teacher in teachers)
    state = _STATE * sum(facts.trained.values()) + copies * count_parameters(recipe)
    learned = state + _FP32 * sum(facts.statistics)
    replaced = sum(not teacher.follows and not teacher.of_file for teacher in teachers)
    return learned + replaced * _FP32 * sum(n for name, n in facts.sizes.items() if name.startswith("backbone."))


def host_bytes(recipe: Recipe, config: DsConfig, gpus: int, world_size: int) -> dict[str, int]:
    """Estimate the host memory in bytes of a node with `gpus` of the `world_size` ranks, by part."""
    zero, weights = config.raw["zero_optimization"], count_parameters(recipe)
    trained = sum(student_facts(recipe).trained.values())
    here, learning = (count * gpus // world_size if config.stage else count for count in (weights, trained))
    workers = MAX_WORKERS if recipe.data.workers is None else recipe.data.workers
    parts = {
        "processes": _PROCESS_BYTES * gpus,
        "loader processes": _WORKER_BYTES * workers * gpus,
        "loaded batches": (workers * PREFETCHED_BATCHES + 1) * recipe.batch_bytes(config.micro_batch) * gpus,
        # FP32 gradients are there too.
        "offloaded optimizer": (_STATE + _FP32) * learning if offloads_optimizer(zero) else 0,
        "offloaded weights": element_bytes(config) * here if offloads_weights(zero) else 0,
        _SAVED: _STATE * (trained * gpus // world_size) + _FP32 * (weights * gpus // world_size),
    }
    return {name: size for name, size in parts.items() if size}


def needed_bytes(recipe: Recipe, config: DsConfig, gpus: int, world_size: int) -> int:
    """Return the least host memory of a node: without loader processes, whose number follows from the node's cores."""
    parts = host_bytes(recipe, config, gpus, world_size)
    left_out = {"loader processes", "loaded batches"} | (set() if recipe.save_in_background else {_SAVED})
    return sum(size for name, size in parts.items() if name not in left_out)

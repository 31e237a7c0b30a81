"""The resources that all ranks of a run have, and the host memory and disk space that a run needs."""

from __future__ import annotations

from dataclasses import dataclass

from dino_ds.config.ds_values import DsConfig, offloads_optimizer, offloads_weights
from dino_ds.config.fields import MAX_WORKERS, PREFETCHED_BATCHES
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import GIB, element_bytes
from dino_ds.costs.step_costs import count_parameters, student_facts
from dino_ds.method.specs.of_recipe import teachers_of

# Assumed memory of a training process with its CUDA libraries, and of a loader process without what others share.
PROCESS_BYTES = 3 * GIB
WORKER_BYTES = 350 * 2**20
_FP32 = 4
FREE_PART = 0.9
"""Share of the host's free memory that training on a CPU may use."""
_SAVED = "checkpoint being written"
# Bytes per trained weight: FP32 master weight and Adam's two moments.
_STATE = 12


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


def find_machine() -> Machine:
    """Find the resources of this rank."""
    import torch

    from dino_ds.basics.host_memory import host_memory_gib
    from dino_ds.engine import distributed
    from dino_ds.engine.device import device, fp16_supported, memory_gib

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
        "processes": PROCESS_BYTES * gpus,
        "loader processes": WORKER_BYTES * workers * gpus,
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

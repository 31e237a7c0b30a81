"""Whether a training step fits on a GPU and with how many images, and the ds config that the planner recommends; the
GPUs that it knows, this machine's resources, and the hours, host memory and disk space that a run needs."""

from __future__ import annotations

import bisect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dino_ds.basics.files import check_absent
from dino_ds.basics.formatting import short
from dino_ds.basics.names import did_you_mean, suggestion
from dino_ds.config.ds_config import change_ds_config, resolve_ds_config
from dino_ds.config.ds_schema import COMMUNICATES_IN_STEP, DsConfig, offloads_optimizer, offloads_weights
from dino_ds.config.fields import MAX_WORKERS, PREFETCHED_BATCHES
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import GIB, Memory, element_bytes, estimate_memory
from dino_ds.costs.step_costs import count_parameters, student_facts
from dino_ds.errors import ConfigError
from dino_ds.method.specs.own import teachers_of

REACHED = 0.3, 0.5  # shares of a card's peak that published trainings reach, low and high; nothing was measured here
_FP32, _STATE = 4, 12  # bytes of an FP32 weight, and of a trained one's master weight with Adam's two moments


class Gpu(NamedTuple):
    """A card. tflops: its dense peak, 10^12/s; None where the card is not known."""

    name: str
    memory_gib: float
    tflops: float | None = None
    bf16: bool = True


class Cluster(NamedTuple):
    gpu: Gpu
    gpus: int  # of a node
    nodes: int

    @property
    def world_size(self) -> int:
        return self.gpus * self.nodes


class Machine(NamedTuple):
    """Resources that every rank can count on. card_gib: a GPU's memory; host_gib: memory of a node for all its ranks,
    without a GPU only what they may use now. libraries: bytes of a process before it builds anything."""

    ranks: int
    ranks_per_node: int
    host_gib: float
    card_gib: float | None = None
    bf16: bool = True
    fp16: bool = True
    libraries: int = 0

    def in_common(self, other: Machine) -> Machine:
        card = min((m.card_gib for m in (self, other) if m.card_gib is not None), default=None)
        here, host = max(self.ranks_per_node, other.ranks_per_node), min(self.host_gib, other.host_gib)
        both = self.bf16 and other.bf16, self.fp16 and other.fp16
        return Machine(self.ranks, here, host, card, *both, libraries=max(self.libraries, other.libraries))


_CARDS = (
    Gpu("rtx3070-8g", 7.7, 40.6), Gpu("rtx4060-8g", 7.6, 30.2), Gpu("rtx3080-10g", 9.7, 59.5),
    Gpu("rtx2080ti-11g", 10.7, 53.8, bf16=False), Gpu("rtx5070-12g", 11.4, 61.7), Gpu("rtx3060-12g", 11.6, 25.5),
    Gpu("rtx3080-12g", 11.6, 61.3), Gpu("rtx4070-12g", 11.6, 58.3), Gpu("t4-16g", 14.5, 65.0, bf16=False),
    Gpu("v100-16g", 15.7, 125.0, bf16=False), Gpu("rtx4080-16g", 15.6, 97.5), Gpu("a10-24g", 22.0, 125.0),
    Gpu("l4-24g", 22.0, 121.0), Gpu("rtx3090-24g", 23.6, 71.0), Gpu("rtx4090-24g", 23.6, 165.2),
    Gpu("v100-32g", 31.7, 125.0, bf16=False), Gpu("rtx5090-32g", 31.3, 209.5), Gpu("a100-40g", 39.4, 312.0),
    Gpu("l40s-48g", 44.4, 362.0), Gpu("a6000-48g", 47.4, 154.8), Gpu("a100-80g", 79.1, 312.0),
    Gpu("h100-80g", 79.1, 989.0), Gpu("h200-141g", 139.7, 989.0), Gpu("b200-180g", 178.3, 2250.0),
)  # fmt: skip
"""Peaks are dense TFLOP/s of bf16 (fp16 without bf16) with FP32 accumulation, by NVIDIA's data sheets of T4, V100, A10,
A100, A6000, L4, L40S, H100, H200 and HGX B200, and whitepapers of the GeForce cards (Turing to Blackwell).
Memory is what torch finds on such a card, as its out-of-memory errors print it: less than the number on the box."""
GPUS = {card.name: card for card in _CARDS}


def named_gpu(name: str | None, memory_gib: float | None) -> Gpu:
    """The card of that name or of a part of it, with `memory_gib` if given. Raises ConfigError."""
    if name is None:
        if memory_gib is None:
            raise ConfigError(f"no GPU is given: --gpu NAME ({', '.join(GPUS)}) or --memory_gib N")
        return Gpu("a GPU", memory_gib)
    word = re.sub(r"[^a-z0-9]", "", name.lower())
    near = [name] if name in GPUS else [key for key in GPUS if len(word) > 1 and word in key.replace("-", "")]
    if len(near) != 1:
        hint = suggestion(near[:3]) if near else did_you_mean(name, GPUS)
        known = f"there is {', '.join(GPUS)}, or give --memory_gib.{hint}"
        raise ConfigError(f"--gpu {name}: this card is not in the table: {known}")
    return GPUS[near[0]] if memory_gib is None else GPUS[near[0]]._replace(memory_gib=memory_gib)


def describe_hours(gpu: Gpu, flops: float, work: str) -> str:
    """Describe in a sentence the hours of `work`, which takes `flops` on each card."""
    each = f"{short(flops / 1e15)} PFLOP on each GPU"
    if gpu.tflops is None:
        return f"{work}: {each}, whose peak is not known here"
    least, most = (short(flops / (share * gpu.tflops * 1e12) / 3600) for share in reversed(REACHED))
    low, high = (f"{100 * share:.0f}" for share in REACHED)
    return f"{work}: {least} to {most} hours, {each} at {high} to {low} % of the peak of {gpu.name}; not measured"


def find_machine() -> Machine:
    import torch

    from dino_ds.basics.machine import host_memory_gib
    from dino_ds.engine import distributed
    from dino_ds.engine.process import device, fp16_supported, memory_gib

    card = torch.cuda.get_device_properties(device()) if device().type == "cuda" else None
    here, libraries = distributed.local_world_size(), memory_gib()
    total, free = host_memory_gib()
    # On a CPU the run is in host memory: it may use 90 % of what is free, and what loaded libraries already take.
    host, card_gib = (total, card.total_memory / 2**30) if card else (0.9 * free + here * libraries, None)
    able = card is None or card.major >= 8, fp16_supported()
    return Machine(distributed.world_size(), here, host, card_gib, *able, libraries=round(libraries * 2**30))


def checkpoint_bytes(recipe: Recipe) -> int:
    """Estimate a checkpoint's largest size: FP32 master weights and moments of trained weights, teachers, centers."""
    facts, teachers = student_facts(recipe), teachers_of(recipe)
    copied = sum(teacher.follows for teacher in teachers) * count_parameters(recipe) + sum(facts.statistics)
    replaced = sum(not teacher.follows and not teacher.of_file for teacher in teachers)
    copied += replaced * sum(n for name, n in facts.sizes.items() if name.startswith("backbone."))
    return _STATE * sum(facts.trained.values()) + _FP32 * copied


def host_bytes(recipe: Recipe, config: DsConfig, gpus: int, world_size: int) -> dict[str, int]:
    """Estimate the host memory of a node with `gpus` of the ranks, by part; what processes take is assumed."""
    zero, weights = config.raw["zero_optimization"], count_parameters(recipe)
    trained = sum(student_facts(recipe).trained.values())
    here, learning = (count * gpus // world_size if config.stage else count for count in (weights, trained))
    workers = MAX_WORKERS if recipe.data.workers is None else recipe.data.workers
    parts = {
        "processes": 3 * GIB * gpus,
        "loader processes": 350 * 2**20 * workers * gpus,
        "loaded batches": (workers * PREFETCHED_BATCHES + 1) * recipe.batch_bytes(config.micro_batch) * gpus,
        # FP32 gradients are there too.
        "offloaded optimizer": (_STATE + _FP32) * learning if offloads_optimizer(zero) else 0,
        "offloaded weights": element_bytes(config) * here if offloads_weights(zero) else 0,
        "checkpoint being written": _STATE * (trained * gpus // world_size) + _FP32 * (weights * gpus // world_size),
    }
    return {name: size for name, size in parts.items() if size}


RECOMMENDED = "the recommended config"
SMALL = "small"  # the recipe for few or small images, which takes the least memory of those that learn well
FILLED = 0.97  # share of a GPU's memory that a config may need, by prediction with margins, to be chosen by the planner
FRAGMENTATION = 0.05  # what the allocator loses to fragmentation, as a part of the tensors' size; assumed


def fit(
    recipe: Recipe, ds: Mapping[str, Any], ds_path: str, world_size: int, micro_batch: int | None = None
) -> tuple[DsConfig, Memory]:
    """Resolve the ds JSON for the recipe's global batch on `world_size` GPUs, and rehearse its micro-batch. Return the
    config, and the memory that it needs on each GPU, by part with margins. micro_batch: taken instead of the ds JSON's,
    and accumulated to the global batch or just above it. Its memory is estimated, fast enough for a search, from a line
    through the costs of two rehearsed micro-batches. Raises ConfigError if batch sizes contradict each other."""
    batch = recipe.data.global_batch
    if micro_batch is not None:
        accumulation = -(-batch // (micro_batch * world_size))
        batch, ds = micro_batch * accumulation * world_size, with_batch(ds, micro_batch, accumulation)
    config = resolve_ds_config(dict(ds), ds_path, batch, world_size, parameters=count_parameters(recipe))
    memory = estimate_memory(recipe, config, world_size, on_gpu=True, exact=micro_batch is None)
    return config, with_margins(memory, world_size)


def largest_micro_batch(recipe: Recipe, ds: Mapping[str, Any], ds_path: str, world_size: int, limit_gib: float) -> int:
    """Return the largest micro-batch that fits, whether it divides the global batch or not; 0 if none fits."""

    def fails(images: int) -> bool:
        return fit(recipe, ds, ds_path, world_size, images)[1].gib > limit_gib

    low, high = 0, 64  # smaller ones are estimated only if this does not fit
    while high <= 1 << 16 and not fails(high):
        low, high = high, 2 * high
    return low + bisect.bisect_left(range(low + 1, high), True, key=fails)


def micro_batches(global_batch: int, world_size: int) -> list[int]:
    """List the micro-batches that divide a GPU's share of the batch, largest first; [] without an equal share."""
    images, rest = divmod(global_batch, world_size)
    return [] if rest else [size for size in range(images, 0, -1) if images % size == 0]


def with_batch(ds: Mapping[str, Any], micro_batch: int, accumulation: int | str) -> dict[str, Any]:
    kept = {key: value for key, value in ds.items() if key != "train_batch_size"}
    return kept | {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": accumulation}


def with_margins(memory: Memory, world_size: int) -> Memory:
    """Add what is not in tensors: fragmentation, and half a GiB each (assumed) for driver with kernels and for NCCL."""
    margins = {"fragmentation margin": round(FRAGMENTATION * sum(memory.parts.values()))}
    margins["CUDA context and NCCL"] = GIB // 2 * (2 if world_size > 1 else 1)
    return Memory(memory.moment, memory.parts | margins)


class Shape(NamedTuple):
    """The settings of a ds config that decide memory. offload: "", "optimizer" or "optimizer and weights"."""

    stage: int
    offload: str
    checkpointing: bool

    def __str__(self) -> str:
        offload = f", {self.offload} on the host" if self.offload else ""
        return f"ZeRO {self.stage}{', checkpointing' if self.checkpointing else ''}{offload}"


_PLACES = ((2, ""), (3, ""), (2, "optimizer"), (3, "optimizer"), (3, "optimizer and weights"))  # stage, offload
SHAPES = [Shape(1, "", False), *(Shape(*place, checkpointing) for place in _PLACES for checkpointing in (False, True))]
"""In the order in which they are tried. Stage 1 takes the whole batch at once: it would accumulate in low precision."""


def ds_of(shape: Shape, bf16: bool) -> dict[str, Any]:
    """A ds JSON without batch sizes, as those in ds_configs/."""
    zero: dict[str, Any] = {"stage": shape.stage, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
    zero |= {"overlap_comm": True} if shape.stage > 1 else {}
    if shape.stage < 3:
        zero["allgather_bucket_size"] = "auto"
    else:
        zero |= {"stage3_prefetch_bucket_size": 20_000_000, "stage3_param_persistence_threshold": 100_000}
        zero |= {"stage3_max_live_parameters": 200_000_000, "stage3_max_reuse_distance": 200_000_000}
    offloaded = {"": (), "optimizer": ("optimizer",), "optimizer and weights": ("optimizer", "param")}[shape.offload]
    zero |= {f"offload_{part}": {"device": "cpu", "pin_memory": True} for part in offloaded}
    scaling = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2}
    fp16: dict[str, Any] = {"enabled": True, **scaling, "min_loss_scale": 1}
    ds = {"gradient_clipping": 3.0, **({"bf16": {"enabled": True}} if bf16 else {"fp16": fp16})}
    ds["zero_optimization"] = zero
    if shape.stage == 3 or shape.offload:
        ds["dino_ds"] = {"teacher_copy": False}  # a copy takes 2 bytes per weight on every GPU
    if shape.checkpointing:
        ds["activation_checkpointing"] = {"number_checkpoints": "auto"}
    return change_ds_config(ds, RECOMMENDED, {})


def recommend(
    recipe: Recipe,
    cluster: Cluster,
    limit_gib: float,
    shapes: Sequence[Shape] = SHAPES,
    make_ds: Callable[[Shape, bool], dict[str, Any]] = ds_of,
) -> tuple[Shape, dict[str, Any], DsConfig, Memory]:
    """Recommend a ds JSON, with its shape, config and memory: the first of `shapes` that fits, with its largest
    micro-batch; with recomputation if that enlarges one below 8. GPUs must divide the batch. Raises ConfigError."""
    changes = {"clip_by": "network"} if recipe.optimizer.clip_by == "part" else {}  # offloading clips by one norm
    if recipe.optimizer.kind in COMMUNICATES_IN_STEP:  # LARS and Muon can't be offloaded: they communicate
        changes["kind"] = "adamw"
    allowed = {s: make_ds(s, cluster.gpu.bf16) for s in shapes if not (s.offload and changes)}
    ranks = cluster.world_size
    sizes = micro_batches(recipe.data.global_batch, ranks)

    def largest(shape: Shape) -> tuple[DsConfig, Memory] | None:
        """The largest micro-batch that fits: found by linear estimates, then rehearsed."""
        for size in sizes[: 1 if shape.stage == 1 else None]:
            config, memory = fit(recipe, allowed[shape], RECOMMENDED, ranks, size)
            if memory.gib <= limit_gib:
                memory = with_margins(estimate_memory(recipe, config, ranks, on_gpu=True), ranks)
            if memory.gib <= limit_gib:
                return config, memory
        return None

    for shape in allowed:
        best, recomputed = largest(shape), shape._replace(checkpointing=True)
        # A micro-batch below 8 is worth a second forward pass to enlarge it.
        if best and recomputed in allowed and best[0].micro_batch < min(8, sizes[0]):
            larger = largest(recomputed)
            if larger and larger[0].micro_batch > best[0].micro_batch:
                shape, best = recomputed, larger
        if best:
            return shape, with_batch(allowed[shape], best[0].micro_batch, "auto"), *best
    options = " and ".join(f"--optimizer.{key} {value}" for key, value in changes.items())
    offloading = f"{options}, which allows offloading, " if changes else ""
    needed = min((fit(recipe, ds, RECOMMENDED, ranks, 1)[1].gib, str(shape)) for shape, ds in allowed.items())
    least = f"{needed[1]} with one image at a time needs {needed[0]:.1f} GiB"
    more = f"{offloading}more GPUs, larger ones, a smaller model or the recipe for small images, --config {SMALL}"
    raise ConfigError(f"nothing fits {limit_gib:g} GiB: {least}. Take {more}")


def check_new(path: Path) -> None:
    """Raises ConfigError where no new file can be written."""
    check_absent(path, "name another with --write")
    if not (path.absolute().parent.is_dir() and os.access(path.absolute().parent, os.W_OK)):
        raise ConfigError(f"--write {path}: its folder is missing or can't be written to")

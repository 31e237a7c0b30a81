"""How much memory a step needs on one device, by arithmetic, before anything is built.

The formulas count tensors, as the allocator of a GPU does; libraries, the context of a GPU and fragmentation come on
top. Tested against the tensors that a DeepSpeed engine holds and those that autograd saves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dino_ds.config.ds_check import offloads_optimizer, offloads_weights
from dino_ds.config.ds_config import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.costs.activations import MicroBatch, element_bytes
from dino_ds.costs.parameters import copied_names, group_sizes, prototype_sizes, recipe_sizes, vit_copied_names
from dino_ds.costs.teachers import pass_bytes, teacher_bytes

GIB = 2**30
_FP32 = 4
MOMENT_BYTES = {"adamw": 8, "sgd": 4, "lars": 4}
"""What each kind of optimizer keeps of a weight."""
# DeepSpeed's defaults.
_PERSISTENCE_THRESHOLD = 100_000
_MAX_LIVE = 1_000_000_000


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the fullest moment of a step. As text: without the parts of less than 1 %."""

    moment: str
    parts: dict[str, int]

    @property
    def gib(self) -> float:
        return sum(self.parts.values()) / GIB

    def __str__(self) -> str:
        parts = sorted(((n / GIB, name) for name, n in self.parts.items()), reverse=True)
        shown = ", ".join(f"{name} {gib:.2f}" for gib, name in parts if gib >= 0.01 * self.gib)
        return f"{self.gib:.2f} GiB at {self.moment}: {shown}"


def count_parameters(recipe: Recipe) -> int:
    """Weights of the student, head included; the teacher has as many."""
    return sum(recipe_sizes(recipe).values())


def estimate_memory(recipe: Recipe, config: DsConfig, world_size: int, on_gpu: bool, libraries: int = 0) -> Memory:
    """The peak on each of `world_size` devices.

    Off a GPU what is offloaded to the host counts too, and so do `libraries`: bytes of the process before it builds
    anything.
    """
    sizes = recipe_sizes(recipe)
    state = state_bytes(sizes, config, world_size, on_gpu, recipe.optimizer.kind, copied_names(recipe))
    state |= teacher_bytes(recipe, sizes, config, world_size)
    step = MicroBatch(recipe, config, on_gpu)
    gradients = gradient_bytes(sizes, config, world_size, on_gpu)
    buckets = bucket_bytes(config)
    last_state = state | {"gathered parameters": gathered_bytes(sizes, config, world_size)}
    # The heads' gradients are the first.
    share = sum(n for name, n in sizes.items() if not name.startswith("backbone.")) / sum(sizes.values())
    held = gradients if config.accumulation > 1 or config.stage == 3 else 0
    # Stage 1 reduces when the backward pass is over; a CPU has not yet given memory for buckets that nobody wrote to.
    late = config.stage == 1 and not config.raw["zero_optimization"].get("overlap_comm")
    whole = _gradient_element(config) * sum(sizes.values()) if late else gradients
    moments = {
        "the targets": {"Sinkhorn-Knopp": step.making_targets, "gradients": held},
        "a teacher's forward pass": {"teacher's activations": pass_bytes(recipe, config), "gradients": held},
        "the loss": {
            "activations": step.saved,
            "head and loss": step.head_and_loss,
            "gradients": held,
            "buckets": buckets if config.stage == 3 else 0,
        },
        **{
            one.name: {
                "activations": one.activations,
                "gradients": max(held, round((share + (1 - share) * one.done) * whole)),
                "buckets": 0 if late and not on_gpu and one.done < 1 else buckets,
            }
            for one in step.backward
        },
        "the optimizer": {
            "gradients": gradients + _optimizer_scratch(group_sizes(recipe), config, world_size, on_gpu),
            "buckets": buckets if config.stage == 3 else 0,
        },
    }
    # On a GPU the next batch is brought while this one is used.
    crops = step.crops + (step.one_batch if on_gpu else 0)
    common = last_state | {"crops": crops, "targets": step.targets, "libraries": 0 if on_gpu else libraries}
    peak = max(moments, key=lambda moment: sum(moments[moment].values()))
    return Memory(peak.partition(" (")[0], {name: n for name, n in (common | moments[peak]).items() if n})


def state_bytes(
    sizes: Mapping[str, int],
    config: DsConfig,
    world_size: int,
    on_gpu: bool,
    optimizer: str = "adamw",
    copied: Collection[str] | None = None,
) -> dict[str, int]:
    """What stays on a device from step to step: weights, FP32 masters and the optimizer's moments, and the teacher.

    copied: names of the weights of which a teacher keeps a low-precision copy, None: those of a ViT's.

    ZeRO 1 and 2 keep a copy of FP32 weights as masters too; stage 0 trains FP32 weights in place.
    """
    total = sum(sizes.values())
    shards = world_size if config.stage else 1
    student = element_bytes(config) * total // (world_size if config.stage == 3 else 1)
    if config.stage == 3 and world_size > 1:
        least = persistent_below(config)
        student += element_bytes(config) * sum(n for n in sizes.values() if n <= least)
    masters = 4 * total if config.stage else 0
    zero = config.raw["zero_optimization"]
    on_host = on_gpu and offloads_optimizer(zero)
    params_on_host = on_gpu and offloads_weights(zero)
    copies = config.keeps_teacher_copy(on_gpu, total)
    copied = vit_copied_names(sizes) if copied is None else copied
    # ZeRO++: each node keeps a second copy of the weights, cut among its ranks.
    node = min(int(zero.get("zero_hpz_partition_size", 1)), world_size)
    return {
        "student": 0 if params_on_host else student,
        "second copy of the student": element_bytes(config) * total // node if node > 1 else 0,
        "masters and moments": 0 if on_host else (masters + MOMENT_BYTES[optimizer] * total) // shards,
        "teacher": _FP32 * total,
        "teacher copy": 2 * sum(sizes[name] for name in copied) if copies else 0,
    }


def gradient_bytes(sizes: Mapping[str, int], config: DsConfig, world_size: int, on_gpu: bool) -> int:
    """Gradients at the end of a backward pass, in the dtype in which they are accumulated."""
    zero, total = config.raw["zero_optimization"], sum(sizes.values())
    if on_gpu and config.stage and offloads_optimizer(zero):
        return 0  # copied to the host as they come
    if config.stage == 3:
        return _gradient_element(config) * total // world_size
    if config.stage == 0 or (config.stage == 1 and config.accumulation > 1):
        return _gradient_element(config) * total
    # A tensor that reaches into two ranks' parts is kept whole on both: the prototypes of a head are one tensor.
    whole = sum(prototype_sizes(sizes)) if world_size > 1 else 0
    return _gradient_element(config) * ((total - whole) // world_size + whole)


def bucket_bytes(config: DsConfig) -> int:
    """The buffers in which gradients are reduced: two with overlap at stages 1 and 2."""
    zero = config.raw["zero_optimization"]
    if config.stage == 0 or not zero.get("contiguous_gradients", True):
        return 0
    buffers = 2 if config.stage < 3 and zero.get("overlap_comm") else 1
    return buffers * int(zero["reduce_bucket_size"]) * element_bytes(config)


def gathered_bytes(sizes: Mapping[str, int], config: DsConfig, world_size: int) -> int:
    """ZeRO 3: whole parameters while they are in use, at most `stage3_max_live_parameters`."""
    zero = config.raw["zero_optimization"]
    if config.stage < 3 or (world_size == 1 and not offloads_weights(zero)):
        return 0
    live = zero.get("stage3_max_live_parameters", _MAX_LIVE)
    least = persistent_below(config)
    sharded = sum(n for n in sizes.values() if n > least)
    return element_bytes(config) * min(sharded, live)


def _optimizer_scratch(groups: Sequence[int], config: DsConfig, world_size: int, on_gpu: bool) -> int:
    """DeepSpeed's flat copy of the gradients of the largest parameter group, and its FP32 form."""
    if config.stage == 0 or (on_gpu and offloads_optimizer(config.raw["zero_optimization"])):
        return 0
    element = _gradient_element(config)
    return max(groups) * (element + (_FP32 if element < _FP32 else 0)) // world_size


def _gradient_element(config: DsConfig) -> int:
    wide = config.raw.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    return _FP32 if wide else element_bytes(config)


def persistent_below(config: DsConfig) -> int:
    """ZeRO 3: parameters of this many elements or fewer stay whole."""
    zero = config.raw["zero_optimization"]
    return int(zero.get("stage3_param_persistence_threshold", _PERSISTENCE_THRESHOLD))

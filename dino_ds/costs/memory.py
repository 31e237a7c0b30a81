"""How much memory a step needs on one device, by arithmetic, before anything is built.

The formulas count tensors, as the allocator of a GPU does; libraries, the context of a GPU and fragmentation come on
top. Tested against the tensors that a DeepSpeed engine holds and those that autograd saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dino_ds.backbones import ViTSpec
from dino_ds.config.crops import crop_sizes, student_sizes, teacher_sizes
from dino_ds.config.ds_check import offloads_optimizer
from dino_ds.config.ds_config import DsConfig, PerformanceOptions
from dino_ds.config.recipe import Recipe
from dino_ds.costs.flops import HeadSizes, tokens_of, vit_of
from dino_ds.costs.parameters import PROTOTYPES, mlp_widths, parameter_sizes

GIB = 2**30
_FP32 = 4
# DeepSpeed's defaults.
_PERSISTENCE_THRESHOLD = 100_000
_MAX_LIVE = 1_000_000_000
# As in models/head.py.
_PROTOTYPE_BLOCK = 16384


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
    state = state_bytes(sizes, config, world_size, on_gpu)
    step = _Step(recipe, config)
    gradients = gradient_bytes(sizes, config, world_size, on_gpu)
    buckets = bucket_bytes(config)
    last_state = state | {"gathered parameters": gathered_bytes(sizes, config, world_size)}
    # The head's gradients are the first.
    share = sum(n for name, n in sizes.items() if name.startswith("head.")) / sum(sizes.values())
    held = gradients if config.accumulation > 1 or config.stage == 3 else 0
    # Stage 1 reduces when the backward pass is over; a CPU has not yet given memory for buckets that nobody wrote to.
    late = config.stage == 1 and not config.raw["zero_optimization"].get("overlap_comm")
    whole = _gradient_element(config) * sum(sizes.values()) if late else gradients
    moments = {
        "the loss": {
            "activations": step.saved,
            "head and loss": step.loss,
            "gradients": held,
            "buckets": buckets if config.stage == 3 else 0,
        },
        "the first blocks of the backward pass": {
            "activations": step.saved - step.last_block + step.last_whole_block,
            "head and loss": step.logits,
            "gradients": max(held, round(share * whole)),
            "buckets": 0 if late and not on_gpu else buckets,
        },
        "the end of the backward pass": {
            "activations": step.first_block,
            "head and loss": step.logits,
            "gradients": whole,
            "buckets": buckets,
        },
        "the optimizer": {
            "head and loss": step.logits,
            "gradients": gradients + _optimizer_scratch(sizes, config, world_size, on_gpu),
            "buckets": buckets if config.stage == 3 else 0,
        },
    }
    # On a GPU the next batch is brought while this one is used.
    common = last_state | {"crops": step.crops * (2 if on_gpu else 1), "libraries": 0 if on_gpu else libraries}
    peak = max(moments, key=lambda moment: sum(moments[moment].values()))
    return Memory(peak, {name: n for name, n in (common | moments[peak]).items() if n})


def state_bytes(sizes: Mapping[str, int], config: DsConfig, world_size: int, on_gpu: bool) -> dict[str, int]:
    """What stays on a device from step to step: weights, FP32 masters and Adam's moments, and the teacher.

    ZeRO 1 and 2 keep a copy of FP32 weights as masters too; stage 0 trains FP32 weights in place.
    """
    total = sum(sizes.values())
    shards = world_size if config.stage else 1
    student = element_bytes(config) * total // (world_size if config.stage == 3 else 1)
    if config.stage == 3 and world_size > 1:
        student += element_bytes(config) * sum(n for n in sizes.values() if n <= persistent_below(config))
    masters = 4 * total if config.stage else 0
    zero = config.raw["zero_optimization"]
    on_host = on_gpu and offloads_optimizer(zero)
    params_on_host = on_gpu and zero.get("offload_param", {}).get("device", "none") != "none"
    copies = config.keeps_teacher_copy(on_gpu, total)
    copied = sum(n for name, n in sizes.items() if _in_teacher_copy(name)) if copies else 0
    # ZeRO++: each node keeps a second copy of the weights, cut among its ranks.
    node = min(int(zero.get("zero_hpz_partition_size", 1)), world_size)
    return {
        "student": 0 if params_on_host else student,
        "second copy of the student": element_bytes(config) * total // node if node > 1 else 0,
        "masters and moments": 0 if on_host else (masters + 8 * total) // shards,
        "teacher": _FP32 * total,
        "teacher copy": 2 * copied,
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
    # A tensor that reaches into two ranks' parts is kept whole on both: the prototypes are one tensor.
    whole = sizes[PROTOTYPES] if world_size > 1 else 0
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
    if config.stage < 3 or (world_size == 1 and zero.get("offload_param", {}).get("device", "none") == "none"):
        return 0
    live = zero.get("stage3_max_live_parameters", _MAX_LIVE)
    sharded = sum(n for n in sizes.values() if n > persistent_below(config))
    return element_bytes(config) * min(sharded, live)


def block_bytes(
    arch: ViTSpec,
    groups: list[tuple[int, int]],
    element: int,
    performance: PerformanceOptions,
    cls_only: bool = False,
) -> int:
    """What autograd saves of one block; groups (sequences, tokens of each) per size; element: bytes of a number.

    Per token, in widths d and MLP widths h: block input, norm, q, k, v, attention's output (per size, and joined),
    input of the second norm, norm; two times h (SwiGLU: also the gate's activation); LayerScale 2 d; FP32 statistics.
    Compiled blocks recompute norms and activation: an estimate.
    """
    tokens, sequences = sum(s * n for s, n in groups), sum(s for s, _ in groups)
    packed, hidden = mlp_widths(arch)
    d, statistics = arch.width, 8
    per_query = 5 * d + packed + hidden * (2 if arch.swiglu else 1) + (2 * d if arch.layer_scale is not None else 0)
    per_token = 4 * d
    if performance.attention == "varlen":
        per_query -= d
    if performance.compile != "off":
        per_query, per_token = per_query - d - hidden, per_token - d
    queries = sequences if cls_only else tokens
    # CLS only: the norm's CLS rows are gathered for the query.
    numbers = tokens * per_token + queries * (per_query + (d if cls_only else 0))
    floats = tokens * statistics + queries * statistics
    if performance.attention == "naive":
        scores = sum(s * n * (1 if cls_only else n) for s, n in groups) * arch.heads
        return (numbers + scores - queries * d) * element + floats  # the softmax is kept, its product is not
    return numbers * element + floats + queries * arch.heads * 4


def saved_bytes(recipe: Recipe, config: DsConfig) -> int:
    """What autograd keeps of one micro-batch's forward pass, weights and logits left out."""
    return _Step(recipe, config).saved


class _Step:
    """Bytes of one micro-batch. `saved`: by autograd, in all blocks; `last_block`: its part of that.

    `first_block` and `last_whole_block`: what the backward pass adds there; `loss`: at the loss, `logits`: what is
    still there of it later; `crops`: the images themselves.
    """

    def __init__(self, recipe: Recipe, config: DsConfig) -> None:
        arch, crops, images = vit_of(recipe), recipe.crops.groups, config.micro_batch
        sides = student_sizes(crops)
        element, performance = element_bytes(config), config.performance
        groups = [(sides.count(side) * images, tokens_of(arch, side)) for side in dict.fromkeys(sides)]
        tokens, rows = sum(s * n for s, n in groups), len(sides) * images
        pixels = images * sum(arch.in_chans * side**2 for side in crop_sizes(crops))
        whole = block_bytes(arch, groups, element, performance)
        last = block_bytes(arch, groups, element, performance, cls_only=performance.cls_only_last_block)
        blocks = recomputed_blocks(recipe, config)
        stream = 0 if config.checkpoint_on_cpu else element * tokens * arch.width
        kept = [stream] * blocks + self._blocks(recipe, whole, last, element * tokens)[blocks:]
        self.saved = sum(kept) + element * pixels + self._head_mlp(recipe, rows, element)
        self.last_block = kept[-1]
        # In the MLP: the gradients of both sides of its activation and of the stream. A block that was recomputed
        # for this moment drops one of its saved tensors for each gradient.
        packed, hidden = mlp_widths(arch)
        recomputed = element * tokens * (packed + arch.width) + whole
        remembered = element * tokens * (packed + hidden + arch.width)
        self.last_whole_block = recomputed if blocks == arch.depth else remembered
        self.first_block = element * pixels + (recomputed + stream if blocks else remembered + whole)
        self.crops = _FP32 * pixels
        self._heads_loss(recipe, images, rows, element)

    def _blocks(self, recipe: Recipe, whole: int, last: int, per_number: int) -> list[int]:
        """What each block saves: batched stochastic depth computes a part, the other kind keeps two scales a token."""
        model, depth = recipe.model, vit_of(recipe).depth
        rates = [model.drop_path * i / max(depth - 1, 1) for i in range(depth)]
        sizes = [whole] * (depth - 1) + [last]
        if model.stochastic_depth == "batched":
            return [round(size * (1 - rate)) for size, rate in zip(sizes, rates, strict=True)]
        scales = 2 * per_number if model.drop_path else 0
        return [size + scales for size in sizes[:-1]] + [last]

    def _head_mlp(self, recipe: Recipe, rows: int, element: int) -> int:
        """Inputs of the head's linear layers and GELUs, and its normalised output."""
        head = recipe.head
        width = vit_of(recipe).width
        return rows * (element * (2 * width + 2 * (head.layers - 1) * head.hidden) + _FP32 * 2 * head.bottleneck)

    def _heads_loss(self, recipe: Recipe, images: int, rows: int, element: int) -> None:
        """Logits are FP32 and their gradient takes their place."""
        head = recipe.head
        row, weights = _FP32 * head.prototypes, _FP32 * head.prototypes * head.bottleneck
        teacher_rows = len(teacher_sizes(recipe.crops.groups)) * images
        self.logits = row * (rows + teacher_rows)
        # The teacher's entropy: log-probabilities, probabilities and their product.
        entropy = 3 * row * teacher_rows
        # The prototypes' gradient in FP32, its copy in low precision, and what one block of them needs.
        block = _FP32 * min(head.prototypes, _PROTOTYPE_BLOCK) * (rows + 2 * head.bottleneck)
        gradient = weights + (weights // 2 if element < _FP32 else 0) + block
        self.loss = self.logits + row + max(entropy, gradient)


def recipe_sizes(recipe: Recipe) -> Mapping[str, int]:
    """Elements of every parameter of the student, by its name."""
    head = HeadSizes(recipe.head.prototypes, recipe.head.hidden, recipe.head.bottleneck, recipe.head.layers)
    return parameter_sizes(vit_of(recipe), recipe.crops.global_size, head)


def recomputed_blocks(recipe: Recipe, config: DsConfig) -> int:
    """Blocks that activation checkpointing computes again in the backward pass."""
    depth = vit_of(recipe).depth
    return depth if config.checkpoint_blocks == "all" else min(int(config.checkpoint_blocks), depth)


def _optimizer_scratch(sizes: Mapping[str, int], config: DsConfig, world_size: int, on_gpu: bool) -> int:
    """DeepSpeed's flat copy of the gradients of one parameter group, and its FP32 form."""
    if config.stage == 0 or (on_gpu and offloads_optimizer(config.raw["zero_optimization"])):
        return 0
    largest = max(sum(sizes.values()) - sizes[PROTOTYPES], sizes[PROTOTYPES])
    element = _gradient_element(config)
    return largest * (element + (_FP32 if element < _FP32 else 0)) // world_size


def element_bytes(config: DsConfig) -> int:
    """Of a weight in the engine's precision."""
    return _FP32 if config.precision == "fp32" else 2


def _gradient_element(config: DsConfig) -> int:
    wide = config.raw.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    return _FP32 if wide else element_bytes(config)


def persistent_below(config: DsConfig) -> int:
    """ZeRO 3: parameters of this many elements or fewer stay whole."""
    zero = config.raw["zero_optimization"]
    return int(zero.get("stage3_param_persistence_threshold", _PERSISTENCE_THRESHOLD))


def _in_teacher_copy(name: str) -> bool:
    """Whether it belongs to a linear layer or the patch embedding."""
    return any(part in name for part in (".attn.", ".mlp.", ".patch_embed."))

"""What one micro-batch keeps in memory for its backward pass, and what its loss needs meanwhile, by arithmetic."""

from __future__ import annotations

from typing import NamedTuple

from dino_ds.config.crops import crop_sizes, student_sizes, teacher_sizes
from dino_ds.config.ds_config import DsConfig, PerformanceOptions
from dino_ds.config.recipe import Recipe
from dino_ds.costs.flops import tokens_of, vit_of
from dino_ds.costs.objective import CrossEntropy, HeadSizes, ObjectiveCosts, last_tokens
from dino_ds.costs.parameters import mlp_widths
from dino_ds.method.specs.gram import GRAM
from dino_ds.models.specs.backbones import ViTSpec

_FP32 = 4
# As in models/prototypes.py: bytes of a tile of logits and of a part of it, on a CPU and on a GPU; prototypes whose
# gradient is finished at a time.
_TILE = (32 * 2**20, 128 * 2**20)
_PART = (2**20, 128 * 2**20)
# As in method/gram.py.
_GRAM_PIECE = (4 * 2**20, 128 * 2**20)
# As in method/centering.py.
_KEPT = (160 * 2**20, 0)
_PROTOTYPE_BLOCK = (16384, 65536)


class BackwardMoment(NamedTuple):
    """Bytes of activations while the backbone's gradients are made, `done`: the part of them that is finished."""

    name: str
    activations: int
    done: float


class MicroBatch:
    """Bytes of one micro-batch.

    `saved`: by autograd, in the backbone (`in_backbone`) and the heads, without weights and the prototypes' gradients;
    `backward`: the fullest moments of the backbone's backward pass; `making_targets`: by Sinkhorn-Knopp, before the
    student's forward pass; `head_and_loss`: at the fullest moment of the loss, beyond what is saved; `one_batch`: the
    images themselves. `crops` and `targets`, the teacher's rows: of all micro-batches that are prepared together.
    """

    def __init__(self, recipe: Recipe, config: DsConfig, on_gpu: bool = False) -> None:
        spec, images = recipe.model.spec(), config.micro_batch
        self._images, self._width, self._element = images, spec.width, element_bytes(config)
        objective, sides = ObjectiveCosts.of(recipe), crop_sizes(recipe.groups)
        pixels = images * sum(spec.in_chans * side**2 for side in sides)
        self._heads = [self._head_bytes(one) for one in objective.cross_entropies]
        if isinstance(spec, ViTSpec):
            features = self._vit(recipe, config, objective, pixels)
        else:
            features = 0
            self._measured(recipe, config)
        self.saved = self.in_backbone + sum(self._heads)
        window = config.accumulation if objective.sinkhorn and objective.cross_entropies else 1
        self.one_batch = _FP32 * pixels
        self.crops = self.one_batch * window
        rows = sum(one.teacher_rows * one.sizes.bottleneck for one in objective.cross_entropies)
        self.targets = round(_FP32 * rows * images) * window + self._gram_targets(recipe, objective)
        extra = features if objective.patches else 0
        self._part, self._block = _PART[on_gpu], _PROTOTYPE_BLOCK[on_gpu]
        self.head_and_loss = extra + max(
            self._fullest_loss(objective, _TILE[on_gpu]), self._gram_bytes(recipe, objective, _GRAM_PIECE[on_gpu])
        )
        passes = [self._sinkhorn_bytes(one, _TILE[on_gpu], window, _KEPT[on_gpu]) for one in objective.cross_entropies]
        self.making_targets = max(passes, default=0) if objective.sinkhorn else 0

    def _measured(self, recipe: Recipe, config: DsConfig) -> None:
        from dino_ds.costs.measured import measure_student

        segments = recomputed_blocks(recipe, config)
        found = measure_student(recipe, config.precision, segments)
        on_host = self._images * found.inputs * segments / recipe.model.spec().depth if config.checkpoint_on_cpu else 0
        self.in_backbone = round(found.saved.of(self._images) - on_host)
        self.backward = [
            BackwardMoment(f"the backward pass ({i})", round(one.of(self._images) - on_host * (1 - one.done)), one.done)
            for i, one in enumerate(found.backward)
        ]

    def _vit(self, recipe: Recipe, config: DsConfig, objective: ObjectiveCosts, pixels: int) -> int:
        """By arithmetic; gives the bytes of the features."""
        arch, element, crops = vit_of(recipe), self._element, recipe.groups
        sides = student_sizes(crops)
        sizes = list(dict.fromkeys(sides))
        groups = [(sides.count(side) * self._images, tokens_of(arch, side)) for side in sizes]
        kept = list(last_tokens(objective.patches, crops, sizes, arch.patch_size).values())
        given = sum(s * q for (s, _), q in zip(groups, kept, strict=True))
        blocks, last_block, first_block = self._blocks(recipe, config, groups, kept)
        # The final norm's input; with all patches its output is cut apart, and lives as long as the heads work.
        features = element * given * arch.width
        self.in_backbone = blocks + element * pixels + features + rope_bytes(recipe, sizes)
        self.backward = [
            BackwardMoment("the first blocks of the backward pass", self.in_backbone + last_block, 0.0),
            BackwardMoment("the end of the backward pass", first_block + element * pixels, 1.0),
        ]
        return features

    def _blocks(
        self, recipe: Recipe, config: DsConfig, groups: list[tuple[int, int]], kept: list[int]
    ) -> tuple[int, int, int]:
        """What all blocks save, and what the backward pass adds at the last one and holds at the first one."""
        arch, element, performance = vit_of(recipe), self._element, config.performance
        tokens = sum(s * n for s, n in groups)
        whole = block_bytes(arch, groups, element, performance)
        reduced = performance.cls_only_last_block
        last = block_bytes(arch, groups, element, performance, kept if reduced else None)
        recomputed_ones = recomputed_blocks(recipe, config)
        stream = 0 if config.checkpoint_on_cpu else element * tokens * arch.width
        each = _saved_by_blocks(recipe, whole, last, element * tokens)
        found = [stream] * recomputed_ones + each[recomputed_ones:]
        # In the MLP: the gradients of both sides of its activation and of the stream. A block that was recomputed
        # for this moment keeps its saved tensors meanwhile.
        packed, hidden = mlp_widths(arch)
        recomputed = element * tokens * (packed + hidden + arch.width) + whole
        remembered = element * tokens * (packed + hidden + arch.width)
        ends = sum(s * q for (s, _), q in zip(groups, kept, strict=True)) if reduced else tokens
        in_last = element * ends * (packed + hidden + arch.width)
        before_it = (recomputed if recomputed_ones == arch.depth else remembered) - found[-1]
        first_block = recomputed + stream if recomputed_ones else remembered + whole
        return sum(found), max(in_last, before_it), first_block

    def _head_bytes(self, one: CrossEntropy) -> int:
        """Inputs of the head's layers, BatchNorms and GELUs, its output in FP32 and the gradient of its unit rows."""
        head = one.sizes
        kept = 3 if head.batch_norm else 2
        row = self._element * (self._width + kept * (head.layers - 1) * head.hidden) + _FP32 * 2 * head.bottleneck
        return round(one.student_rows * self._images * row)

    def _fullest_loss(self, objective: ObjectiveCosts, tile: int) -> int:
        """The heads work one after the other, and finish in the opposite order: each one's gradient of the prototypes
        is made in the forward pass and waits, in FP32, for the backward pass."""
        low = self._element < _FP32
        waiting, moments = 0, [0]
        for i, one in enumerate(objective.cross_entropies):
            weights = _FP32 * one.sizes.prototypes * one.sizes.bottleneck
            waiting += weights
            later = sum(self._heads[i + 1 :])
            copy = weights if low else 0
            moments.append(waiting + copy + self._tile_bytes(one, tile) - later)
        largest = max((one.sizes for one in objective.cross_entropies), key=_weights, default=None)
        if largest is not None:
            block = _FP32 * min(largest.prototypes, self._block) * largest.bottleneck
            moments.append(waiting + (_weights(largest) * self._element if low else 0) + block * (2 if low else 1))
        return max(moments)

    def _gram_targets(self, recipe: Recipe, objective: ObjectiveCosts) -> int:
        """The patches of Gram anchoring's teacher, of its own grid."""
        if objective.gram is None:
            return 0
        sides = teacher_sizes(recipe.groups, GRAM) or [0]
        stride = recipe.model.spec().stride
        patches = sum((side // stride) ** 2 for side in sides) or objective.gram.crops * objective.gram.patches
        return _FP32 * patches * self._width * self._images

    def _gram_bytes(self, recipe: Recipe, objective: ObjectiveCosts, piece: int) -> int:
        """Rows of both in FP32, of length 1, and the gradient; pieces of both matrices of similarities; the teacher's
        map in the order that resizing takes it."""
        gram = objective.gram
        if gram is None:
            return 0
        rows = _FP32 * gram.crops * gram.patches * self._images * self._width
        low = self._element < _FP32
        own = self._gram_targets(recipe, objective)
        turned = own if own != rows else 0
        return (4 if low else 3) * rows + 2 * min(piece, _FP32 * gram.numbers(self._images)) + turned

    def _tile_bytes(self, one: CrossEntropy, tile: int) -> int:
        """Room for the logits of both; and for a part of it, which is all on a GPU, softmax, sums and products."""
        k, c = one.sizes.prototypes, one.sizes.bottleneck
        most, groups = max(one.student_crops, one.crops), one.groups * self._images
        n, part = (min(max(1, size // (_FP32 * k) // most), groups) for size in (tile, self._part))
        extra = max(one.crops, 2 + (one.crops > 1))
        parts = part * (one.crops + max(one.student_crops - one.crops, one.crops) + extra)
        return round(_FP32 * (k * (n * (one.student_crops + one.crops) + parts) + 2 * n * most * c))

    def _sinkhorn_bytes(self, one: CrossEntropy, tile: int, window: int, kept: int) -> int:
        """Tiles that are kept from pass to pass, and the room of one more and of two parts."""
        k = one.sizes.prototypes
        rows = _FP32 * k * one.teacher_rows * self._images
        keeps = kept // max(_FP32 * k * (tile // (_FP32 * k)), _FP32 * k)
        return round(min(keeps * tile, rows * window) + min(tile, rows) + 2 * min(self._part, rows))


def _weights(head: HeadSizes) -> int:
    return head.prototypes * head.bottleneck


def rope_bytes(recipe: Recipe, sides: list[int]) -> int:
    """Tables of rotary positions for each size, FP32: of each block where training changes the coordinates."""
    arch, model = vit_of(recipe), recipe.model
    if arch.rope is None:
        return 0
    changed = any((model.rope_shift, model.rope_jitter, model.rope_rescale))
    patches = sum((side // arch.patch_size) ** 2 for side in sides)
    return _FP32 * patches * (arch.width // arch.heads) * (arch.depth if changed else 1)


def _saved_by_blocks(recipe: Recipe, whole: int, last: int, per_number: int) -> list[int]:
    """What each block saves: batched stochastic depth computes a part, the other kind keeps two scales a token."""
    model, depth = recipe.model, vit_of(recipe).depth
    if model.drop_path_growth == "uniform":
        rates = [model.drop_path] * depth
    else:
        rates = [model.drop_path * i / max(depth - 1, 1) for i in range(depth)]
    sizes = [whole] * (depth - 1) + [last]
    if model.stochastic_depth == "batched":
        return [round(size * (1 - rate)) for size, rate in zip(sizes, rates, strict=True)]
    scales = 2 * per_number if model.drop_path else 0
    return [size + scales for size in sizes[:-1]] + [last]


def block_bytes(
    arch: ViTSpec,
    groups: list[tuple[int, int]],
    element: int,
    performance: PerformanceOptions,
    kept: list[int] | None = None,
) -> int:
    """What autograd saves of one block; groups (sequences, tokens of each) per size; element: bytes of a number; kept:
    by size the tokens of each sequence for which the block is computed to its end, None: all.

    Per token, in widths d and MLP widths h: block input, norm, q, k, v, attention's output (per size, and joined),
    input of the second norm, norm; h before the activation (SwiGLU: gate and value); LayerScale 2 d; FP32 statistics.
    Rotary positions add nothing: queries and keys are rotated where they lie.
    Compiled blocks recompute norms: an estimate.
    """
    tokens = sum(s * n for s, n in groups)
    packed, _ = mlp_widths(arch)
    d, statistics = arch.width, 8
    per_query = 5 * d + packed + (2 * d if arch.layer_scale is not None else 0)
    per_token = 4 * d
    if performance.attention == "varlen":
        per_query -= d
    if performance.compile != "off":
        per_query, per_token = per_query - d, per_token - d
    asking = [n for _, n in groups] if kept is None else kept
    queries, selects = sum(s * q for (s, _), q in zip(groups, asking, strict=True)), asking != [n for _, n in groups]
    # The norm's rows are gathered for the queries of fewer.
    numbers = tokens * per_token + queries * (per_query + (d if selects else 0))
    floats = tokens * statistics + queries * statistics
    if performance.attention == "naive":
        scores = sum(s * n * q for (s, n), q in zip(groups, asking, strict=True)) * arch.heads
        return (numbers + scores - queries * d) * element + floats  # the softmax is kept, its product is not
    return numbers * element + floats + queries * arch.heads * 4


def recomputed_blocks(recipe: Recipe, config: DsConfig) -> int:
    """Blocks that activation checkpointing computes again in the backward pass."""
    depth = recipe.model.spec().depth
    return depth if config.checkpoint_blocks == "all" else min(int(config.checkpoint_blocks), depth)


def element_bytes(config: DsConfig) -> int:
    """Of a weight in the engine's precision."""
    return _FP32 if config.precision == "fp32" else 2

"""Floating-point operations that one image costs in a training step.

A multiply-add is 2; matrix products and convolutions count, norms, activations and softmax don't, and nothing that is
computed twice (activation checkpointing, flash attention's backward pass). The backward pass is twice the forward pass,
but for the patch embedding, whose images need no gradient: once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dino_ds.backbones import ViTSpec
from dino_ds.config.crops import CropGroup, student_sizes, teacher_sizes
from dino_ds.config.recipe import Recipe
from dino_ds.errors import ConfigError


class NotEstimated(ConfigError):
    """There is no formula for this backbone."""


def vit_of(recipe: Recipe) -> ViTSpec:
    """The backbone that the formulas of this room are for. Raises NotEstimated for another kind."""
    spec = recipe.model.spec()
    if not isinstance(spec, ViTSpec):
        raise NotEstimated(
            f"memory and time are not estimated for model.backbone {recipe.model.backbone}: only for ViTs"
        )
    return spec


@dataclass(frozen=True)
class HeadSizes:
    """The projection head: `layers` linear layers to `bottleneck`, then the prototypes."""

    prototypes: int
    hidden: int
    bottleneck: int
    layers: int


def step_flops(
    arch: ViTSpec, head: HeadSizes, crops: Sequence[CropGroup], cls_only_last_block: bool = False
) -> dict[str, int]:
    """Per image, by part.

    With `cls_only_last_block` what is done then, else the whole model's, the usual base of MFU.
    """
    found, row = {}, head_flops(arch.width, head)
    # The backward pass costs twice the forward pass, that of the patch embedding once.
    for who, sizes, times in (("student", student_sizes(crops), 3), ("teacher", teacher_sizes(crops), 1)):
        patch, linear, attention = zip(*(_forward(arch, side, cls_only_last_block) for side in sizes), strict=True)
        found[f"{who}_patch"] = min(times, 2) * sum(patch)
        found[f"{who}_linear"] = times * sum(linear)
        found[f"{who}_attention"] = times * sum(attention)
        found[f"{who}_head"] = times * len(sizes) * row
    return found


def head_flops(width: int, head: HeadSizes) -> int:
    """Of one feature vector, forward."""
    sizes = [width, *[head.hidden] * (head.layers - 1), head.bottleneck, head.prototypes]
    return 2 * sum(a * b for a, b in itertools.pairwise(sizes))


def tokens_of(arch: ViTSpec, side: int) -> int:
    """Tokens of a square crop of `side` pixels."""
    return (side // arch.patch_size) ** 2 + 1 + arch.registers


def ffn_weights(arch: ViTSpec) -> int:
    """Elements of the matrices of one block's MLP."""
    hidden = int(arch.width * arch.mlp_ratio)
    return arch.width * (hidden + (hidden // 2 if arch.swiglu else hidden))


def _forward(arch: ViTSpec, side: int, cls_only_last_block: bool) -> tuple[int, int, int]:
    """Of one crop: patch embedding, linear layers of all blocks, attention of all blocks."""
    n, d = tokens_of(arch, side), arch.width
    patch = 2 * (side // arch.patch_size) ** 2 * arch.in_chans * arch.patch_size**2 * d
    linear, attention = 2 * n * (4 * d * d + ffn_weights(arch)), 4 * n * n * d
    last_linear, last_attention = linear, attention
    if cls_only_last_block:
        # Keys and values of all tokens; query, projection and MLP of one.
        last_linear = 2 * n * 2 * d * d + 2 * (2 * d * d + ffn_weights(arch))
        last_attention = 4 * n * d
    return patch, (arch.depth - 1) * linear + last_linear, (arch.depth - 1) * attention + last_attention

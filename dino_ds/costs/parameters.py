"""How many weights a network has, tensor by tensor, without building it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from dino_ds.backbones import ViTSpec
from dino_ds.costs.flops import HeadSizes

PROTOTYPES = "head.prototypes.weight"


@functools.cache
def parameter_sizes(arch: ViTSpec, image_size: int, head: HeadSizes) -> Mapping[str, int]:
    """Elements of every parameter of backbone and head, by the network's names; `image_size` of the global crops."""
    shapes = {f"backbone.{name}": shape for name, shape in _backbone(arch, image_size)}
    shapes |= {f"head.{name}": shape for name, shape in _head(arch.width, head)}
    return MappingProxyType({name: math.prod(shape) for name, shape in shapes.items()})


def _backbone(arch: ViTSpec, image_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, registers = arch.width, arch.registers
    patches = (image_size // arch.patch_size) ** 2
    yield "cls_token", (d,)
    if registers:
        yield "reg_token", (registers, d)
    yield "pos_embed", (patches if registers else patches + 1, d)
    yield "patch_embed.proj.weight", (d, arch.in_chans, arch.patch_size, arch.patch_size)
    yield "patch_embed.proj.bias", (d,)
    for i in range(arch.depth):
        for name, shape in _block(arch):
            yield f"blocks.{i}.{name}", shape
    yield "norm.weight", (d,)
    yield "norm.bias", (d,)


def _block(arch: ViTSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, (packed, hidden) = arch.width, mlp_widths(arch)
    for norm in ("norm1", "norm2"):
        yield f"{norm}.weight", (d,)
        yield f"{norm}.bias", (d,)
    for name, n_in, n_out in (
        ("attn.qkv", d, 3 * d),
        ("attn.proj", d, d),
        ("mlp.fc1", d, packed),
        ("mlp.fc2", hidden, d),
    ):
        yield f"{name}.weight", (n_out, n_in)
        yield f"{name}.bias", (n_out,)
    if arch.layer_scale is not None:
        yield "ls1.gamma", (d,)
        yield "ls2.gamma", (d,)


def mlp_widths(arch: ViTSpec) -> tuple[int, int]:
    """Outputs of a block's first MLP layer and inputs of its second: SwiGLU packs gate and value into the first."""
    packed = int(arch.width * arch.mlp_ratio)
    return packed, packed // 2 if arch.swiglu else packed


def _head(width: int, head: HeadSizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    sizes = [width, *[head.hidden] * (head.layers - 1), head.bottleneck]
    for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        yield f"mlp.{2 * i}.weight", (n_out, n_in)  # a GELU lies between two layers
        yield f"mlp.{2 * i}.bias", (n_out,)
    yield "prototypes.weight", (head.prototypes, head.bottleneck)

"""How many weights a network has, tensor by tensor, without building it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from dino_ds.config.recipe import Recipe
from dino_ds.costs.objective import HEAD, IBOT_HEAD, HeadSizes, ObjectiveCosts
from dino_ds.models.specs.backbones import BackboneSpec, ViTSpec

_Shape = tuple[int, ...]


@functools.cache
def parameter_sizes(
    arch: BackboneSpec,
    image_size: int,
    head: HeadSizes | None = None,
    ibot_head: HeadSizes | None = None,
    mask_token: bool = False,
    regressions: tuple[tuple[str, int], ...] = (),
) -> Mapping[str, int]:
    """Elements of every parameter of backbone and heads, by the network's names; `image_size` of the global crops;
    regressions: names and widths of linear heads."""
    shapes = _shapes(arch, image_size, head, ibot_head, mask_token, regressions)
    return MappingProxyType({name: math.prod(shape) for name, shape in shapes.items()})


def recipe_sizes(recipe: Recipe) -> Mapping[str, int]:
    """Elements of every parameter of a recipe's student, by its name. Raises NotEstimated."""
    return parameter_sizes(*_network_of(recipe))


def prototype_sizes(sizes: Mapping[str, int]) -> list[int]:
    """Elements of the prototypes of each head."""
    return [n for name, n in sizes.items() if name.endswith("prototypes.weight")]


@functools.cache
def copied_names(recipe: Recipe) -> frozenset[str]:
    """The parameters of which a low-precision teacher keeps a copy: those of linear layers and convolutions."""
    spec, sizes = recipe.model.spec(), recipe_sizes(recipe)
    if isinstance(spec, ViTSpec):
        return vit_copied_names(sizes)
    from dino_ds.costs.measured import parameters_of

    heads = frozenset(name for name in sizes if not name.startswith("backbone.") and ".mlp." in name)
    return heads.union(f"backbone.{name}" for name in parameters_of(spec, recipe.crops.global_size).cast)


def vit_copied_names(names: Iterable[str]) -> frozenset[str]:
    """Those of linear layers and the patch embedding; biases that RoPE's attention owns itself are not."""
    layers = (".attn.qkv.", ".attn.proj.", ".mlp.", ".patch_embed.")
    return frozenset(n for n in names if any(part in n for part in layers))


@functools.cache
def group_sizes(recipe: Recipe) -> tuple[int, ...]:
    """Elements of each of the optimizer's parameter groups, as `dino_ds.engine.optim` forms them."""
    groups: dict[tuple[str, ...], int] = {}
    layers, top = _layers(recipe)
    for name, shape in _shapes(*_network_of(recipe)).items():
        key = _group_of(name, shape, layers.get(name, top + 1), top, recipe)
        groups[key] = groups.get(key, 0) + math.prod(shape)
    return tuple(groups.values())


def _group_of(name: str, shape: _Shape, layer: int, top: int, recipe: Recipe) -> tuple[str, ...]:
    optimizer, (part, _, rest) = recipe.optimizer, name.partition(".")
    if ".prototypes." in name:
        kind = "prototypes"
    else:
        kind = "no decay" if name.endswith(".bias") or len(shape) == 1 else "decay"
    own = part == "backbone" and bool(recipe.model.freeze_backbone.value)
    number, patches = "", ""
    if part == "backbone":
        number = str(layer) if optimizer.layer_decay != 1 and layer <= top else ""
        patches = "patches" if optimizer.patch_embed_lr != 1 and rest.startswith("patch_embed.") else ""
    return part if optimizer.clip_by == "part" else "", kind, str(own), number, patches


def _layers(recipe: Recipe) -> tuple[dict[str, int], int]:
    """The layers of the backbone's parameters as of `dino_ds.models.base.Backbone.layers`, and the number of blocks."""
    spec = recipe.model.spec()
    if not isinstance(spec, ViTSpec):
        from dino_ds.costs.measured import parameters_of

        found = parameters_of(spec, recipe.crops.global_size)
        return {f"backbone.{name}": layer for name, layer in found.layers.items()}, found.top
    layers = {}
    for name in recipe_sizes(recipe):
        words = name.split(".")
        if words[0] == "backbone":
            last = spec.depth + 1 if words[1].endswith("norm") else 0
            layers[name] = int(words[2]) + 1 if words[1] == "blocks" else last
    return layers, spec.depth


def _network_of(
    recipe: Recipe,
) -> tuple[BackboneSpec, int, HeadSizes | None, HeadSizes | None, bool, tuple[tuple[str, int], ...]]:
    objective = ObjectiveCosts.of(recipe)
    heads, linear = objective.heads, tuple((name, width) for name, _, width in objective.regressions)
    kinds = heads.get(HEAD), heads.get(IBOT_HEAD)
    return recipe.model.spec(), recipe.crops.global_size, *kinds, recipe.hides_patches, linear


def _shapes(
    arch: BackboneSpec,
    image_size: int,
    head: HeadSizes | None,
    ibot_head: HeadSizes | None,
    mask_token: bool,
    regressions: tuple[tuple[str, int], ...],
) -> dict[str, _Shape]:
    if isinstance(arch, ViTSpec):
        backbone = dict(_backbone(arch, image_size, mask_token))
    else:
        from dino_ds.costs.measured import parameters_of

        backbone = dict(parameters_of(arch, image_size).shapes)
    shapes = {f"backbone.{name}": shape for name, shape in backbone.items()}
    for part, sizes in ((HEAD, head), (IBOT_HEAD, ibot_head)):
        if sizes is not None:
            shapes |= {f"{part}.{name}": shape for name, shape in _head(arch.width, sizes)}
    for part, width in regressions:
        shapes |= {f"{part}.weight": (width, arch.width), f"{part}.bias": (width,)}
    return shapes


def _backbone(arch: ViTSpec, image_size: int, mask_token: bool) -> Iterator[tuple[str, _Shape]]:
    d, registers = arch.width, arch.registers
    patches = (image_size // arch.patch_size) ** 2
    yield "cls_token", (1, 1, d)
    if registers:
        yield "reg_token", (1, registers, d)
    if arch.rope is None:
        yield "pos_embed", (1, patches if registers else patches + 1, d)
    if mask_token:
        yield "mask_token", (1, d)
    yield "patch_embed.proj.weight", (d, arch.in_chans, arch.patch_size, arch.patch_size)
    yield "patch_embed.proj.bias", (d,)
    for i in range(arch.depth):
        for name, shape in _block(arch):
            yield f"blocks.{i}.{name}", shape
    yield from _norm(arch, "norm")
    if arch.cls_norm:
        yield from _norm(arch, "cls_norm")
    if arch.local_cls_norm:
        yield from _norm(arch, "local_cls_norm")


def _norm(arch: ViTSpec, name: str) -> Iterator[tuple[str, _Shape]]:
    yield f"{name}.weight", (arch.width,)
    if not arch.rms_norm:
        yield f"{name}.bias", (arch.width,)


def _block(arch: ViTSpec) -> Iterator[tuple[str, _Shape]]:
    d, rotary, (packed, hidden) = arch.width, arch.rope is not None, mlp_widths(arch)
    for norm in ("norm1", "norm2"):
        yield from _norm(arch, norm)
    first = {"fc1_g": hidden, "fc1_x": hidden} if rotary and arch.swiglu else {"fc1": packed}
    yield "attn.qkv.weight", (3 * d, d)
    if not rotary:
        yield "attn.qkv.bias", (3 * d,)
    elif arch.qkv_bias:
        yield "attn.q_bias", (d,)
        yield "attn.v_bias", (d,)
    for name, n_in, n_out in (
        ("attn.proj", d, d),
        *((f"mlp.{name}", d, n_out) for name, n_out in first.items()),
        ("mlp.fc2", hidden, d),
    ):
        yield f"{name}.weight", (n_out, n_in)
        yield f"{name}.bias", (n_out,)
    if arch.layer_scale is not None:
        for name in ("gamma_1", "gamma_2") if rotary else ("ls1.gamma", "ls2.gamma"):
            yield name, (d,)


def mlp_widths(arch: ViTSpec) -> tuple[int, int]:
    """Outputs of a block's first MLP layer and inputs of its second: SwiGLU packs gate and value into the first."""
    packed = int(arch.width * arch.mlp_ratio)
    return packed, packed // 2 if arch.swiglu else packed


def _head(width: int, head: HeadSizes) -> Iterator[tuple[str, _Shape]]:
    sizes = [width, *[head.hidden] * (head.layers - 1), head.bottleneck]
    place = 0
    for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        yield f"mlp.{place}.weight", (n_out, n_in)
        yield f"mlp.{place}.bias", (n_out,)
        if head.batch_norm and i < head.layers - 1:
            place += 1
            yield f"mlp.{place}.weight", (n_out,)
            yield f"mlp.{place}.bias", (n_out,)
        place += 2  # a GELU lies between
    yield "prototypes.weight", (head.prototypes, head.bottleneck)
    if head.learned_lengths:
        yield "prototypes.lengths", (head.prototypes, 1)

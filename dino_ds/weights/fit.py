"""Matches weights with networks: the architecture that files and shapes tell, and the tensors that fit it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dino_ds.errors import CheckpointError
from dino_ds.models.positions import resize_positions
from dino_ds.models.specs.backbones import VITS, ViTSpec
from dino_ds.models.specs.base import BackboneSpec
from dino_ds.weights.layouts import BASE, EPS
from dino_ds.weights.tensors import MOST_SIZE, USUAL_SIZE, Weights, few, has_rope

RESIZINGS = ("dino", "antialias")
"""Ways to resize learned positions for images of another size."""
_NAME_THEM = "name them with heads= in Python, --heads of dino-ds export, --model.heads of a run"


def architecture_of(backbone: dict[str, Tensor], heads: int | None = None) -> tuple[ViTSpec, int]:
    """The architecture of the tensors, and the side of its native images in pixels, 0 with rotary positions.

    Tensors do not show the number of heads: None means that of the known backbone of this width and depth. Nor do they
    show the kind of rotary positions: those of the released DINOv3 are assumed. Raises CheckpointError where tensors of
    a ViT are missing, and for impossible or unknown heads.
    """
    rope, side = has_rope(backbone), 0
    try:
        width, in_chans, patch, _ = backbone["patch_embed.proj.weight"].shape
        depth = _depth(backbone)
        hidden = backbone["blocks.0.mlp.fc2.weight"].shape[1]
        gate, first = "blocks.0.mlp.fc1_g.weight", "blocks.0.mlp.fc1.weight"
        packed = 2 * backbone[gate].shape[0] if gate in backbone else backbone[first].shape[0]
        registers = backbone["reg_token"].shape[1] if "reg_token" in backbone else 0
        positions = 0 if rope else backbone["pos_embed"].shape[1] - (0 if registers else 1)
    except (KeyError, ValueError, IndexError) as error:
        raise CheckpointError(f"these are not the weights of a Vision Transformer: {error} is missing") from None
    if not rope:
        side = math.isqrt(max(positions, 0))
        if positions < 1 or side**2 != positions:
            raise CheckpointError(f"its position embedding has {positions} places for patches, which is not a square")
    arch = ViTSpec(
        patch,
        width,
        depth,
        _checked_heads(heads or _usual_heads(width, depth), width),
        mlp_ratio=packed / width,
        swiglu=packed == 2 * hidden,
        layer_scale=1e-5 if backbone.keys() & {"blocks.0.ls1.gamma", "blocks.0.gamma_1"} else None,
        registers=registers,
        in_chans=in_chans,
        **(_of_rope(backbone) if rope else {}),
    )
    if arch.mlp_widths[0] != packed:  # the quotient was rounded down
        arch = replace(arch, mlp_ratio=math.nextafter(arch.mlp_ratio, math.inf))
    return arch, side * patch


def _depth(backbone: dict[str, Tensor]) -> int:
    """The number of blocks. Each must have tensors: a single name must not make us build a huge network.

    Raises ValueError without blocks, and CheckpointError if a number below the highest is missing.
    """
    numbers = {m[1] for name in backbone if (m := re.match(r"blocks\.(\d+)\.", name))}
    last = max(numbers, key=lambda number: (len(number), number))
    if numbers != {str(i) for i in range(len(numbers))}:
        raise CheckpointError(f"it has tensors of {len(numbers)} blocks, and their last is called {last[:20]}")
    return len(numbers)


def _of_rope(backbone: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "rope": "separate",
        "rope_base": BASE,
        "norm_eps": EPS,
        "qkv_bias": "blocks.0.attn.q_bias" in backbone,
        "rms_norm": "norm.bias" not in backbone,
        "cls_norm": "cls_norm.weight" in backbone,
    }


def _usual_heads(width: int, depth: int) -> int:
    known = (arch.heads for arch in VITS.values() if (arch.width, arch.depth) == (width, depth))
    heads = next(known, None)
    if heads is None:
        usual = f" (usual: {width // 64})" if width % 64 == 0 else ""
        raise CheckpointError(
            f"no file says how many attention heads a width of {width} in {depth} blocks has{usual}: {_NAME_THEM}"
        )
    return heads


def _checked_heads(heads: object, width: int) -> int:
    if not isinstance(heads, int) or heads < 1 or width % heads:
        raise CheckpointError(f"{str(heads)[:20]} attention heads do not divide the width {width}: {_NAME_THEM}")
    return heads


def fit_tensors(
    tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], interpolation: str, lack: str, are: str
) -> dict[str, Tensor]:
    """`tensors`, which must have the names and shapes of `shapes`; a position embedding of another size is resized.

    Raises CheckpointError: its text begins with `lack` for missing tensors, with `are` for unknown names and for other
    shapes.
    """
    missing, surplus = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing:
        raise CheckpointError(f"{lack} {len(missing)} of {len(shapes)} tensors: {few(missing)}")
    if surplus:
        raise CheckpointError(f"{are} of another architecture: {len(surplus)} tensors too many, {few(surplus)}")
    fitting = {
        name: _fitted(tensors[name], shape, interpolation) if name.endswith("pos_embed") else tensors[name]
        for name, shape in shapes.items()
    }
    wrong = [
        f"{name} {list(t.shape)} vs {list(shapes[name])}"
        for name, t in fitting.items()
        if tuple(t.shape) != shapes[name]
    ]
    if wrong:
        raise CheckpointError(f"{are} of another architecture: {len(wrong)} tensors, first {min(wrong)}")
    return fitting


def _fitted(positions: Tensor, shape: tuple[int, ...], interpolation: str) -> Tensor:
    """A position embedding (1, special + n, d) resized to the grid of `shape`, except for the CLS token's position.

    Returned unchanged where widths or special tokens differ.
    """
    counts = (positions.shape[1], shape[1])
    sides = [math.isqrt(count) for count in counts]
    special = [count - side**2 for count, side in zip(counts, sides, strict=True)]
    if tuple(positions.shape) == shape or positions.shape[2] != shape[2] or special[0] != special[1] or special[0] > 1:
        return positions
    patches = resize_positions(positions[:, special[0] :], sides[1], sides[1], interpolation)
    return torch.cat((positions[:, : special[0]].float(), patches), dim=1)


@dataclass(frozen=True)
class Description:
    """A network, the side of its native images in pixels, and which of RESIZINGS its positions need. heads_stated:
    whether a file states the number of attention heads. notes: what was assumed."""

    spec: BackboneSpec
    image_size: int
    interpolation: str
    heads_stated: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def arch(self) -> ViTSpec:
        """The spec of a ViT: for weights without a `spec` of their own."""
        assert isinstance(self.spec, ViTSpec)
        return self.spec


def describe(weights: Weights, heads: int | None = None) -> Description:
    """Describe the network of `weights`; heads: its attention heads, for weights whose files do not state them.

    If neither states them, they are those of the known backbone of this width and depth, and a note says so. Raises
    CheckpointError where no such backbone is known, and where the tensors contradict a file.
    """
    if weights.spec is not None:
        return Description(weights.spec, weights.image_size, "antialias")
    if weights.kind == "dino_ds":
        return _described_by_us(weights)
    about = weights.about
    stated = about.get("num_attention_heads")
    arch, size = architecture_of(weights.backbone, stated or heads)
    notes = []
    if not stated and heads is None:
        notes = [f"no file says its attention heads: taken for {arch.heads}, usual for this width and depth"]
    if arch.rope is not None:
        arch, size = _with_facts(arch, about)
        if "image_size" not in about:
            notes.append(f"no file says the size of its images: taken for {size} pixels")
    eps = about.get("layer_norm_eps", arch.norm_eps)
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise CheckpointError(f"config.json: layer_norm_eps {str(eps)[:20]} is not a number above 0 and below 1")
    usual = "antialias" if arch.registers or weights.kind == "timm" else "dino"
    interpolation = usual if about.get("pos_embed_interpolation") not in RESIZINGS else about["pos_embed_interpolation"]
    return Description(replace(arch, norm_eps=eps), size, interpolation, bool(stated), notes)


def _with_facts(arch: ViTSpec, about: dict[str, Any]) -> tuple[ViTSpec, int]:
    """`arch` with the rotary positions that a file states, and the side of native images. Raises CheckpointError."""
    base, size = about.get("rope_theta", arch.rope_base), about.get("image_size", USUAL_SIZE)
    if not isinstance(base, int | float) or not 1 < base < math.inf:
        raise CheckpointError(f"config.json: rope_theta {str(base)[:20]} is not a number above 1")
    if not isinstance(size, int) or not arch.patch_size <= size <= MOST_SIZE:
        raise CheckpointError(f"config.json: image_size {str(size)[:20]} is not a number of pixels")
    return replace(arch, rope_base=float(base)), size


def _described_by_us(weights: Weights) -> Description:
    """The network that our JSON describes, checked against the tensors. Raises CheckpointError."""
    about = weights.about
    try:
        arch = replace(ViTSpec(**about["architecture"]), local_cls_norm=False)  # no file of ours has that norm
        stated = about["timm_arguments"]["img_size"] if "timm_arguments" in about else about["image_size"]
        size, resizing = int(stated), about["pos_embed_interpolation"]
        seen, seen_size = architecture_of(weights.backbone, arch.heads)
        agree = _visible(arch) == _visible(seen) and resizing in RESIZINGS
        agree = agree and (size == seen_size if arch.rope is None else arch.patch_size <= size <= MOST_SIZE)
        agree = agree and 1 <= arch.heads <= arch.width and arch.width % arch.heads == 0 and 0 < arch.norm_eps < 1
        agree = agree and (arch.rope is None or _is_rope(arch))
        agree = agree and (arch.layer_scale is None or 0 < arch.layer_scale <= 1e6)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"the JSON beside the weights can't be used: {type(error).__name__}: {error}") from None
    if not agree:
        raise CheckpointError("the JSON beside the weights describes another network than theirs: remove or fix it")
    return Description(arch, size, resizing)


def _is_rope(arch: ViTSpec) -> bool:
    """Whether a network can have these rotary positions. Raises TypeError."""
    low, high = arch.rope_min_period, arch.rope_max_period
    has_periods = low is not None and high is not None and 0 < low <= high < math.inf
    is_base = low is None and high is None and 1 < arch.rope_base < math.inf
    return arch.rope in ("separate", "max", "min") and arch.width // arch.heads % 4 == 0 and (has_periods or is_base)


def _visible(arch: ViTSpec) -> tuple[object, ...]:
    """The part of an architecture that the names and shapes of its tensors show."""
    rope = (arch.qkv_bias, arch.rms_norm, arch.cls_norm) if arch.rope is not None else ()
    sizes = (arch.patch_size, arch.width, arch.depth, arch.in_chans, arch.registers, arch.mlp_widths[0])
    return *sizes, arch.layer_scale is not None, arch.swiglu, rope

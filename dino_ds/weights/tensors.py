"""Weights that were read from files, under our names, and checks on them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_ds.errors import CheckpointError
from dino_ds.models.specs.base import BackboneSpec

USUAL_SIZE, MOST_SIZE = 224, 16384
"""Sides of native images in pixels: the default if no file states it, and the largest that a file may state."""
_OURS = re.compile(
    r"cls_token|pos_embed|reg_token|(patch_embed\.proj|norm)\.(weight|bias)|"
    r"blocks\.\d+\.((norm1|norm2|attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.(weight|bias)|ls[12]\.gamma)"
)
_OURS_ROTARY = re.compile(
    r"cls_token|reg_token|(patch_embed\.proj|norm|cls_norm|local_cls_norm)\.(weight|bias)|"
    r"blocks\.\d+\.((norm1|norm2|attn\.proj|mlp\.(fc1|fc1_g|fc1_x|fc2))\.(weight|bias)|"
    r"attn\.(qkv\.weight|q_bias|v_bias)|gamma_[12])"
)


@dataclass(frozen=True)
class Weights:
    """Tensors under our (timm's) names. kind: the project whose file it was. heads: projection heads by their names in
    a `Network`. about: the JSON next to the file, like teacher.json. notes: what was left out, and why. mask_token (1,
    d): for hidden patches, None if the file has none. local_norm: the norm of local crops' CLS tokens, by its names in
    the backbone, which is without it. spec: None for our ViTs, else the network, made for images of `image_size` pixels
    a side, whose names and buffers `backbone` then has."""

    kind: str
    backbone: dict[str, Tensor]
    heads: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    mask_token: Tensor | None = None
    local_norm: dict[str, Tensor] = field(default_factory=dict)
    spec: BackboneSpec | None = None
    image_size: int = 0

    def check_numbers(self, path: Path) -> None:
        """Call `check_numbers` on all tensors; in a network that is not one of our ViTs, integers may be buffers."""
        backbone = {name: t for name, t in self.backbone.items() if self.spec is None or t.is_floating_point()}
        mask = {} if self.mask_token is None else {"mask_token": self.mask_token}
        check_numbers(path, backbone, *self.heads.values(), self.local_norm, mask)


def has_rope(backbone: Mapping[str, Tensor]) -> bool:
    """Whether tensors under our names are those of a ViT with rotary positions."""
    return "pos_embed" not in backbone and "blocks.0.attn.qkv.bias" not in backbone and "norm.weight" in backbone


def checked(backbone: dict[str, Tensor]) -> dict[str, Tensor]:
    """`backbone`, if it has no name that ours lacks, with learned positions in our form. Raises CheckpointError."""
    rope = has_rope(backbone)
    known, which = (_OURS_ROTARY, "ViT with rotary positions") if rope else (_OURS, "ViT")
    if unknown := sorted(name for name in backbone if not known.fullmatch(name)):
        raise CheckpointError(f"it is another kind of network: dino_ds's {which} has no {few(unknown)}")
    if rope and "cls_token" in backbone:
        return backbone
    cls, positions = backbone.get("cls_token"), backbone.get("pos_embed")
    if cls is None or positions is None:
        raise CheckpointError(f"it lacks {'a class token' if cls is None else 'learned positions: pos_embed'}")
    if positions.ndim != 3 or cls.shape != (1, 1, positions.shape[2]):
        raise CheckpointError(f"it has a class token of {list(cls.shape)} and positions of {list(positions.shape)}")
    only_patches = math.isqrt(positions.shape[1]) ** 2 == positions.shape[1]
    if "reg_token" in backbone and not only_patches:
        # As in timm: the class token's position is added to the token itself.
        return backbone | {"cls_token": cls + positions[:, :1], "pos_embed": positions[:, 1:]}
    if "reg_token" not in backbone and only_patches:
        return backbone | {"pos_embed": torch.cat((torch.zeros_like(cls), positions), dim=1)}
    return backbone


def check_numbers(path: Path, *groups: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError for NaN, infinity and integers that are not BatchNorm's counters."""
    for tensors in groups:
        weights = {name: t for name, t in tensors.items() if not name.endswith("num_batches_tracked")}
        wrong = [name for name, t in weights.items() if not (t.is_floating_point() and torch.isfinite(t.float()).all())]
        if wrong:
            raise CheckpointError(f"{path} has NaN, infinity or whole numbers for weights in {few(wrong)}")


def unused(names: list[str]) -> list[str]:
    """Notes on tensors that are left out."""
    return [f"{len(names)} tensors not used ({few(sorted(names))})"] if names else []


def few(names: list[str]) -> str:
    """The first three names."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")

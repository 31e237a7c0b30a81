"""Checks tensors that were read: names that a backbone of ours has, and numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dino_ds.errors import CheckpointError
from dino_ds.weights.dinov3 import has_rope, unknown_names
from dino_ds.weights.reference import few

_BACKBONE = re.compile(
    r"cls_token|pos_embed|reg_token|(patch_embed\.proj|norm)\.(weight|bias)|"
    r"blocks\.\d+\.((norm1|norm2|attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.(weight|bias)|ls[12]\.gamma)"
)


def checked(backbone: dict[str, Tensor]) -> dict[str, Tensor]:
    """A backbone that has nothing that ours lacks, and learned positions in our form. Raises CheckpointError."""
    rope = has_rope(backbone)
    unknown = unknown_names(backbone) if rope else sorted(name for name in backbone if not _BACKBONE.fullmatch(name))
    if unknown:
        which = "ViT with rotary positions" if rope else "ViT"
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
        # As timm: the class token's own position is added to it once and for all.
        return backbone | {"cls_token": cls + positions[:, :1], "pos_embed": positions[:, 1:]}
    if "reg_token" not in backbone and only_patches:
        return backbone | {"pos_embed": torch.cat((torch.zeros_like(cls), positions), dim=1)}
    return backbone


def check_beside(path: Path, heads: Mapping[str, dict[str, Tensor]], mask_token: Tensor | None) -> None:
    """As `check_numbers`, of what lies beside a backbone."""
    for head in heads.values():
        check_numbers(path, head)
    if mask_token is not None:
        check_numbers(path, {"mask_token": mask_token})


def check_numbers(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raises CheckpointError for NaN, infinity and integers that are not BatchNorm's counters."""
    weights = {name: t for name, t in tensors.items() if not name.endswith("num_batches_tracked")}
    wrong = [name for name, t in weights.items() if not (t.is_floating_point() and torch.isfinite(t.float()).all())]
    if wrong:
        raise CheckpointError(f"{path} has NaN, infinity or whole numbers for weights in {few(wrong)}")

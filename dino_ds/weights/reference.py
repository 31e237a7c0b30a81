"""The checkpoints of facebookresearch/dino and dinov2: their names against ours (timm's), both ways."""

from __future__ import annotations

import re

import torch
from torch import Tensor


def split_reference(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Backbone and head of one network of a dino or dinov2 checkpoint, under our names; the head may be empty.

    DDP's "module." and the wrappers' "backbone." are dropped; heads: `last_layer.weight_v` and `mlp`.
    """
    tensors = {name.removeprefix("module."): t for name, t in tensors.items()}
    wrapped = any(name.startswith("backbone.") for name in tensors)
    backbone, head = {}, {}
    for name, tensor in tensors.items():
        if name.startswith(("head.", "dino_head.")):
            head[name.partition(".")[2]] = tensor
        elif name.startswith("backbone.") or not wrapped:
            backbone[name.removeprefix("backbone.")] = tensor
    return _backbone(backbone), _head(head)


def _backbone(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    out = {}
    for name, tensor in theirs.items():
        if name == "mask_token" or name.startswith(("head.", "fc.")):
            continue
        # dinov2's blocks may lie in chunks: blocks.CHUNK.BLOCK.
        name = re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)
        name = name.replace(".mlp.w12.", ".mlp.fc1.").replace(".mlp.w3.", ".mlp.fc2.")
        out[name] = tensor
    registers = out.pop("register_tokens", None)
    if registers is not None and registers.numel() and "pos_embed" in out:
        # As timm: the CLS token's own position is added to it once and for all.
        out["cls_token"] = out["cls_token"] + out["pos_embed"][:, :1]
        out["pos_embed"] = out["pos_embed"][:, 1:]
        out["reg_token"] = registers
    return out


_PROTOTYPES = (
    "prototypes.weight",
    "last_layer.weight_v",
    "last_layer.parametrizations.weight.original1",
    "last_layer.weight",
)


def _head(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ours or the reference's names; of the prototypes only the directions count."""
    out = {name: t for name, t in theirs.items() if name.startswith("mlp.")}
    for name in (
        "prototypes.weight",
        "last_layer.weight_v",
        "last_layer.parametrizations.weight.original1",
        "last_layer.weight",
    ):
        if name in theirs:
            out["prototypes.weight"] = theirs[name]
            break
    return out


def to_reference(backbone: dict[str, Tensor], head: dict[str, Tensor]) -> dict[str, Tensor]:
    """One network as facebookresearch/dino saves it: "backbone." and, where there is one, "head.", g = 1.

    Plain ViTs keep their names; the others' are dinov2's.
    """
    out = {}
    swiglu = _is_swiglu(backbone)
    for name, tensor in backbone.items():
        if swiglu:
            name = name.replace(".mlp.fc1.", ".mlp.w12.").replace(".mlp.fc2.", ".mlp.w3.")
        out[f"backbone.{'register_tokens' if name == 'reg_token' else name}"] = tensor
    if "reg_token" in backbone:
        positions = backbone["pos_embed"]
        out["backbone.pos_embed"] = torch.cat((torch.zeros_like(positions[:, :1]), positions), dim=1)
    for name, tensor in head.items():
        if name == "prototypes.weight":
            out["head.last_layer.weight_v"] = tensor
            out["head.last_layer.weight_g"] = tensor.new_ones(len(tensor), 1)
        else:
            out[f"head.{name}"] = tensor
    return out


def _is_swiglu(backbone: dict[str, Tensor]) -> bool:
    """SwiGLU's first MLP layer gives twice what its second takes."""
    return backbone["blocks.0.mlp.fc1.weight"].shape[0] == 2 * backbone["blocks.0.mlp.fc2.weight"].shape[1]

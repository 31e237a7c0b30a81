"""The checkpoints of facebookresearch/dino and dinov2: their names against ours (timm's), both ways."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

from dino_ds.errors import CheckpointError

_PATCHES = "patch_embed.proj.weight"
_DROPPED = re.compile(r"(mask_token|masked_embed|(head|fc)\..*)")
"""Beside a backbone, of no use for features: what masked patches are, and classifiers."""
_PROTOTYPES = ("prototypes.weight", "weight_v", "parametrizations.weight.original1", "weight")


class Network(NamedTuple):
    """Backbone and head under our names, the head maybe empty; `notes`: what was left out, in words."""

    backbone: dict[str, Tensor]
    head: dict[str, Tensor]
    notes: list[str]


def split_network(tensors: dict[str, Tensor], network: str) -> Network:
    """Backbone and head of `network` (teacher or student) among the tensors of a file, whatever is wrapped around them.

    What DDP and torch.compile put into names is dropped. The backbone is what lies beside the patch embedding; its head
    is `head` or dinov2's `dino_head` beside it. Raises CheckpointError for no ViT, or several and none called so.
    """
    tensors = {re.sub(r"(?<![^.])(module|_orig_mod)\.", "", name): t for name, t in tensors.items()}
    prefix = _prefix(tensors, network)
    owner = prefix.removesuffix("backbone.")
    backbone, head, others = {}, {}, []
    for name, tensor in tensors.items():
        beside = re.fullmatch(rf"{re.escape(owner)}(?:dino_)?head\.(.+)", name)
        inside = name.removeprefix(prefix)
        if beside and (beside[1].startswith("mlp.") or "last_layer." in beside[1] or "prototypes." in beside[1]):
            head[beside[1]] = tensor
        elif name.startswith(prefix) and not _DROPPED.fullmatch(inside):
            backbone[inside] = tensor
        else:
            others.append(name)
    return Network(_backbone(backbone), _head(head), unused(others) + _lengths(head))


def _prefix(tensors: dict[str, Tensor], network: str) -> str:
    found = sorted(name.removesuffix(_PATCHES) for name in tensors if re.search(rf"(^|\.){_PATCHES}$", name))
    if not found:
        names = sorted(tensors)
        raise CheckpointError(
            f"it holds no Vision Transformer that dino_ds knows: its tensors are {few(names)}{about_dinov3(names)}"
        )
    chosen = [prefix for prefix in found if network in prefix] if len(found) > 1 else found
    if len(chosen) != 1:
        raise CheckpointError(f"it holds several networks, and not one {network}: {few(found)}; save one of them alone")
    return chosen[0]


def _backbone(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    out = {}
    for name, tensor in theirs.items():
        # dinov2's blocks may lie in chunks: blocks.CHUNK.BLOCK.
        name = re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)
        name = name.replace(".mlp.w12.", ".mlp.fc1.").replace(".mlp.w3.", ".mlp.fc2.")
        out["reg_token" if name == "register_tokens" else name] = tensor
    if "reg_token" in out and not out["reg_token"].numel():
        del out["reg_token"]
    return out


def _head(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """From our or the reference's names; the reference's head of one layer is not a sequence."""
    out = {re.sub(r"^mlp\.(weight|bias)$", r"mlp.0.\1", name): t for name, t in theirs.items() if name[:4] == "mlp."}
    for name in _PROTOTYPES:
        tensor = theirs.get(name if name.startswith("prototypes") else f"last_layer.{name}")
        if tensor is not None:
            return {**out, "prototypes.weight": tensor}
    return out


def _lengths(theirs: dict[str, Tensor]) -> list[str]:
    """Of the prototypes only the directions count here; their lengths were learned where norm_last_layer was off."""
    for name in ("last_layer.weight_g", "last_layer.parametrizations.weight.original0"):
        if name in theirs and not torch.all(theirs[name] == 1):
            shortest, longest = theirs[name].float().aminmax()
            return [f"its prototypes' lengths ({shortest:.3g} to {longest:.3g}) are left out: they are 1 here"]
    return []


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
    if "blocks.0.ls1.gamma" in backbone:
        out["backbone.mask_token"] = torch.zeros_like(backbone["cls_token"][0])
    one_layer = not any(name.startswith("mlp.1") or name.startswith("mlp.2") for name in head)
    for name, tensor in head.items():
        if name == "prototypes.weight":
            out["head.last_layer.weight_v"] = tensor
            out["head.last_layer.weight_g"] = tensor.new_ones(len(tensor), 1)
        else:
            out[f"head.{name.replace('mlp.0.', 'mlp.') if one_layer else name}"] = tensor
    return out


def _is_swiglu(backbone: dict[str, Tensor]) -> bool:
    """SwiGLU's first MLP layer gives twice what its second takes."""
    return backbone["blocks.0.mlp.fc1.weight"].shape[0] == 2 * backbone["blocks.0.mlp.fc2.weight"].shape[1]


def about_dinov3(names: list[str]) -> str:
    """What to add where a network of these tensors is refused."""
    theirs = any("rope" in n or "storage_tokens" in n or ".attention.q_proj." in n for n in names)
    return " (DINOv3's rotary positions are not supported)" if theirs else ""


def unused(names: list[str]) -> list[str]:
    """What to say of tensors that are left out."""
    return [f"{len(names)} tensors not used ({few(sorted(names))})"] if names else []


def few(names: list[str]) -> str:
    """The first three names."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")

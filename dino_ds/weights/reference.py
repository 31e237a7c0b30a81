"""The checkpoints of facebookresearch/dino and dinov2: their names under ours, which are timm's."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from dino_ds.errors import CheckpointError
from dino_ds.weights.tensors import Weights, few, unused

_PATCHES = "patch_embed.proj.weight"
_DROPPED = re.compile(r"(mask_token|masked_embed|decoder_(pos_embed|(embed|blocks|norm|pred)\..*)|(head|fc)\..*)")
"""Tensors next to a backbone that are of no use for features: mask tokens, classifiers, the decoder of an MAE."""
_HEADS = {"head": "head", "dino_head": "head", "ibot_head": "ibot_head"}
"""Our names of dino's and dinov2's projection heads."""
HEAD = re.compile(r"(head)\.((?:mlp|last_layer|prototypes)\..+)")
"""A tensor of facebookresearch/dino's projection head, next to a "backbone."; a ResNet has its own in "head.fc"."""
_PROTOTYPES = {
    "prototypes.weight": "prototypes.lengths",
    "last_layer.weight_v": "last_layer.weight_g",
    "last_layer.parametrizations.weight.original1": "last_layer.parametrizations.weight.original0",
}
"""Names of a head's prototypes, whose directions count, and of their lengths."""
_PLAIN = "last_layer.weight"
"""Prototypes whose lengths are those of their rows: dinov3's, or a weight norm that was multiplied out."""


def split_network(tensors: dict[str, Tensor], network: str) -> Weights:
    """Backbone and heads of `network` (teacher or student) among the tensors of a file, whatever wraps them.

    Prefixes of DDP and torch.compile are dropped. The backbone is what lies next to the patch embedding; its heads are
    `head` or dinov2's `dino_head` next to it, and `ibot_head`. Raises CheckpointError for no ViT, or several
    and none called so.
    """
    tensors = {re.sub(r"(?<![^.])(module|_orig_mod)\.", "", name): t for name, t in tensors.items()}
    prefix = _prefix(tensors, network)
    owner = prefix.removesuffix("backbone.")
    mask, cls = tensors.get(f"{prefix}mask_token"), tensors.get(f"{prefix}cls_token")
    if mask is not None and cls is not None and mask.numel() == cls.numel():
        del tensors[f"{prefix}mask_token"]
    else:
        mask = None
    backbone: dict[str, Tensor] = {}
    heads: dict[str, dict[str, Tensor]] = {}
    others = []
    for name, tensor in tensors.items():
        beside = re.fullmatch(rf"{re.escape(owner)}({'|'.join(_HEADS)})\.((?:mlp|last_layer|prototypes)\..+)", name)
        inside = name.removeprefix(prefix)
        if beside:
            heads.setdefault(_HEADS[beside[1]], {})[beside[2]] = tensor
        elif name.startswith(prefix) and not _DROPPED.fullmatch(inside):
            backbone[inside] = tensor
        else:
            others.append(name)
    heads = {name: head_to_ours(head) for name, head in heads.items()}
    kind = "dinov2" if any(".ls1." in name for name in backbone) else "dino or timm"
    mask = None if mask is None else mask.reshape(1, -1)
    return Weights(kind, _backbone(backbone), heads, notes=unused(others), mask_token=mask)


def _prefix(tensors: dict[str, Tensor], network: str) -> str:
    found = sorted(name.removesuffix(_PATCHES) for name in tensors if re.search(rf"(^|\.){_PATCHES}$", name))
    if not found:
        names = sorted(tensors)
        raise CheckpointError(
            f"it holds no Vision Transformer that dino_ds knows: its tensors are {few(names)}; "
            "name another network of timm's or your own: --backbone of dino-ds export, backbone= in Python"
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


def head_to_ours(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A head from our or the reference's names, whose head of one layer is not a sequence.

    Without "prototypes.lengths" the prototypes' lengths are all 1: those that are all 1 are left out.
    """
    out = {re.sub(r"^mlp\.(weight|bias)$", r"mlp.0.\1", name): t for name, t in theirs.items() if name[:4] == "mlp."}
    for name, of_lengths in _PROTOTYPES.items():
        if name in theirs:
            return out | {"prototypes.weight": theirs[name]} | _lengths(theirs.get(of_lengths))
    if _PLAIN in theirs:
        rows = theirs[_PLAIN]
        return out | {"prototypes.weight": rows} | _lengths(rows.float().norm(dim=-1, keepdim=True))
    return out


def _lengths(lengths: Tensor | None) -> dict[str, Tensor]:
    return {} if lengths is None or torch.all(lengths == 1) else {"prototypes.lengths": lengths}

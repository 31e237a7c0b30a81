"""The checkpoints of facebookresearch/dino and dinov2: their names against ours (timm's), both ways."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from dino_ds.errors import CheckpointError
from dino_ds.weights.tensors import Weights, few, unused

_PATCHES = "patch_embed.proj.weight"
_DROPPED = re.compile(r"(mask_token|masked_embed|(head|fc)\..*)")
"""Tensors next to a backbone that are of no use for features: mask tokens and classifiers."""
_HEADS = {"head": "head", "dino_head": "head", "ibot_head": "ibot_head"}
"""Our names of dino's and dinov2's projection heads."""
HEAD = re.compile(r"(head)\.((?:mlp|last_layer|prototypes)\..+)")
"""A tensor of facebookresearch/dino's projection head, next to a "backbone."; a ResNet has its own in "head.fc"."""
_OURS, _V2 = {"head": "head"}, {"head": "dino_head", "ibot_head": "ibot_head"}
"""Names of our heads in dino's files and in dinov2's."""
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


def to_reference(
    backbone: dict[str, Tensor],
    heads: dict[str, dict[str, Tensor]],
    mask_token: Tensor | None = None,
    v2: bool = False,
) -> dict[str, Tensor]:
    """One network as facebookresearch/dino saves it: "backbone." and, where there is one, "head.".

    Plain ViTs keep their names; the others' are dinov2's, whose mask token is `mask_token`, or zero. With `v2` all is
    as in dinov2's teacher_checkpoint.pth: a mask token in any case, "dino_head." and "ibot_head.".
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
    if v2 or "blocks.0.ls1.gamma" in backbone:
        cls = backbone["cls_token"][0]
        out["backbone.mask_token"] = torch.zeros_like(cls) if mask_token is None else mask_token
    for ours, theirs in (_V2 if v2 else _OURS).items():
        out |= {f"{theirs}.{name}": tensor for name, tensor in _head_to_reference(heads.get(ours, {})).items()}
    return out


def _head_to_reference(head: dict[str, Tensor]) -> dict[str, Tensor]:
    """A head in the reference's names, with torch's weight norm, whose g are the prototypes' lengths."""
    out = {}
    one_layer = not any(name.startswith("mlp.1") or name.startswith("mlp.2") for name in head)
    for name, tensor in head.items():
        if name == "prototypes.weight":
            out["last_layer.weight_v"] = tensor
            out["last_layer.weight_g"] = head.get("prototypes.lengths", tensor.new_ones(len(tensor), 1))
        elif name != "prototypes.lengths":
            out[name.replace("mlp.0.", "mlp.") if one_layer else name] = tensor
    return out


def _is_swiglu(backbone: dict[str, Tensor]) -> bool:
    """SwiGLU's first MLP layer gives twice what its second takes; a ResNet has none."""
    if "blocks.0.mlp.fc1.weight" not in backbone:
        return False
    return backbone["blocks.0.mlp.fc1.weight"].shape[0] == 2 * backbone["blocks.0.mlp.fc2.weight"].shape[1]

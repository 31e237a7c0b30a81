"""ViTs with rotary positions in facebookresearch/dinov3's names, against ours, which are those of timm's `Eva`.

Sources: the names in timm's own converter (timm/models/eva.py), and facts of the released files: biases of keys lie in
them, masked to zero, and the periods of the rotation are rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dino_ds.errors import CheckpointError

BASE = 100.0
"""Base of the periods of all released networks, which files state by the periods alone."""
EPS = 1e-5
"""Epsilon of the norms of all released networks."""
LOCAL_NORM = "local_cls_norm."
_PERIODS, _BIAS, _MASK = "rope_embed.periods", ".attn.qkv.bias", ".attn.qkv.bias_mask"
_ROUNDED = 1e-2
"""Largest relative error: rounded to bfloat16 a number is off by up to 1/256, twice that if rounded twice."""
_NAMES = {
    "storage_tokens": "reg_token",
    ".ls1.gamma": ".gamma_1",
    ".ls2.gamma": ".gamma_2",
    ".mlp.w1.": ".mlp.fc1_g.",
    ".mlp.w2.": ".mlp.fc1_x.",
    ".mlp.w3.": ".mlp.fc2.",
}


def has_rope(backbone: Mapping[str, Tensor]) -> bool:
    """Whether tensors under our names are those of a ViT with rotary positions."""
    return "pos_embed" not in backbone and "blocks.0.attn.qkv.bias" not in backbone and "norm.weight" in backbone


def is_dinov3(names: Mapping[str, Tensor]) -> bool:
    """Whether a backbone has facebookresearch/dinov3's names."""
    return "storage_tokens" in names or _PERIODS in names


def from_dinov3(theirs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """Their tensors under our names, unknown names unchanged; further facts, as in a config.json; notes.

    Raises CheckpointError for keys with a bias, and for periods that are not those of the released networks.
    """
    out: dict[str, Tensor] = {}
    facts, notes = _of_periods(theirs)
    for name, tensor in theirs.items():
        if name == _PERIODS or name.endswith(_MASK):
            continue
        if name.endswith(_BIAS):
            mask = theirs.get(name.replace(_BIAS, _MASK))
            q, k, v = (tensor if mask is None else tensor * mask).chunk(3)
            check_keys(name, k)
            attention = name.removesuffix(".qkv.bias")
            out |= {f"{attention}.q_bias": q.contiguous(), f"{attention}.v_bias": v.contiguous()}
            continue
        for old, new in _NAMES.items():
            name = name.replace(old, new)
        out[name] = tensor
    return out, facts, notes


def check_keys(name: str, bias: Tensor) -> None:
    """Raises CheckpointError for a bias of keys that is not zero."""
    if torch.count_nonzero(bias):
        raise CheckpointError(f"its keys have a bias ({name}), and those of dino_ds's ViT with rotary positions none")


def _of_periods(theirs: Mapping[str, Tensor]) -> tuple[dict[str, Any], list[str]]:
    """The attention heads that the number of periods tells, and notes on their values."""
    if _PERIODS not in theirs or "cls_token" not in theirs:
        return {}, []
    periods, width = theirs[_PERIODS].float().flatten(), theirs["cls_token"].shape[-1]
    heads, rest = divmod(width, 4 * max(1, len(periods)))
    if rest or not heads:
        raise CheckpointError(f"{_PERIODS} has {len(periods)} values, which no head of a width of {width} has")
    wanted = BASE ** (torch.arange(len(periods)) / len(periods))
    off = ((periods - wanted).abs() / wanted).max()
    if not off <= _ROUNDED:
        ends = f"{periods[0]:.4g} to {periods[-1]:.4g}, not {wanted[0]:.4g} to {wanted[-1]:.4g}"
        raise CheckpointError(f"{_PERIODS} are {ends}: dino_ds reads files of base {BASE:g} only")
    rounded = f"its periods of rotary positions are rounded, by up to {100 * off:.1g} %: ours are in FP32"
    return {"num_attention_heads": heads}, [rounded] if off > 1e-6 else []


def with_biases(backbone: Mapping[str, Tensor], wanted: bool) -> tuple[dict[str, Tensor], list[str]]:
    """The same network with or without biases of queries and values, where those are zero, as in released files; and
    notes on it."""
    names = [name for name in backbone if name.endswith((".attn.q_bias", ".attn.v_bias"))]
    if not has_rope(backbone) or bool(names) == wanted:
        return dict(backbone), []
    if wanted:
        rows = {name: len(t) // 3 for name, t in backbone.items() if name.endswith(".attn.qkv.weight")}
        own = {name.replace("qkv.weight", f"{x}_bias"): torch.zeros(n) for x in "qv" for name, n in rows.items()}
        return {**backbone, **own}, ["it has no biases of queries and values: ours start at zero"]
    if any(torch.count_nonzero(backbone[name]) for name in names):
        return dict(backbone), []
    kept = {name: tensor for name, tensor in backbone.items() if name not in names}
    return kept, ["its biases of queries and values, all zero, are left out"]


def split_local_norm(backbone: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A backbone without the norm of local crops' CLS tokens, which is of use in training only; and that norm."""
    local = {name: tensor for name, tensor in backbone.items() if name.startswith(LOCAL_NORM)}
    return {name: tensor for name, tensor in backbone.items() if name not in local}, local

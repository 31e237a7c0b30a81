"""The reader of the numbers recorded from facebookresearch/dinov2 and dinov3, and their names as ours."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

_NAMES = (
    (r"(^|\.)dino_head\.", r"\1head."),
    (r"last_layer\.weight_v$", "prototypes.weight"),
    (r"last_layer\.weight_g$", "prototypes.lengths"),
    (r"last_layer\.weight$", "prototypes.weight"),
    (r"(^|\.)blocks\.\d+\.(\d+)\.", r"\1blocks.\2."),  # in chunks: blocks.CHUNK.BLOCK
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
    (r"(^|\.)register_tokens$", r"\1reg_token"),
)


_DINOV3_NAMES = (
    (r"\.ls([12])\.gamma$", r".gamma_\1"),
    (r"\.mlp\.w1\.", ".mlp.fc1_g."),
    (r"\.mlp\.w2\.", ".mlp.fc1_x."),
    (r"(^|\.)storage_tokens$", r"\1reg_token"),
)


def golden_v2_folder() -> Path:
    return Path(os.environ.get("DINO_DS_GOLDEN_V2") or Path(__file__).parent / "golden_v2")


def golden_v2_meta() -> dict[str, Any]:
    return json.loads((golden_v2_folder() / "meta.json").read_text())


def golden_v2(name: str) -> dict[str, Tensor]:
    """The arrays of one file, ready for use: FP16 as FP32, int8 images as what they stand for."""
    return {key: _value(tensor) for key, tensor in load_file(golden_v2_folder() / f"{name}.safetensors").items()}


def _value(stored: Tensor) -> Tensor:
    if stored.dtype == torch.int8:
        return stored.float() / 32
    return stored.float() if stored.dtype == torch.float16 else stored


def our_name(theirs: str, dinov3: bool = False) -> str:
    """A parameter's name in the reference -> ours: timm's in the backbone; its "dino_head" is "head" here. dinov3: of a
    network with rotary positions, whose names are those of timm's Eva."""
    for pattern, ours in (*_NAMES, *(_DINOV3_NAMES if dinov3 else ())):
        theirs = re.sub(pattern, ours, theirs)
    return theirs


def from_reference_v2(
    tensors: Mapping[str, Tensor], prefix: str = "", learned_lengths: bool = False, dinov3: bool = False
) -> dict[str, Tensor]:
    """The tensors below `prefix` under our names; prototypes' lengths are all 1 and left out unless learned. With
    registers the place of the CLS token is added to it: our position embedding covers the patches alone then. dinov3:
    of its networks, whose bias of queries, keys and values is cut in three; "attn.k_bias" is left out where its mask
    makes it zero."""
    ours = {our_name(name.removeprefix(prefix), dinov3): t for name, t in tensors.items() if name.startswith(prefix)}
    for name in [name for name in ours if name.endswith("prototypes.lengths") and not learned_lengths]:
        assert torch.all(ours.pop(name) == 1)
    if dinov3:
        return _in_three(ours)
    for name in [name for name in ours if name.endswith("reg_token")]:
        positions, cls = (name.replace("reg_token", other) for other in ("pos_embed", "cls_token"))
        ours[cls] = ours[cls] + ours[positions][:, :1]
        ours[positions] = ours[positions][:, 1:]
    return ours


def _in_three(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split `attn.qkv.bias` into q_bias, k_bias and v_bias, masked as `bias_mask` says, and drop rotary periods."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("attn.qkv.bias"):
            mask = tensors.get(f"{name}_mask")
            parts = dict(zip("qkv", tensor.chunk(3), strict=True))
            if mask is not None:
                q, k, v = mask.chunk(3)
                assert torch.all(q == 1) and torch.all(v == 1) and torch.all(k == 0)
                del parts["k"]
            found |= {name.replace("qkv.bias", f"{part}_bias"): bias for part, bias in parts.items()}
        elif not name.endswith(("bias_mask", "rope_embed.periods")):
            found[name] = tensor
    return found

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


def our_name(theirs: str) -> str:
    """A parameter's name in the reference -> ours: timm's in the backbone; its "dino_head" is "head" here."""
    for pattern, ours in _NAMES:
        theirs = re.sub(pattern, ours, theirs)
    return theirs


def from_reference_v2(
    tensors: Mapping[str, Tensor], prefix: str = "", learned_lengths: bool = False
) -> dict[str, Tensor]:
    """The tensors below `prefix` under our names; prototypes' lengths are all 1 and left out unless learned.

    With registers the place of the CLS token is added to it: our position embedding covers the patches alone then.
    """
    ours = {our_name(name.removeprefix(prefix)): t for name, t in tensors.items() if name.startswith(prefix)}
    for name in [name for name in ours if name.endswith("prototypes.lengths") and not learned_lengths]:
        assert torch.all(ours.pop(name) == 1)
    for name in [name for name in ours if name.endswith("reg_token")]:
        positions, cls = (name.replace("reg_token", other) for other in ("pos_embed", "cls_token"))
        ours[cls] = ours[cls] + ours[positions][:, :1]
        ours[positions] = ours[positions][:, 1:]
    return ours

"""Reads tensors from a torch file (.pth, .pt, .bin) as data: nothing that the file names is imported or run."""

from __future__ import annotations

import pickle
import re
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_ds.errors import CheckpointError

_STARTS = (b"PK\x03\x04", b"\x80")
"""A zip archive, or a bare pickle as torch wrote them before 1.6."""
_HEADS = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12), "large": (1024, 16)}
"""Width and attention heads of facebookresearch/dino's networks, by the last word of its --arch."""


class _Settings:
    """Stands in for the objects that training scripts save beside their tensors: attributes, and no code."""

    def __init__(self, *values: object) -> None:
        pass


_STAND_INS = (
    "argparse.Namespace",
    *(f"{m}.{c}Path" for m in ("pathlib", "pathlib._local") for c in ("Posix", "Windows")),
)


def read_torch(path: Path, network: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of `network` (teacher or student) in a file, and what its `args` say of their architecture.

    Raises CheckpointError for what is not a torch file, and for one that holds more than data.
    """
    try:
        with path.open("rb") as file:
            is_torch = file.read(4).startswith(_STARTS)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from None
    if not is_torch:
        raise CheckpointError(f"{path} is no file of weights: not safetensors (.safetensors), nor torch (.pth, .pt)")
    content = whole = _load(path)
    for key in (network, "model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
        keys = ", ".join(map(str, content))[:120] if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path} holds no weights of a {network}: it is {keys}")
    tensors = {str(name): tensor for name, tensor in content.items()}
    return tensors, _about(whole.get("args"), tensors)


def _load(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals([(_Settings, name) for name in _STAND_INS]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+) (was not an allowed|whose module)", str(error))
        reason = f"an object of {found[1]}" if found else _one_line(error)
        raise CheckpointError(
            f"{path} is refused: it holds more than tensors and plain values ({reason}); "
            "save the tensors alone, as torch.save(checkpoint['teacher'], FILE) does"
        ) from None
    except Exception as error:  # torch raises whatever its reader meets
        reason = f"{type(error).__name__}: {_one_line(error)}"
        raise CheckpointError(f"{path} is not a readable torch file, or not a whole one ({reason})") from None


def _one_line(error: Exception) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(error)).rpartition("WeightsUnpickler error: ")[2]
    return textwrap.shorten(plain, 160, placeholder=" ...")


def _about(args: object, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The attention heads that --arch of DINO's training stands for, where the tensors are as wide as that network."""
    values = args if isinstance(args, dict) else vars(args) if isinstance(args, _Settings) else {}
    said = values.get("arch")
    width, heads = _HEADS.get(re.split("[_-]", said)[-1] if isinstance(said, str) else "", (0, 0))
    widths = {t.shape[-1] for name, t in tensors.items() if name.endswith("cls_token") and t.ndim}
    return {"num_attention_heads": heads} if widths == {width} else {}

"""Reads weights of this project, facebookresearch/dino and dinov2, timm or Hugging Face; nothing in them is run."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from dino_ds.architectures import ARCHITECTURES
from dino_ds.errors import CheckpointError
from dino_ds.names import did_you_mean
from dino_ds.weights.huggingface import from_huggingface
from dino_ds.weights.reference import split_reference


@dataclass(frozen=True)
class Weights:
    """Tensors under our (timm's) names; `kind` says whose file it was; `about`: the JSON beside it, as teacher.json."""

    kind: str
    backbone: dict[str, Tensor]
    head: dict[str, Tensor]
    about: dict[str, Any] = field(default_factory=dict)


def find_weights(place: str | Path) -> Weights:
    """Of a run folder (its teacher), a file, a Hugging Face folder, or a timm name, which may have to be downloaded.

    Raises CheckpointError for what is no such thing.
    """
    path = Path(place)
    if not path.exists() and str(place).partition(".")[0] in ARCHITECTURES:
        return _from_timm(str(place))
    if not path.exists():
        raise CheckpointError(
            f"{place} does not exist; give a run folder, a file of weights, a Hugging Face folder or a timm name."
            f"{did_you_mean(str(place), ARCHITECTURES)}"
        )
    teacher = path / "teacher.safetensors"
    if (path / "config.yaml").is_file() and not teacher.is_file():
        raise CheckpointError(f"{path} is a run without a teacher yet: it is written with the first checkpoint")
    return read_weights(teacher if teacher.is_file() else path)


def _from_timm(name: str) -> Weights:
    import timm

    try:
        model = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as error:  # whatever the hub's client raises without a network
        reason = " ".join(str(error).split())[:160]
        raise CheckpointError(f"the weights of {name} can't be had ({reason}); give a file of weights") from None
    return Weights("timm", dict(model.state_dict()), {}, {"timm_name": name.partition(".")[0]})


def read_weights(path: Path, network: str = "teacher") -> Weights:
    """`path` a file or a Hugging Face folder; `network` teacher or student, where a checkpoint holds both.

    Pickles are read as data only (`weights_only`). Raises CheckpointError for what is no ViT's weights.
    """
    folder, path = path, path / "model.safetensors" if path.is_dir() else path
    if not path.is_file():
        what = "holds no model.safetensors" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"{folder} {what}; give a file of weights or a Hugging Face folder")
    tensors = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path, network)
    about = _read_json(folder / "config.json" if folder.is_dir() else path.with_suffix(".json"))
    if any(".attention.attention.query." in name for name in tensors):
        return Weights("huggingface", from_huggingface(tensors), {}, about)
    backbone, head = split_reference(tensors)
    if "patch_embed.proj.weight" not in backbone or "blocks.0.attn.qkv.weight" not in backbone:
        some = ", ".join(sorted(tensors)[:3])
        raise CheckpointError(f"{path} holds no Vision Transformer that dino_ds knows: its tensors are {some}, ...")
    kind = "dino_ds" if "architecture" in about else "dinov2" if any(".ls1." in n for n in backbone) else "dino or timm"
    return Weights(kind, backbone, head, about)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from None


def _read_torch(path: Path, network: str) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} is refused: it holds more than tensors and plain values ({reason})") from None
    except Exception as error:  # torch raises whatever its reader meets
        raise CheckpointError(f"{path} is not a readable torch file: {' '.join(str(error).split())[:200]}") from None
    for key in (network, "model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if isinstance(content, dict) and any(str(name).startswith("teacher.") for name in content):  # dinov2's training
        content = {n.removeprefix(f"{network}."): t for n, t in content.items() if n.startswith(f"{network}.")}
    if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
        keys = ", ".join(map(str, content))[:120] if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path} holds no weights of a {network}: it is {keys}")
    return {str(name): tensor for name, tensor in content.items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}

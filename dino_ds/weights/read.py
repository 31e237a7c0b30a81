"""Reads weights of this project, facebookresearch/dino and dinov2, timm or Hugging Face; no code in them is run."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from dino_ds.data.base import find_placeholder
from dino_ds.errors import CheckpointError, naming, one_line
from dino_ds.models.specs.backbones import VITS
from dino_ds.models.specs.foreign_backbones import ForeignSpec
from dino_ds.weights.foreign import other_network
from dino_ds.weights.layouts import (
    from_dinov3,
    from_huggingface,
    is_dinov3,
    is_huggingface,
    split_local_norm,
    split_network,
)
from dino_ds.weights.normalization import PROCESSOR, processor_statistics, timm_side, timm_statistics
from dino_ds.weights.sidecar import read_json, read_sidecar
from dino_ds.weights.tensors import Weights, checked, few, has_rope

_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
"""Files of weights in a Hugging Face folder."""
Content = tuple[dict[str, Tensor], dict[str, Any]]
"""The tensors of a file, and the facts in the JSON next to it."""


def read_weights(path: Path, asked: ForeignSpec | None = None) -> Weights:
    """Read a file or a Hugging Face folder; of a checkpoint that holds teacher and student, the teacher.

    asked: the network that the user names. Pickles are read as data only (`weights_only`). Raises CheckpointError for
    anything but a network's weights, and where a file is not the one that the JSON next to it describes.
    """
    tensors, about = _read_folder(path) if path.is_dir() else read_file(path)
    if path.is_dir():
        about = read_json(path / "config.json")
    if not is_huggingface(tensors):
        return network_weights(path, tensors, about, asked)
    with naming(path):
        _check_huggingface(about)
        stated, said = processor_statistics(read_json(path / PROCESSOR) if path.is_dir() else {})
        weights = from_huggingface(tensors)
        backbone = checked(weights.backbone)
        weights = replace(weights, backbone=backbone, about=about | stated, notes=[*weights.notes, *said])
    weights.check_numbers(path)
    return weights


def network_weights(
    path: Path, tensors: dict[str, Tensor], about: dict[str, Any], asked: ForeignSpec | None
) -> Weights:
    """The network among the `tensors` of `path`, which `about` describes; `asked` as in `read_weights`. Raises
    CheckpointError."""
    with naming(path):
        weights = _of_network(tensors, about, asked)
    weights.check_numbers(path)
    return weights


def _of_network(tensors: dict[str, Tensor], about: dict[str, Any], asked: ForeignSpec | None) -> Weights:
    """The weights of a ViT, else of another network. Raises CheckpointError that says why they are not a ViT's."""
    is_said_to_be_other = asked is not None or "backbone" in about
    other = other_network(tensors, about, asked) if is_said_to_be_other else None
    if other is None:
        try:
            return _of_vit(tensors, about)
        except CheckpointError:
            if asked is not None:
                known = f"neither a {asked.name} nor a Vision Transformer that dino_ds knows"
                raise CheckpointError(f"it is {known}: its tensors are {few(sorted(tensors))}") from None
            other = None if is_said_to_be_other else other_network(tensors, about, asked)
            if other is None:
                raise
    return other


def _of_vit(tensors: dict[str, Tensor], about: dict[str, Any]) -> Weights:
    network = split_network(tensors)
    kind, backbone, notes = network.kind, network.backbone, network.notes
    if is_dinov3(backbone):
        kind, (backbone, facts, more) = "dinov3", from_dinov3(backbone)
        about, notes = about | facts, [*notes, *more]
    backbone, local_norm = split_local_norm(checked(backbone))
    if isinstance(about.get("architecture"), str):
        if has_rope(backbone) and about["architecture"] not in VITS:
            raise CheckpointError(f"config.json: its rotary positions are those of timm's {about['architecture']}")
        kind, about = "timm", _from_timm_config(about)
    elif "architecture" in about:
        kind = "dino_ds"
    return replace(network, kind=kind, backbone=backbone, about=about, notes=notes, local_norm=local_norm)


def _from_timm_config(config: dict[str, Any]) -> dict[str, Any]:
    """Facts on the network from config.json of a timm folder (timm's own, or by `dino-ds export --format timm`)."""
    name, arguments = config["architecture"], config.get("model_args")
    heads = arguments.get("num_heads") if isinstance(arguments, dict) else None
    if heads is None and name in VITS:
        heads = VITS[name].heads
    if not isinstance(heads, int | None):
        raise CheckpointError(f"config.json: num_heads {heads!r} is not a whole number")
    about = {"timm_name": name, **({"num_attention_heads": heads} if heads else {})}
    about |= {key: config[key] for key in ("value_range",) if key in config}
    return about | _rope_of_timm_config(config) | timm_statistics(config.get("pretrained_cfg"))


def _rope_of_timm_config(config: dict[str, Any]) -> dict[str, Any]:
    """Facts of a ViT with rotary positions that its tensors do not show, under Hugging Face's names."""
    known = VITS.get(config["architecture"])
    if known is None or known.rope is None:
        return {}
    arguments = config["model_args"] if isinstance(config.get("model_args"), dict) else {}
    facts = {
        "image_size": timm_side(config, arguments),
        "rope_theta": arguments.get("rope_temperature"),
        "layer_norm_eps": known.norm_eps,
    }
    return {key: value for key, value in facts.items() if value is not None}


def _read_folder(folder: Path) -> Content:
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointError(
            f"{folder} is neither a run (no config.yaml) nor a Hugging Face folder (no {_FILES[0]}); give one of them, "
            "or a file of weights"
        )
    if file.suffix != ".json":
        return read_file(file)
    parts = read_json(file).get("weight_map")
    named = [*parts.values()] if isinstance(parts, dict) else []
    if not named or not all(isinstance(name, str) and Path(name).name == name for name in named):
        raise CheckpointError(f"{file} names no files of weights beside it")
    tensors: dict[str, Tensor] = {}
    for part in sorted(set(named)):
        tensors |= read_file(folder / part)[0]
    return tensors, {}


def read_file(path: Path) -> Content:
    """A file's tensors, and the facts in the JSON next to it, if any, which must describe this very file."""
    while path.is_file():
        verified = path.stat()
        if placeholder := find_placeholder(str(path)):
            raise CheckpointError(f"{path} is {placeholder}")
        facts = read_sidecar(path)
        tensors = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
        if path.is_file() and os.path.samestat(path.stat(), verified):
            return tensors, facts
        # else a running process has replaced the file between the two readings
    raise CheckpointError(f"{path} does not exist; give a file of weights or a Hugging Face folder")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from None


class _Settings:
    """Stands in for the objects that training scripts save next to their tensors, which are not read."""

    def __init__(self, *values: object) -> None:
        pass


_STAND_INS = (
    "argparse.Namespace",
    *(f"{m}.{c}Path" for m in ("pathlib", "pathlib._local") for c in ("Posix", "Windows")),
)


def _read_torch(path: Path) -> dict[str, Tensor]:
    """The tensors of the teacher in a torch file.

    Raises CheckpointError for other files, and for files that hold more than data.
    """
    content = _load_torch(path)
    for key in ("teacher", "model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
        keys = ", ".join(map(str, content))[:120] if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path} holds no weights of a teacher: it is {keys}")
    return {str(name): tensor for name, tensor in content.items()}


def _load_torch(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals([(_Settings, name) for name in _STAND_INS]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its reader meets
        if refused := re.search(r"GLOBAL (\S+) (was not an allowed|whose module)", str(error)):
            raise CheckpointError(
                f"{path} is refused: it holds more than tensors and plain values (an object of {refused[1]}); "
                "save the tensors alone, as torch.save(checkpoint['teacher'], FILE) does"
            ) from None
        # Without the colors of a terminal and torch's long preface.
        reason = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(error)).rpartition("WeightsUnpickler error: ")[2]
        reason = f"{type(error).__name__}: {one_line(reason)}"
        raise CheckpointError(f"{path} is not a readable torch file, or not a whole one ({reason})") from None


def _check_huggingface(config: dict[str, Any]) -> None:
    """Raises CheckpointError for an activation other than GELU, or SwiGLU's SiLU: no tensor shows it."""
    activation, gated = config.get("hidden_act", "gelu"), config.get("use_gated_mlp")
    wanted = "silu" if gated else "gelu"
    if activation != wanted and not config.get("use_swiglu_ffn"):
        raise CheckpointError(f"its MLP has {activation}, and dino_ds's has {wanted}")

"""Reads weights of this project, facebookresearch/dino and dinov2, timm or Hugging Face; nothing in them is run."""

from __future__ import annotations

import json
import math
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from dino_ds.architectures import ARCHITECTURES
from dino_ds.checkpoint.manifest import SavedCheckpoint, check_present, read_manifest, step_name
from dino_ds.errors import CheckpointError
from dino_ds.names import MODEL_FORMS, did_you_mean
from dino_ds.weights.hub import hub_or_cache, on_a_hub
from dino_ds.weights.huggingface import from_huggingface, left_out
from dino_ds.weights.reference import about_dinov3, few, split_network
from dino_ds.weights.torch_file import read_torch

_BACKBONE = re.compile(
    r"cls_token|pos_embed|reg_token|(patch_embed\.proj|norm)\.(weight|bias)|"
    r"blocks\.\d+\.((norm1|norm2|attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.(weight|bias)|ls[12]\.gamma)"
)
_HEAD = "teacher.head."
_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
"""Of a Hugging Face folder."""
Content = tuple[dict[str, Tensor], dict[str, Any]]
"""The tensors of a file, and what else in it tells of their architecture."""


@dataclass(frozen=True)
class Weights:
    """Tensors under our (timm's) names; `kind` says whose file it was; `about`: the JSON beside it, as teacher.json.

    `notes`: what was not taken and why, for people.
    """

    kind: str
    backbone: dict[str, Tensor]
    head: dict[str, Tensor]
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def find_weights(place: str | Path) -> Weights:
    """Of a run folder (its teacher), a file, a Hugging Face folder, or a timm name, which may have to be downloaded.

    A run's head lies in its checkpoints. Raises CheckpointError for what is no such thing.
    """
    path = Path(place)
    if not path.exists() and _is_timm_name(str(place)):
        return _from_timm(str(place))
    if not path.exists():
        near = on_a_hub(str(place)) or f"give {MODEL_FORMS}.{did_you_mean(str(place), ARCHITECTURES)}"
        raise CheckpointError(f"{place} does not exist; {near}")
    teacher = path / "teacher.safetensors"
    if (path / "config.yaml").is_file() and not teacher.is_file():
        raise CheckpointError(f"{path} is a run without a teacher yet: it is written with the first checkpoint")
    if not teacher.is_file():
        return read_weights(path)
    weights = read_weights(teacher)
    head, notes = _head_of_run(path, weights.about.get("step"))
    return Weights(weights.kind, weights.backbone, head, weights.about, [*weights.notes, *notes])


def _head_of_run(run: Path, step: object) -> tuple[dict[str, Tensor], list[str]]:
    """The teacher's head, from the checkpoint that the teacher was written with; else why there is none."""
    if not isinstance(step, int) or not 0 <= step < 10**12:
        return {}, []
    folder = run / "checkpoints" / step_name(step)
    try:
        if not folder.is_dir():
            raise CheckpointError(f"{folder.relative_to(run)} is not there")
        manifest = read_manifest(folder)
        check_present(folder, manifest)
        whole = SavedCheckpoint(folder, manifest).whole()
        head = {name.removeprefix(_HEAD): t for name, t in whole.items() if name.startswith(_HEAD)}
        _check_numbers(folder, head)
    except (CheckpointError, OSError) as error:
        return {}, [f"its head can't be had ({error})"]
    return head, []


def _is_timm_name(name: str) -> bool:
    base, _, tag = name.partition(".")
    if base in ARCHITECTURES:
        return True
    if not re.fullmatch(r"\w+", base) or tag in ("pth", "pt", "bin", "ckpt", "safetensors"):
        return False
    import timm

    return bool(timm.is_model(base))


def _from_timm(name: str) -> Weights:
    import timm

    with hub_or_cache() as why:
        try:
            model = timm.create_model(name, pretrained=True, num_classes=0)
        except Exception as error:  # whatever timm and the hub's client raise
            reason = why or textwrap.shorten(str(error), 160, placeholder=" ...")
            raise CheckpointError(
                f"the weights of {name} are not in the cache, and can't be had ({reason}); give a file of weights"
            ) from None
    tensors = dict(model.state_dict())
    try:
        network = split_network(tensors, "teacher")
        backbone = _checked(network.backbone)
    except CheckpointError as error:
        raise CheckpointError(f"timm's {name}: {error}") from None
    heads, eps = model.get_submodule("blocks.0.attn").num_heads, model.get_submodule("norm").eps
    about = {"timm_name": name.partition(".")[0], "num_attention_heads": heads, "layer_norm_eps": eps}
    return Weights("timm", backbone, {}, about, network.notes)


def read_weights(path: Path, network: str = "teacher") -> Weights:
    """`path` a file or a Hugging Face folder; `network` teacher or student, where a checkpoint holds both.

    Pickles are read as data only (`weights_only`). Raises CheckpointError for what is no ViT's weights.
    """
    tensors, about = _read_folder(path) if path.is_dir() else _read_file(path, network)
    if path.is_dir() or path.suffix == ".safetensors":  # beside a file of another kind it belongs to another one
        about = _read_json(path / "config.json" if path.is_dir() else path.with_suffix(".json"))
    try:
        if any(".attention.attention.query." in name for name in tensors):
            _check_huggingface(about)
            weights = Weights("huggingface", _checked(from_huggingface(tensors)), {}, about, left_out(tensors))
        else:
            found = split_network(tensors, network)
            kind = "dinov2" if any(".ls1." in n for n in found.backbone) else "dino or timm"
            if isinstance(about.get("architecture"), str):
                kind, about = "timm", _from_timm_config(about)
            elif "architecture" in about:
                kind = "dino_ds"
            weights = Weights(kind, _checked(found.backbone), found.head, about, found.notes)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    _check_numbers(path, weights.backbone | weights.head)
    return weights


def _from_timm_config(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json of a timm folder (its own or `dino-ds export --format timm`) says of the network."""
    name, arguments = config["architecture"], config.get("model_args")
    heads = arguments.get("num_heads") if isinstance(arguments, dict) else None
    if heads is None and name in ARCHITECTURES:
        heads = ARCHITECTURES[name].heads
    if not isinstance(heads, int | None):
        raise CheckpointError(f"config.json: num_heads {heads!r} is not a whole number")
    return {"timm_name": name, **({"num_attention_heads": heads} if heads else {})}


def _read_folder(folder: Path) -> Content:
    found = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if found is None:
        raise CheckpointError(
            f"{folder} is neither a run (no config.yaml) nor a Hugging Face folder (no {_FILES[0]}); give one of them, "
            "or a file of weights"
        )
    if found.suffix != ".json":
        return _read_file(found, "teacher")
    parts = _read_json(found).get("weight_map")
    names = set(parts.values()) if isinstance(parts, dict) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CheckpointError(f"{found} names no files of weights beside it")
    tensors: dict[str, Tensor] = {}
    for part in sorted(names):
        tensors |= _read_file(folder / part, "teacher")[0]
    return tensors, {}


def _read_file(path: Path, network: str) -> Content:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; give a file of weights or a Hugging Face folder")
    return (_read_safetensors(path), {}) if path.suffix == ".safetensors" else read_torch(path, network)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _check_huggingface(config: dict[str, Any]) -> None:
    """What no tensor tells: our MLP has GELU. Raises CheckpointError."""
    activation = config.get("hidden_act", "gelu")
    if activation != "gelu" and not config.get("use_swiglu_ffn"):
        raise CheckpointError(f"its MLP has {activation}, and dino_ds's has gelu")


def _checked(backbone: dict[str, Tensor]) -> dict[str, Tensor]:
    """A backbone that has nothing that ours lacks, and positions in our form. Raises CheckpointError."""
    unknown = sorted(name for name in backbone if not _BACKBONE.fullmatch(name))
    if unknown:
        raise CheckpointError(
            f"it is another kind of network: dino_ds's ViT has no {few(unknown)}{about_dinov3(unknown)}"
        )
    cls, positions = backbone.get("cls_token"), backbone.get("pos_embed")
    if cls is None or positions is None:
        raise CheckpointError(f"it lacks {'a class token' if cls is None else 'learned positions: pos_embed'}")
    if positions.ndim != 3 or cls.shape != (1, 1, positions.shape[2]):
        raise CheckpointError(f"it has a class token of {list(cls.shape)} and positions of {list(positions.shape)}")
    only_patches = math.isqrt(positions.shape[1]) ** 2 == positions.shape[1]
    if "reg_token" in backbone and not only_patches:
        # As timm: the class token's own position is added to it once and for all.
        return backbone | {"cls_token": cls + positions[:, :1], "pos_embed": positions[:, 1:]}
    if "reg_token" not in backbone and only_patches:
        return backbone | {"pos_embed": torch.cat((torch.zeros_like(cls), positions), dim=1)}
    return backbone


def _check_numbers(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raises CheckpointError for NaN, infinity, and what is no floating-point number."""
    wrong = [name for name, t in tensors.items() if not t.is_floating_point() or not torch.isfinite(t.float()).all()]
    if wrong:
        raise CheckpointError(f"{path} has NaN, infinity or whole numbers for weights in {few(wrong)}")

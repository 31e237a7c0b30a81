"""Finds the weights that a name or path stands for: a run folder, a file, a Hugging Face folder or a timm name."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor

from dino_ds.basics.names import step_name
from dino_ds.checkpoint.manifest import MANIFEST, STEP_NAME, WHOLE, SavedCheckpoint
from dino_ds.checkpoint.opening import open_checkpoint
from dino_ds.config.stages import missing_model
from dino_ds.errors import CheckpointError, naming, one_line
from dino_ds.models.specs.backbones import BACKBONES, VITS
from dino_ds.models.specs.foreign_backbones import ForeignSpec
from dino_ds.models.trained import adapters_in, merged
from dino_ds.weights.layouts import split_local_norm, split_network
from dino_ds.weights.normalization import timm_statistics
from dino_ds.weights.read import network_weights, read_weights
from dino_ds.weights.sidecar import about_checkpoint, read_facts, recipe_of
from dino_ds.weights.tensors import Weights, checked, has_rope


def find_weights(source: str | os.PathLike[str], asked: ForeignSpec | None = None) -> Weights:
    """Read the weights of a run folder (its teacher), a checkpoint, a file, a Hugging Face folder or a timm name, which
    may be downloaded.

    A run's heads and mask token are read from its checkpoints. asked: the network that the user names, if no file does.
    All that is read from a run, a checkpoint or an export is verified. Raises CheckpointError for any other `source`.
    """
    path = Path(os.path.expanduser(source))
    there = os.path.exists(path)  # also False for a name that no file can have
    if not there and _may_be_downloaded(str(source)):
        return _from_timm(str(source))
    if not there:
        raise missing_model(str(source))
    if is_checkpoint(path):
        return _of_checkpoint(path, asked)
    if path.is_file() and is_checkpoint(path.parent):
        raise CheckpointError(f"{path} is a part of a checkpoint: give {path.parent}")
    teacher = path / "teacher.safetensors"
    if (path / "config.yaml").is_file():
        _check_teacher(path)
    if not teacher.is_file():
        return read_weights(path, asked=asked)
    return _with_checkpoint(path, read_weights(teacher, asked=asked))


def _check_teacher(run: Path) -> None:
    """Raises CheckpointError where a run lacks its teacher or the JSON that describes it."""
    weights, about = run / "teacher.safetensors", run / "teacher.json"
    there = [os.path.lexists(file) for file in (weights, about)]
    if not any(there):
        raise CheckpointError(f"{run} is a run without a teacher yet: it is written with the first checkpoint")
    instead = "bring it back, or give one of the run's checkpoints"
    if not weights.is_file():
        raise CheckpointError(f"{weights} is {'not a file' if there[0] else 'missing'}: {instead}")
    if not there[1]:
        raise CheckpointError(
            f"{about} is missing, and it says what {weights.name} is and how its images are prepared: {instead}"
        )


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is the folder of one checkpoint, complete or not."""
    is_named_so = STEP_NAME.fullmatch(path.name) is not None and path.parent.name == "checkpoints"
    has_manifest = (path / MANIFEST).is_file() and not (path / "config.json").is_file()  # others' folders have one
    return path.is_dir() and (is_named_so or has_manifest)


def _of_checkpoint(folder: Path, asked: ForeignSpec | None) -> Weights:
    """The teacher of one checkpoint with its heads, described as in teacher.json."""
    saved = open_checkpoint(folder, WHOLE)
    with naming(folder):
        parts = network_parts(saved)
        backbone = parts.pop("backbone")
        facts = about_checkpoint(saved.manifest)
    weights = replace(network_weights(folder, backbone, facts, asked), heads=parts)
    weights.check_numbers(folder)
    return weights


def _with_checkpoint(run: Path, weights: Weights) -> Weights:
    """`weights` with the teacher's heads and mask token from their checkpoint, or with a note that it was removed.

    Raises CheckpointError where that checkpoint is damaged.
    """
    folder = _checkpoint_folder(run, weights.about.get("step"))
    if folder is None:
        return weights
    if not (folder / MANIFEST).is_file():  # removed as the run went on
        note = f"its head is not available ({folder.relative_to(run)} is not there)"
        return replace(weights, notes=[*weights.notes, note])
    try:
        saved = teacher_weights(open_checkpoint(folder, WHOLE))
        whole = replace(weights, heads=saved.heads, mask_token=saved.mask_token, local_norm=saved.local_norm)
        whole.check_numbers(folder)
    except CheckpointError as error:
        alone = f"the backbone alone, without heads, is {run / 'teacher.safetensors'}"
        raise CheckpointError(f"{error}; {alone}") from None
    return whole


def checkpoint_of(run: Path) -> Path | None:
    """The checkpoint that a run's teacher.safetensors was written with, or None if one of the two is missing.

    Raises CheckpointError for a damaged teacher.json.
    """
    folder = _checkpoint_folder(run, read_facts(run / "teacher.json").get("step"))
    return folder if folder is not None and folder.is_dir() else None


def _checkpoint_folder(run: Path, step: object) -> Path | None:
    return run / "checkpoints" / step_name(step) if isinstance(step, int) and 0 <= step < 10**12 else None


def teacher_weights(saved: SavedCheckpoint) -> Weights:
    """The weights of the EMA teacher of a verified checkpoint, with its heads."""
    parts = network_parts(saved)
    backbone, local = split_local_norm(parts.pop("backbone"))
    mask_token = backbone.pop("mask_token", None)
    return Weights("dino_ds", backbone, parts, mask_token=mask_token, local_norm=local)


def network_parts(saved: SavedCheckpoint) -> dict[str, dict[str, Tensor]]:
    """The tensors of the teacher's backbone and of its heads in a checkpoint, by the part's name; adapters are
    merged into the weights of their layers."""
    parts: dict[str, dict[str, Tensor]] = {"backbone": {}}
    for name, tensor in saved.whole().items():
        owner, _, rest = name.partition(".")
        part, _, inside = rest.partition(".")
        if owner == "teacher":
            parts.setdefault(part, {})[inside] = tensor
    if adapters_in(parts["backbone"]):
        parts["backbone"] = merged(parts["backbone"], recipe_of(saved.manifest).model.lora_alpha)
    return parts


def _may_be_downloaded(name: str) -> bool:
    base, _, tag = name.partition(".")
    return base in BACKBONES or (tag not in ("pth", "pt", "bin", "ckpt", "safetensors") and is_timm_name(base))


def is_timm_name(name: object) -> TypeGuard[str]:
    """Whether timm itself has a model of this name; a run folder's JSON may hold anything, such as a hub's address."""
    import timm

    return isinstance(name, str) and re.fullmatch(r"\w+", name) is not None and bool(timm.is_model(name))


def _from_timm(name: str) -> Weights:
    import timm

    base = name.partition(".")[0]
    try:
        model = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as error:  # whatever timm and the hub's client raise
        raise CheckpointError(
            f"the weights of {name} are neither in the cache nor available ({one_line(error)}); give a file of weights"
        ) from None
    tensors = dict(model.state_dict())
    stated: Any = model.default_cfg
    config = {key: list(stated[key]) for key in ("mean", "std", "input_size")}
    about: dict[str, Any] = {"timm_name": base, **timm_statistics(config)}
    try:
        network = split_network(tensors)
        backbone = checked(network.backbone)
        if has_rope(backbone) and base not in VITS:
            raise CheckpointError("its rotary positions are another kind")
    except CheckpointError as error:
        if base in BACKBONES:
            raise CheckpointError(f"timm's {name}: {error}") from None
        return Weights("timm", tensors, about=about, spec=ForeignSpec(base), image_size=config["input_size"][-1])
    heads, eps = model.get_submodule("blocks.0.attn").num_heads, model.get_submodule("norm").eps
    about |= {"num_attention_heads": heads, "layer_norm_eps": eps, "image_size": config["input_size"][-1]}
    return Weights("timm", backbone, about=about, notes=network.notes)

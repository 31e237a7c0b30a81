"""Finds the weights that a name or path stands for, and reads those of this project, facebookresearch's dino to dinov3,
timm or Hugging Face; no code in them is run."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import urlsplit
from urllib.request import getproxies

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from dino_ds.basics.names import step_name
from dino_ds.checkpoint.manifest import MANIFEST, STEP_NAME, WHOLE, SavedCheckpoint
from dino_ds.config.stages import missing_model
from dino_ds.data.images import find_placeholder
from dino_ds.errors import CheckpointError, naming, one_line
from dino_ds.models.specs.backbones import BACKBONES, VITS
from dino_ds.models.specs.foreign import ForeignSpec
from dino_ds.models.trained import adapters_in, merged
from dino_ds.weights import foreign, layouts, sidecar

_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
"""Files of weights in a Hugging Face folder."""
Content = tuple[dict[str, Tensor], dict[str, Any]]  # the tensors of a file, and the facts in the JSON next to it
_STAND_INS = (
    "argparse.Namespace",
    *(f"{m}.{c}Path" for m in ("pathlib", "pathlib._local") for c in ("Posix", "Windows")),
)


def find_weights(source: str | os.PathLike[str], asked: ForeignSpec | None = None) -> layouts.Weights:
    """Read the weights of a run folder (its teacher), a checkpoint, a file, a Hugging Face folder or a timm name, which
    may be downloaded. A run's heads and mask token are read from its checkpoints. asked: the network that the user
    names, if no file does. All of a run, a checkpoint or an export is verified. Raises CheckpointError."""
    path = Path(os.path.expanduser(source))
    there = os.path.exists(path)  # also False for a name that no file can have
    base, _, tag = str(source).partition(".")
    is_file_name = tag in ("pth", "pt", "bin", "ckpt", "safetensors")
    if not there and (base in BACKBONES or (not is_file_name and is_timm_name(base))):
        return _from_timm(str(source))
    if not there:
        raise missing_model(str(source))
    if is_checkpoint(path):
        return _of_checkpoint(path, asked)
    if path.is_file() and is_checkpoint(path.parent):
        raise CheckpointError(f"{path} is a part of a checkpoint: give {path.parent}")
    teacher, about = path / "teacher.safetensors", path / "teacher.json"
    if (path / "config.yaml").is_file():
        has_teacher, has_about = map(os.path.lexists, (teacher, about))
        if not has_teacher and not has_about:
            raise CheckpointError(f"{path} is a run without a teacher yet: it is written with the first checkpoint")
        instead = "bring it back, or give one of the run's checkpoints"
        if not teacher.is_file():
            raise CheckpointError(f"{teacher} is {'not a file' if has_teacher else 'missing'}: {instead}")
        if not has_about:
            why = f"{about} is missing, and it says what {teacher.name} is and how its images are prepared: {instead}"
            raise CheckpointError(why)
    if not teacher.is_file():
        return read_weights(path, asked=asked)
    return _with_checkpoint(path, read_weights(teacher, asked=asked))


@contextmanager
def _without_retries() -> Iterator[str]:
    """Use the hub's cache alone if its host can't be resolved (its client would retry); yields that host, else ""."""
    from huggingface_hub import constants

    host, offline = urlsplit(constants.ENDPOINT).hostname or "", constants.HF_HUB_OFFLINE
    unknown_host = ""
    try:
        if not getproxies():
            socket.getaddrinfo(host, 443)
    except OSError:
        constants.HF_HUB_OFFLINE, unknown_host = True, host
    try:
        yield unknown_host
    finally:
        constants.HF_HUB_OFFLINE = offline


def _from_timm(name: str) -> layouts.Weights:
    import timm

    base = name.partition(".")[0]
    with _without_retries() as unknown_host:
        try:
            model = timm.create_model(name, pretrained=True, num_classes=0)
        except Exception as error:  # whatever timm and the hub's client raise
            reason = one_line(error)
            if unknown_host and "pretrained tag" not in reason:
                reason = f"no network: {unknown_host} is not known here"
            why = f"the weights of {name} are neither in the cache nor available ({reason}); give a file of weights"
            raise CheckpointError(why) from None
    tensors = dict(model.state_dict())
    stated: Any = model.default_cfg
    config = {key: list(stated[key]) for key in ("mean", "std", "input_size")}
    about: dict[str, Any] = {"timm_name": base, **sidecar.timm_statistics(config)}
    try:
        network = layouts.split_network(tensors)
        backbone = layouts.checked(network.backbone)
        if layouts.has_rope(backbone) and base not in VITS:
            raise CheckpointError("its rotary positions are another kind")
    except CheckpointError as error:
        if base in BACKBONES:
            raise CheckpointError(f"timm's {name}: {error}") from None
        return layouts.Weights(
            "timm", tensors, about=about, spec=ForeignSpec(base), image_size=config["input_size"][-1]
        )
    heads, eps = model.get_submodule("blocks.0.attn").num_heads, model.get_submodule("norm").eps
    about |= {"num_attention_heads": heads, "layer_norm_eps": eps, "image_size": config["input_size"][-1]}
    return layouts.Weights("timm", backbone, about=about, notes=network.notes)


def is_timm_name(name: object) -> TypeGuard[str]:
    """Whether timm itself has a model of this name; a run folder's JSON may hold anything, such as a hub's address."""
    import timm

    return isinstance(name, str) and re.fullmatch(r"\w+", name) is not None and bool(timm.is_model(name))


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is the folder of one checkpoint, complete or not."""
    is_named_so = STEP_NAME.fullmatch(path.name) is not None and path.parent.name == "checkpoints"
    has_manifest = (path / MANIFEST).is_file() and not (path / "config.json").is_file()  # others' folders have both
    return path.is_dir() and (is_named_so or has_manifest)


def checkpoint_of(run: Path) -> Path | None:
    """The checkpoint that a run's teacher.safetensors was written with, or None if one of the two is missing. Raises
    CheckpointError for a damaged teacher.json."""
    folder = _checkpoint_folder(run, sidecar.read_facts(run / "teacher.json").get("step"))
    return folder if folder is not None and folder.is_dir() else None


def _checkpoint_folder(run: Path, step: object) -> Path | None:
    return run / "checkpoints" / step_name(step) if isinstance(step, int) and 0 <= step < 10**12 else None


def _of_checkpoint(folder: Path, asked: ForeignSpec | None) -> layouts.Weights:
    saved = sidecar.open_checkpoint(folder, WHOLE)
    with naming(folder):
        parts = network_parts(saved)
        backbone = parts.pop("backbone")
        about = saved.manifest
        facts = sidecar.about_teacher(sidecar.recipe_of(about), about.frozen_teacher, about.step, about.versions)
    weights = replace(network_weights(folder, backbone, facts, asked), heads=parts)
    weights.check_numbers(folder)
    return weights


def _with_checkpoint(run: Path, weights: layouts.Weights) -> layouts.Weights:
    """`weights` with the teacher's heads and mask token from their checkpoint, or with a note that it was removed.
    Raises CheckpointError where that checkpoint is damaged."""
    folder = _checkpoint_folder(run, weights.about.get("step"))
    if folder is None:
        return weights
    if not (folder / MANIFEST).is_file():  # removed as the run went on
        note = f"its head is not available ({folder.relative_to(run)} is not there)"
        return replace(weights, notes=[*weights.notes, note])
    try:
        saved = teacher_weights(sidecar.open_checkpoint(folder, WHOLE))
        whole = replace(weights, heads=saved.heads, mask_token=saved.mask_token, local_norm=saved.local_norm)
        whole.check_numbers(folder)
    except CheckpointError as error:
        alone = f"the backbone alone, without heads, is {run / 'teacher.safetensors'}"
        raise CheckpointError(f"{error}; {alone}") from None
    return whole


def teacher_weights(saved: SavedCheckpoint) -> layouts.Weights:
    parts = network_parts(saved)
    backbone, local = layouts.split_local_norm(parts.pop("backbone"))
    mask_token = backbone.pop("mask_token", None)
    return layouts.Weights("dino_ds", backbone, parts, mask_token=mask_token, local_norm=local)


def network_parts(saved: SavedCheckpoint) -> dict[str, dict[str, Tensor]]:
    """The tensors of the teacher's backbone, with adapters merged, and of its heads in a checkpoint, by part."""
    parts: dict[str, dict[str, Tensor]] = {"backbone": {}}
    for name, tensor in saved.whole().items():
        owner, _, rest = name.partition(".")
        part, _, inside = rest.partition(".")
        if owner == "teacher":
            parts.setdefault(part, {})[inside] = tensor
    if adapters_in(parts["backbone"]):
        parts["backbone"] = merged(parts["backbone"], sidecar.recipe_of(saved.manifest).model.lora_alpha)
    return parts


def read_weights(path: Path, asked: ForeignSpec | None = None) -> layouts.Weights:
    """Read a file or a Hugging Face folder; of a checkpoint that holds teacher and student, the teacher. asked: the
    network that the user names. Pickles are read as data only (`weights_only`). Raises CheckpointError for anything but
    a network's weights, and where a file is not the one that the JSON next to it describes."""
    tensors, about = _read_folder(path) if path.is_dir() else read_file(path)
    if path.is_dir():
        about = sidecar.read_json(path / "config.json")
    if not any(".attention.attention.query." in n or n.endswith(".attention.q_proj.weight") for n in tensors):
        return network_weights(path, tensors, about, asked)  # not one of transformers' own ViTs
    with naming(path):
        activation, wanted = about.get("hidden_act", "gelu"), "silu" if about.get("use_gated_mlp") else "gelu"
        if activation != wanted and not about.get("use_swiglu_ffn"):  # no tensor shows it
            raise CheckpointError(f"its MLP has {activation}, and dino_ds's has {wanted}")
        stated, said = sidecar.processor_statistics(
            sidecar.read_json(path / sidecar.PROCESSOR) if path.is_dir() else {}
        )
        weights = layouts.from_huggingface(tensors)
        backbone = layouts.checked(weights.backbone)
        weights = replace(weights, backbone=backbone, about=about | stated, notes=[*weights.notes, *said])
    weights.check_numbers(path)
    return weights


def network_weights(
    path: Path, tensors: dict[str, Tensor], about: dict[str, Any], asked: ForeignSpec | None
) -> layouts.Weights:
    """The network among the `tensors` of `path`, which `about` describes; `asked` as in `read_weights`. Raises
    CheckpointError that says why they are not a ViT's."""
    is_said_to_be_other = asked is not None or "backbone" in about
    with naming(path):
        weights = foreign.other_network(tensors, about, asked) if is_said_to_be_other else None
        try:
            weights = weights or _of_vit(tensors, about)
        except CheckpointError:
            if asked is not None:
                known = f"neither a {asked.name} nor a Vision Transformer that dino_ds knows"
                raise CheckpointError(f"it is {known}: its tensors are {layouts.few(sorted(tensors))}") from None
            weights = None if is_said_to_be_other else foreign.other_network(tensors, about, asked)
            if weights is None:
                raise
    weights.check_numbers(path)
    return weights


def _of_vit(tensors: dict[str, Tensor], about: dict[str, Any]) -> layouts.Weights:
    network = layouts.split_network(tensors)
    kind, backbone, notes = network.kind, network.backbone, network.notes
    if backbone.keys() & {"storage_tokens", layouts.PERIODS}:
        kind, (backbone, facts, more) = "dinov3", layouts.from_dinov3(backbone)
        about, notes = about | facts, [*notes, *more]
    backbone, local_norm = layouts.split_local_norm(layouts.checked(backbone))
    if isinstance(about.get("architecture"), str):
        if layouts.has_rope(backbone) and about["architecture"] not in VITS:
            raise CheckpointError(f"config.json: its rotary positions are those of timm's {about['architecture']}")
        kind, about = "timm", _from_timm_config(about)
    elif "architecture" in about:
        kind = "dino_ds"
    return replace(network, kind=kind, backbone=backbone, about=about, notes=notes, local_norm=local_norm)


def _from_timm_config(config: dict[str, Any]) -> dict[str, Any]:
    """Facts on the network from config.json of a timm folder (timm's own, or by `dino-ds export RUN --format timm`)."""
    name, arguments = config["architecture"], config.get("model_args")
    arguments = arguments if isinstance(arguments, dict) else {}
    heads = arguments.get("num_heads")
    if heads is None and name in VITS:
        heads = VITS[name].heads
    if not isinstance(heads, int | None):
        raise CheckpointError(f"config.json: num_heads {heads!r} is not a whole number")
    about = {"timm_name": name, **({"num_attention_heads": heads} if heads else {})}
    about |= {key: config[key] for key in ("value_range",) if key in config}
    if name in VITS and VITS[name].rope is not None:  # what its tensors do not show, under Hugging Face's names
        side, base = sidecar.timm_side(config, arguments), arguments.get("rope_temperature")
        facts = {"image_size": side, "rope_theta": base, "layer_norm_eps": VITS[name].norm_eps}
        about |= {key: value for key, value in facts.items() if value is not None}
    return about | sidecar.timm_statistics(config.get("pretrained_cfg"))


def _read_folder(folder: Path) -> Content:
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        why = f"{folder} is neither a run (no config.yaml) nor a Hugging Face folder (no {_FILES[0]})"
        raise CheckpointError(f"{why}; give one of them, or a file of weights; a folder of images goes to --root")
    if file.suffix != ".json":
        return read_file(file)
    parts = sidecar.read_json(file).get("weight_map")
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
        facts = sidecar.read_sidecar(path)
        try:
            tensors = safetensors.torch.load_file(path) if path.suffix == ".safetensors" else _read_torch(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from None
        if path.is_file() and os.path.samestat(path.stat(), verified):
            return tensors, facts
        # else a running process has replaced the file between the two readings
    raise CheckpointError(f"{path} does not exist; give a file of weights or a Hugging Face folder")


class _Settings:
    """Stands in for the objects that training scripts save next to their tensors, which are not read."""

    def __init__(self, *values: object) -> None:
        pass


def _read_torch(path: Path) -> dict[str, Tensor]:
    """The tensors of the teacher in a torch file. Raises CheckpointError for other files, and for more than data."""
    try:
        with torch.serialization.safe_globals([(_Settings, name) for name in _STAND_INS]):
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its reader meets
        if refused := re.search(r"GLOBAL (\S+) (was not an allowed|whose module)", str(error)):
            why = f"{path} is refused"
            more = f"it holds more than tensors and plain values (an object of {refused[1]}); save the tensors alone"
            raise CheckpointError(f"{why}: {more}, as torch.save(checkpoint['teacher'], FILE) does") from None
        # Without the colors of a terminal and torch's long preface.
        reason = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(error)).rpartition("WeightsUnpickler error: ")[2]
        reason = f"{type(error).__name__}: {one_line(reason)}"
        raise CheckpointError(f"{path} is not a readable torch file, or not a whole one ({reason})") from None
    for key in ("teacher", "model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
        keys = ", ".join(map(str, content))[:120] if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path} holds no weights of a teacher: it is {keys}")
    return {str(name): tensor for name, tensor in content.items()}

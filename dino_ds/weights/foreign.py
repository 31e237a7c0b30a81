"""Weights of networks that dino_ds does not build itself: recognizes the network, and maps the names in a file."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dino_ds.basics.own_code import why_refused
from dino_ds.errors import CheckpointError, ConfigError, one_line
from dino_ds.models.specs.backbones import BACKBONES, VITS, backbone_spec
from dino_ds.models.specs.base import BackboneSpec
from dino_ds.models.specs.foreign import SIZE_ARGUMENTS, ForeignSpec, create, foreign_spec
from dino_ds.weights.layouts import HEAD, MOST_SIZE, USUAL_SIZE, Weights, head_to_ours
from dino_ds.weights.sidecar import timm_side, timm_statistics

_RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
_CONVNEXTS = ("convnext_tiny", "convnext_small", "convnext_base", "convnext_large")
"""Networks that are recognized by the shapes of their tensors. torchvision and timm name those of ResNets alike; those
of ConvNeXts have the names of facebookresearch's files (DINOv3), which timm renames."""
_MOST_CHANNELS = 1024
_PLAIN_NUMBER = 1024
"""Largest number in arguments, unless a size in the file is larger: a network must not take hours to build."""
_MOST_TEXT = 4096
_OF_THE_USE = {*SIZE_ARGUMENTS, "in_chans", "num_classes", "drop_path_rate"}
"""Arguments in timm's config.json that are not part of the architecture, or have a field of their own in the spec."""
_WRAPPERS = re.compile(r"(?<![^.])(module|_orig_mod|timm_model)\.")
"""Prefixes that DDP, torch.compile and transformers add to names."""

Shapes = dict[str, tuple[int, ...]]


def other_network(tensors: dict[str, Tensor], about: dict[str, Any], asked: ForeignSpec | None) -> Weights | None:
    """The weights in a file, if they are of another network than our ViTs, else None. about: the JSON next to the file.
    asked: the network that the user names. Raises CheckpointError for an unusable JSON."""
    if (spec := stated_spec(about, tensors)) is not None:
        return Weights("dino_ds", tensors, about=about, spec=spec, image_size=_size(about.get("image_size")))
    if isinstance(about.get("architecture"), str):
        return _of_timm_folder(tensors, about)
    network, heads = _split(tensors)
    recognized = _recognized(tensors, network, asked)
    if recognized is None:
        return None
    spec, backbone = recognized
    heads = heads if backbone is network else {}
    backbone, notes = _without_classifier(backbone, spec)
    size = _size(about.get("image_size", USUAL_SIZE))
    if "image_size" not in about:
        notes.append(f"no file says the size of its images: {size} pixels are assumed")
    return Weights("dino or timm", backbone, heads, about, notes, spec=spec, image_size=size)


def stated_spec(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> BackboneSpec | None:
    """The backbone that teacher.json names, if it is not one of our Vision Transformers. Raises CheckpointError, also
    for a class that the user has not named."""
    name, numbers = about.get("backbone"), about.get("architecture")
    if not isinstance(name, str) or name in VITS or not isinstance(numbers, dict):
        return None
    if ":" in name and (refused := why_refused(name)):
        raise CheckpointError(f"the JSON beside the weights {refused}")
    try:
        spec: Any = backbone_spec(name)
        if "arguments" in spec.obeys:
            _check_foreign(numbers, name, tensors)
        elif not all(value is None or isinstance(value, int | float | str) for value in numbers.values()):
            raise TypeError
        stated: BackboneSpec = replace(spec, **numbers)
    except (TypeError, ValueError) as error:
        reason = f" ({one_line(error)})" if isinstance(error, ValueError) else ""
        why = f"the JSON beside the weights has an architecture that is not that of a {ascii(name)[1:-1][:80]}{reason}"
        raise CheckpointError(why) from None
    return stated


def _check_foreign(numbers: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError where `numbers`, the fields of a spec with `arguments`, are not such as a run writes."""
    channels, arguments = numbers.get("in_chans"), numbers.get("arguments")
    if numbers.keys() != {"name", "in_chans", "arguments"} or numbers["name"] != name:
        raise ValueError("wanted are its name, in_chans and arguments")
    if not isinstance(channels, int) or isinstance(channels, bool) or not 1 <= channels <= _MOST_CHANNELS:
        raise ValueError(f"in_chans {str(channels)[:20]}")
    if not isinstance(arguments, str) or len(arguments) > _MOST_TEXT:
        raise ValueError("arguments are not a JSON object as text")
    try:
        keywords = json.loads(arguments)
    except RecursionError:
        raise ValueError("arguments are too deep") from None
    if not isinstance(keywords, dict) or len(str(keywords)) > _MOST_TEXT:
        raise ValueError("arguments are not a JSON object")
    largest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    most = max(_PLAIN_NUMBER, len(tensors), largest)
    todo: list[object] = [keywords]
    while todo:
        value = todo.pop()
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if isinstance(value, int | float) and not abs(value) <= most:
            raise ValueError(f"{str(value)[:20]} among its arguments, and nothing in the file is as large")


def _size(size: object) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MOST_SIZE:
        raise CheckpointError(f"the JSON beside the weights does not say the image_size in pixels: {str(size)[:20]}")
    return size


def _of_timm_folder(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> Weights | None:
    """The weights that timm's config.json describes, or None for one of our ViTs. Raises CheckpointError."""
    name, model_args = config["architecture"], config.get("model_args") or {}
    if name in BACKBONES:
        return None
    try:
        spec = foreign_spec(name)
        if not isinstance(model_args, dict) or not spec.is_timm:
            raise ValueError("model_args are not keywords")
        arguments = {key: model_args[key] for key in model_args.keys() - _OF_THE_USE}
        spec = replace(spec, in_chans=model_args.get("in_chans", 3), arguments=json.dumps(arguments, sort_keys=True))
        _check_foreign(vars(spec), name, tensors)
    except ValueError as error:
        raise CheckpointError(f"config.json: {one_line(error)}") from None
    side = timm_side(config, model_args)
    size = _size(USUAL_SIZE if side is None else side)
    backbone = {name.removeprefix("timm_model."): tensor for name, tensor in tensors.items()}
    backbone, notes = _without_classifier(backbone, spec)
    about = {"timm_name": name, **timm_statistics(config.get("pretrained_cfg"))}
    about |= {key: config[key] for key in ("value_range",) if key in config}
    return Weights("timm", backbone, about=about, notes=notes, spec=spec, image_size=size)


def _split(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The network and its heads, as facebookresearch/dino saves them; prefixes of wrappers are dropped."""
    plain = {_WRAPPERS.sub("", name): tensor for name, tensor in tensors.items()}
    heads: dict[str, dict[str, Tensor]] = {}
    network: dict[str, Tensor] = {}
    has_prefix = any(name.startswith("backbone.") for name in plain)
    for name, tensor in plain.items():
        if head := HEAD.fullmatch(name):
            heads.setdefault("head", {})[head[2]] = tensor
        elif name.startswith("backbone.") or not has_prefix:
            network[name.removeprefix("backbone.")] = tensor
    return network, {name: head_to_ours(head) for name, head in heads.items()}


def _recognized(
    tensors: dict[str, Tensor], network: dict[str, Tensor], asked: ForeignSpec | None
) -> tuple[ForeignSpec, dict[str, Tensor]] | None:
    """The recognized spec, and its tensors: `tensors` as they are, or the `network` among them; None for no match."""
    if asked is not None:
        for candidate in (tensors, network):
            stored = _with_stored_channels(asked, candidate)
            if _fits(candidate, stored):
                return stored, candidate
    first = network.get("conv1.weight")
    if first is not None and first.ndim == 4 and 1 <= first.shape[1] <= _MOST_CHANNELS:
        for name in _RESNETS:
            spec = ForeignSpec(name, in_chans=first.shape[1])
            if _fits(network, spec):
                return spec, network
    if "downsample_layers.0.0.weight" in network:
        from timm.models.convnext import checkpoint_filter_fn  # facebookresearch's names -> timm's

        for name in _CONVNEXTS if asked is None else (asked.name,):
            spec = ForeignSpec(name, in_chans=network["downsample_layers.0.0.weight"].shape[1])
            with suppress(ConfigError, KeyError, RuntimeError), torch.device("meta"):
                renamed = dict(checkpoint_filter_fn(dict(network), create(spec, None)))
                if _fits(renamed, spec):
                    return spec, renamed
    if asked is not None:  # does not fit: the caller's comparison names the tensors
        for candidate in (tensors, network):
            if candidate.keys() & shapes_of(asked)[0].keys():
                return asked, candidate
    return None


def _with_stored_channels(asked: ForeignSpec, tensors: Mapping[str, Tensor]) -> ForeignSpec:
    """`asked`, with the number of image channels that the first convolution among `tensors` has."""
    for name, shape in shapes_of(asked)[0].items():
        stored = tuple(tensors[name].shape) if name in tensors else ()
        if len(shape) == len(stored) == 4 and shape[1] == asked.in_chans and 1 <= stored[1] <= _MOST_CHANNELS:
            return replace(asked, in_chans=stored[1])
    return asked


def _fits(tensors: Mapping[str, Tensor], spec: ForeignSpec) -> bool:
    shapes, classifiers = shapes_of(spec)
    stored = {name: tuple(t.shape) for name, t in tensors.items() if name in shapes or not name.startswith(classifiers)}
    return stored == shapes


def _without_classifier(tensors: dict[str, Tensor], spec: ForeignSpec) -> tuple[dict[str, Tensor], list[str]]:
    shapes, classifiers = shapes_of(spec)
    dropped = [name for name in tensors if name not in shapes and name.startswith(classifiers)]
    notes = [f"its classifier is left out: {', '.join(sorted(dropped))}"] if dropped else []
    return {name: tensor for name, tensor in tensors.items() if name not in dropped}, notes


@functools.cache
def shapes_of(spec: ForeignSpec, image_size: int | None = None) -> tuple[Shapes, tuple[str, ...]]:
    """The shapes of a network's tensors and saved buffers, and the prefixes of its classifier's names. Raises
    CheckpointError for a network that can't be built."""
    try:
        with torch.device("meta"):
            network = create(spec, image_size)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    stated = getattr(network, "pretrained_cfg", None)
    layers = stated.get("classifier") if isinstance(stated, dict) and spec.is_timm else None
    names = [layers] if isinstance(layers, str) else layers or []
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    return shapes, tuple(f"{name}." for name in names)

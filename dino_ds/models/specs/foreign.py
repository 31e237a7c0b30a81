"""Backbones that dino_ds does not build itself: any timm model that gives features, and a user's own module. Their
facts are known, and checked, once they are built on the meta device, without memory."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import pickle
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dino_ds.basics.names import weights_elsewhere
from dino_ds.basics.own_code import find_own
from dino_ds.errors import ConfigError, one_line
from dino_ds.models.specs.base import BackboneSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

_PROBES = (224, 256, 64)  # sides in pixels of trial images, tried in this order until a network takes one
_ANY_SIZE = {"dynamic_img_size": True, "strict_img_size": False}
"""Arguments with which timm's models take sizes other than their native one."""
SIZE_ARGUMENTS = ("img_size", *_ANY_SIZE)
_NOT_ARGUMENTS = (  # arguments of timm.create_model that dino_ds sets itself, or that read or download files
    *("in_chans", "num_classes", "features_only"),
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"),
)


def why_untrainable(network: nn.Module, features: Callable[[], Tensor]) -> str:
    """Why `network`, on the meta device, can't be trained, or "". `features` computes its features (b, d). Under ZeRO a
    parameter without a gradient keeps an old gradient or is waited for forever; random numbers that are not a function
    of the image differ in the recomputation of a segment and after a resume."""
    import torch
    from timm.layers import DropPath
    from torch.utils._python_dispatch import TorchDispatchMode

    if unusable := _why_unusable(network):
        return unusable
    drawn, before = list[str](), _unsaved(network)

    class Draws(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if torch.Tag.nondeterministic_seeded in function.tags:
                drawn.append(str(function))
            return function(*args, **(kwargs or {}))

    network.train()
    for module in network.modules():
        if isinstance(module, DropPath):  # ours takes its place
            module.eval()
    states = random.getstate(), pickle.dumps(np.random.get_state())
    try:
        with torch.enable_grad(), Draws():
            image = features()
            if image.requires_grad:
                image.sum().backward()
    except Exception as error:  # whatever a foreign network raises
        return f"in training it raises {one_line(error)}"
    others = random.getstate(), pickle.dumps(np.random.get_state())
    drawn += [name for name, old, new in zip(("random", "numpy.random"), states, others, strict=True) if old != new]
    if drawn:
        advice = "which can't be drawn again: switch dropout off (drop_rate, attn_drop_rate of timm's)"
        return f"it draws random numbers of its own ({drawn[0]}), {advice}"
    if moved := [name for name, version in _unsaved(network).items() if before.get(name) != version]:
        return f"its buffer {moved[0]} changes with each pass, and no checkpoint holds it: make it persistent"
    idle = [name for name, parameter in network.named_parameters() if parameter.grad is None]
    if idle:
        more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
        return f"its features give no gradient to its parameter {idle[0]}{more}: remove what is not used"
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if names[id(parameter)] != name:
            return f"its parameters {names[id(parameter)]} and {name} are one tensor"
    return ""


def _unsaved(network: nn.Module) -> dict[str, tuple[int, int]]:
    """Name -> identity and version of each buffer that state_dict() leaves out; every write changes its version."""
    held = network.state_dict().keys()
    return {name: (id(b), b._version) for name, b in network.named_buffers() if name not in held}


def _why_unusable(network: nn.Module) -> str:
    import torch

    for name, module in network.named_modules():
        plain = next((key for key, value in vars(module).items() if isinstance(value, torch.Tensor)), None)
        if plain is not None:
            path = f"{name}.{plain}".removeprefix(".")
            return f"its {path} is a plain tensor, which moves to no device: make it a parameter or a buffer"
    for name, parameter in network.named_parameters():
        if parameter.dtype != torch.float32:
            return f"its parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, wanted is float32"
    return "" if any(True for _ in network.parameters()) else "it has no parameters"


def _fact(name: str) -> Any:
    """A property of `ForeignSpec` whose value is known once the network is built."""
    return property(lambda spec: getattr(facts_of(spec), name))


@dataclass(frozen=True)
class ForeignSpec(BackboneSpec):
    """A backbone by `name`: timm's name, or a user's MODULE:CLASS; `arguments`: a JSON object of keyword arguments. A
    user's class is called with `in_chans` and these arguments; its module maps images (b, c, h, w) to features (b, d),
    or to a map of features (b, d, rows, columns), whose mean is then the feature of the image."""

    name: str
    in_chans: int = 3
    arguments: str = "{}"

    obeys = frozenset({"arguments", "in_chans", "drop_path", "sync_batch_norm", "channels_last"})
    side_multiple = 1
    width, patch_width, stride = _fact("width"), _fact("patch_width"), _fact("stride")
    has_batch_norm, timm_layers = _fact("has_batch_norm"), _fact("timm_layers")

    @property
    def title(self) -> str:
        return self.name

    @property
    def depth(self) -> int:
        return len(facts_of(self).segments)

    @property
    def is_timm(self) -> bool:
        return ":" not in self.name

    def timm_model(self, name: str, image_size: int | None = None) -> tuple[str, dict[str, Any]] | None:
        return (self.name, _timm_arguments(self, image_size)) if self.is_timm else None


@dataclass(frozen=True)
class NetworkFacts:
    """Facts about a foreign network, which are known once it is built. `width`, `patch_width`, `stride`, `timm_layers`:
    as the spec's; `segments`: the modules that are compiled and recomputed one by one, in order;
    `accepts`: the arguments by which timm's models take an image size, any size and stochastic depth; `untrainable`:
    why it can't be trained, or ""."""

    width: int
    patch_width: int
    stride: int
    segments: tuple[str, ...]
    accepts: set[str]
    has_batch_norm: bool
    timm_layers: dict[str, Any]
    untrainable: str


@functools.cache
def facts_of(spec: ForeignSpec) -> NetworkFacts:
    """Build the network on the meta device and return its facts. Raises ConfigError if it gives no features."""
    import torch
    from torch import nn

    with torch.device("meta"), torch.no_grad():
        network = create(spec).eval()
        known = {*SIZE_ARGUMENTS, "drop_path_rate"} if spec.is_timm else {"drop_path_rate"}
        problems, stated = [], getattr(network, "pretrained_cfg", {})
        native = stated.get("input_size", (0, 0, 0))[1]
        for side in [*_PROBES, *([native] if native not in (0, *_PROBES) else [])]:
            images = torch.zeros(2, spec.in_chans, side, side)
            try:
                image, patches = features_of(network, images)
                break
            except Exception as error:  # whatever a foreign network raises
                problems.append(one_line(error))
        else:
            raise ConfigError(f"model.backbone {spec.name} gives no features of images: {problems[0]}")
        return NetworkFacts(
            width=image.shape[1],
            patch_width=0 if patches is None else patches.shape[-1],
            stride=1 if patches is None else -(-side // patches.shape[1]),
            segments=_segments(network),
            accepts=known & inspect.signature(type(network).__init__).parameters.keys(),
            has_batch_norm=any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules()),
            timm_layers={key: stated.get(key) for key in ("first_conv", "classifier")},
            untrainable=why_untrainable(network, lambda: features_of(network, images)[0]),
        )


def create(spec: ForeignSpec, image_size: int | None = None, drop_path: float = 0.0) -> nn.Module:
    """Create a network, initialized by its class, on torch's current default device. image_size: native side in pixels,
    or None for the model's own. Raises ConfigError if it can't be built."""
    arguments = json.loads(spec.arguments)
    if drop_path:
        if "drop_path_rate" not in facts_of(spec).accepts:
            none = f"{spec.name} has no stochastic depth (no argument drop_path_rate)"
            raise ConfigError(f"model.drop_path {drop_path:g}: {none}; set model.drop_path 0")
        arguments["drop_path_rate"] = drop_path
    if not spec.is_timm:
        return _create_own(spec, arguments)
    import timm

    if refused := arguments.keys() & set(_NOT_ARGUMENTS):
        where = "channels are model.in_chans, weights model.init_from"
        raise ConfigError(f"model.arguments may not have {min(refused)}: {where}")
    arguments |= _timm_arguments(spec, image_size)
    try:
        network: nn.Module = timm.create_model(spec.name, pretrained=False, num_classes=0, **arguments)
    except Exception as error:  # whatever timm raises
        with_arguments = f" with model.arguments {spec.arguments}" if spec.arguments != "{}" else ""
        raise ConfigError(f"timm can't build model.backbone {spec.name}{with_arguments}: {one_line(error)}") from None
    return network


def _timm_arguments(spec: ForeignSpec, image_size: int | None) -> dict[str, Any]:
    """Arguments by which timm.create_model builds the model for images of `image_size` pixels, or its native size."""
    accepts = facts_of(spec).accepts if image_size is not None else set()
    sizes = {key: value for key, value in {"img_size": image_size, **_ANY_SIZE}.items() if key in accepts}
    return {**sizes, **json.loads(spec.arguments), "in_chans": spec.in_chans}


def _create_own(spec: ForeignSpec, arguments: dict[str, Any]) -> nn.Module:
    """Build the class MODULE:CLASS, found as `python -m` would, from the current folder too. Raises ConfigError, also
    if it is not a class of modules: nothing else is ever called."""
    from torch import nn
    from torch.nn.parameter import is_lazy

    def is_network(candidate: object) -> bool:
        return isinstance(candidate, type) and issubclass(candidate, nn.Module)

    backbone = f"model.backbone {spec.name}"
    network_class = find_own("model.backbone", spec.name, "torch.nn.Module", is_network)
    try:
        network: nn.Module = network_class(in_chans=spec.in_chans, **arguments)
    except Exception as error:  # whatever a user's class raises
        call = f"in_chans={spec.in_chans} and model.arguments {spec.arguments}"
        raise ConfigError(f"{backbone} can't be made with {call}: {type(error).__name__}: {one_line(error)}") from None
    if any(is_lazy(tensor) for tensor in (*network.parameters(), *network.buffers())):
        raise ConfigError(f"{backbone} has lazy layers (nn.LazyConv2d ...): give them their sizes")
    return network


def features_of(network: Any, images: Any) -> tuple[Any, Any]:
    """Images (b, c, h, w) -> features of the images (b, d); of patches (b, rows, columns, d') or None. timm's networks
    compute them by forward_features and forward_head. Raises ConfigError for outputs of other shapes."""
    if hasattr(network, "forward_features") and hasattr(network, "forward_head"):
        maps = network.forward_features(images)
        image = network.forward_head(maps, pre_logits=True)
        return _checked(network, image), _patches(network, maps, images)
    output = network(images)
    if getattr(output, "ndim", 0) == 4:
        return output.mean((2, 3)), output.permute(0, 2, 3, 1)
    return _checked(network, output), None


def _checked(network: Any, features: Any) -> Any:
    if getattr(features, "ndim", 0) == 2:
        return features
    shape = f"shape {list(features.shape)}" if hasattr(features, "shape") else f"a {type(features).__name__}"
    raise ConfigError(f"its features have {shape}, wanted is (b, d), or a map (b, d, rows, columns)")


def _patches(network: Any, maps: Any, images: Any) -> Any:
    """timm's features before pooling as (b, rows, columns, d); None if they are neither NHWC, NCHW nor tokens."""
    if getattr(maps, "ndim", 0) == 4:
        return maps if getattr(network, "output_fmt", "") == "NHWC" else maps.permute(0, 2, 3, 1)
    if getattr(maps, "ndim", 0) != 3:
        return None
    patches = maps[:, getattr(network, "num_prefix_tokens", 0) :]
    rows, columns = images.shape[-2:]
    # For images that are not square the number of tokens does not give the grid: use the ratio of the sides too.
    high = round((patches.shape[1] * rows / columns) ** 0.5)
    return patches.unflatten(1, (high, -1)) if high and patches.shape[1] % high == 0 else None


def _segments(network: Any) -> tuple[str, ...]:
    """The blocks that timm's `group_matcher` names; in a network without it, the children that have parameters."""
    children = [name for name, child in network.named_children() if any(True for _ in child.parameters())]
    if not hasattr(network, "group_matcher"):
        return tuple(children)
    matcher = network.group_matcher(coarse=False)
    blocks = (matcher.get("blocks") if isinstance(matcher, dict) else None) or []  # a few of timm's give a function
    # A pattern with a number next to it matches modules between the blocks.
    patterns = [blocks] if isinstance(blocks, str) else [pattern for pattern, beside in blocks if beside is None]
    segments: list[str] = []
    for name, module in network.named_modules():
        inside = any(name.startswith(f"{other}.") for other in segments)
        has_weights = any(True for _ in module.parameters())
        if has_weights and not inside and any(re.fullmatch(pattern.removeprefix("^"), name) for pattern in patterns):
            segments.append(name)
    return tuple(segments or children)


def foreign_spec(name: str) -> ForeignSpec:
    """The spec of timm's name or of MODULE:CLASS. Raises ValueError with the nearest names for anything else."""
    if answer := weights_elsewhere(name):
        why = f"{name!r} names weights: give them with --model.init_from, and --model.backbone from_source; {answer}"
        raise ValueError(why)
    if ":" in name:
        if not re.fullmatch(r"\w+(\.\w+)*:\w+", name):
            raise ValueError(f"{name!r} is not a class of yours as module:Class")
        return ForeignSpec(name)
    import timm

    if re.fullmatch(r"\w+", name) and timm.is_model(name):
        return ForeignSpec(name)
    base = name.partition(".")[0]
    if "." in name and re.fullmatch(r"\w+", base) and timm.is_model(base):
        raise ValueError(f"{name!r} names weights of timm's: give model.backbone {base} and model.init_from {name}")

    def rank(known: str) -> tuple[float, int, str]:
        """By the likeness of a name's beginning: vit_smal is vit_small_patch16_224, not davit_small; then by length."""
        starts = {known[: len(name) + more] for more in range(3)}
        return -round(max(difflib.SequenceMatcher(None, start, name).ratio() for start in starts), 2), len(known), known

    near = ", ".join(sorted(timm.list_models(), key=rank)[:3])
    raise ValueError(f"{name!r} is neither timm's nor a class of yours as module:Class. The nearest are {near}")

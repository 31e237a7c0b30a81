"""Trains a part of a network: low-rank adapters, the last blocks, or norms and biases; all else keeps its values. peft
is not used: it renames the weights that it wraps, and its layers return one tensor and keep their weights in
submodules. Layers here own their weights, so that ZeRO 3 gathers these around the layer's forward, which can slice
them. They also save less for the backward pass. Source: LoRA (arXiv 2106.09685): y = W x + alpha / rank * B A x, B zero
at first."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_ds.basics.seeds import crop_seed
from dino_ds.errors import ConfigError
from dino_ds.models.attention import QueryKeyValue
from dino_ds.models.base import Backbone, Placer
from dino_ds.models.blocks import ActivatedLinear
from dino_ds.models.foreign import ForeignBackbone
from dino_ds.models.specs.backbones import ALL, LORA, NORMS, TrainedPart

_T = TypeVar("_T")
A, B = "lora_a", "lora_b"
"""Names of an adapter's two matrices, (rank, inputs) and (outputs, rank), next to the `weight` of their layer."""


class _Adapted:
    """A linear layer with an adapter, whose output is multiplied by `scale`."""

    in_features: int
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float

    def added(self, y: Tensor, change: Tensor) -> Tensor:
        return torch.add(y, change, alpha=self.scale)


class _AdaptedLinear(_Adapted, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.added(super().forward(x), F.linear(F.linear(x, self.lora_a), self.lora_b))


class _AdaptedQueryKeyValue(_Adapted, QueryKeyValue):
    def forward(  # type: ignore[override]
        self, x: Tensor, query_rows: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        projected = super().forward(x, query_rows, bias)
        low = F.linear(x, self.lora_a)
        if query_rows is None:
            return (self.added(projected[0], F.linear(low, self.lora_b)),)
        d = self.in_features
        queries = F.linear(low.index_select(0, query_rows), self.lora_b[:d])
        return self.added(projected[0], queries), self.added(projected[1], F.linear(low, self.lora_b[d:]))


class _AdaptedActivatedLinear(_Adapted, ActivatedLinear):
    def forward(self, x: Tensor, value: Tensor | None = None) -> Tensor:
        low = self.activated_linear(x, value, self.lora_a, None)
        return self.added(super().forward(x, value), F.linear(low, self.lora_b))


_ADAPTED: dict[type, type] = {
    nn.Linear: _AdaptedLinear,
    QueryKeyValue: _AdaptedQueryKeyValue,
    ActivatedLinear: _AdaptedActivatedLinear,
}


def keep_trained(backbone: Backbone, part: TrainedPart) -> None:
    """Give `backbone` the adapters of `part`, if any, and freeze weights outside `part`. Raises ConfigError if the
    backbone can't train `part`."""
    if part.kind == ALL:
        return
    name = backbone.spec.title
    if backbone.spec.has_batch_norm:
        why = f"model.train {part.kind}"
        more = f"{name} has BatchNorm, whose statistics would go on moving in layers that are frozen"
        raise ConfigError(f"{why}: {more}: set model.train all, or take a ViT or ConvNeXt")
    depth, layers = len(backbone.segments()), backbone.layers()
    if part.blocks > depth:
        raise ConfigError(f"model.train {part.kind}: {name} has {depth} blocks: give 1 to {depth}, or model.train all")
    if part.kind == LORA:
        _add_adapters(backbone, part)
    for key, parameter in backbone.named_parameters():
        leaf = key.rpartition(".")[2]
        if part.blocks:
            trained = layers[key] > depth - part.blocks
        else:  # no released network has training_only weights: train them too
            trained = leaf in (A, B) if part.kind == LORA else parameter.ndim == 1
            trained = trained or key in backbone.training_only
        parameter.requires_grad_(trained)


def linear_layers(backbone: Backbone) -> dict[str, nn.Linear]:
    """The linear layers inside the segments, by name, that are called as modules: adapters may change their outputs. In
    a foreign network these are the layers that run on trial images: some networks read a layer's weight directly."""
    inside = {module for segment in backbone.segments() for module in segment.modules()}
    layers = {n: module for n, module in backbone.named_modules() if module in inside and isinstance(module, nn.Linear)}
    if not isinstance(backbone, ForeignBackbone):
        return layers
    called = set[nn.Module]()
    hooks = [layer.register_forward_pre_hook(lambda module, _: called.add(module)) for layer in layers.values()]
    side, weight = backbone.image_size, next(backbone.parameters())
    with torch.no_grad():
        backbone.features(torch.zeros(2, backbone.spec.in_chans, side, side, device=weight.device))
    for hook in hooks:
        hook.remove()
    return {name: layer for name, layer in layers.items() if layer in called}


def _add_adapters(backbone: Backbone, part: TrainedPart) -> None:
    known = {name: layer for name, layer in linear_layers(backbone).items() if type(layer) in _ADAPTED}
    title, there = backbone.spec.title, sorted({name.rpartition(".")[2] for name in known})
    if not known:
        why = f"model.train {LORA}: {title} has no linear layers in its blocks that adapters could be added to"
        raise ConfigError(f"{why}: set model.train 'last N blocks', {NORMS} or {ALL}")
    if unknown := [name for name in part.layers if name not in there]:
        why = f"model.lora_layers {unknown[0]}: the linear layers in the blocks of {title} are {', '.join(there)}"
        raise ConfigError(f"{why}: give some of these, or all")
    chosen = {name: layer for name, layer in known.items() if not part.layers or name.rpartition(".")[2] in part.layers}
    for name, layer in chosen.items():
        width = min(layer.in_features, layer.out_features)
        if part.rank > width:
            why = f"model.lora_rank {part.rank} is above {width}, the width of {name} of {title}"
            raise ConfigError(f"{why}: give at most {width}, better 4 to 64")
        adapted: Any = layer
        adapted.__class__ = _ADAPTED[type(layer)]
        adapted.lora_a = nn.Parameter(layer.weight.new_empty(part.rank, layer.in_features))
        adapted.lora_b = nn.Parameter(layer.weight.new_empty(layer.out_features, part.rank))
        adapted.scale = part.alpha / part.rank


class TrainedPlacer:
    """A `Placer` that gives a module of `network` its adapters' initial values, freezes those of its parameters that
    were frozen when this was built, then calls `placer` with the module. A is drawn as nn.Linear draws a weight, by a
    generator seeded with `seed` and the layer's name; B is zero."""

    def __init__(self, network: nn.Module, seed: int, placer: Placer) -> None:
        self._prefix = {module: f"{name}." if name else "" for name, module in network.named_modules()}
        self._frozen = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
        self._seed, self._place = seed, placer

    def __call__(self, module: nn.Module) -> None:
        prefix = self._prefix[module]
        if isinstance(module, _Adapted):
            generator = torch.Generator().manual_seed(crop_seed(self._seed, 0, zlib.crc32(prefix.encode())))
            bound, a = 1 / math.sqrt(module.in_features), torch.empty(module.lora_a.shape)
            module.lora_a = nn.Parameter(a.uniform_(-bound, bound, generator=generator))
            module.lora_b = nn.Parameter(torch.zeros(module.lora_b.shape))
        for name, parameter in module.named_parameters(recurse=False):
            parameter.requires_grad_(f"{prefix}{name}" not in self._frozen)
        keep_values(module)
        self._place(module)
        for parameter in _frozen_in(module):
            parameter.fp32_value = parameter.fp32_value.to(parameter.device)


def keep_values(module: nn.Module) -> None:
    """Store the frozen weights that `module` itself owns as their `fp32_value`, which stays FP32 if these are cast."""
    for parameter in _frozen_in(module):
        parameter.fp32_value = parameter.data


def _frozen_in(module: nn.Module) -> list[Any]:
    return [parameter for parameter in module.parameters(recurse=False) if not parameter.requires_grad]


def adapters_in(tensors: Mapping[str, _T]) -> dict[str, _T]:
    """The adapters' matrices among the tensors of a network, or among other values by the tensors' names."""
    return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] in (A, B)}


def merged(tensors: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """The tensors of a network with its adapters, if any, added to its weights, named as in a network without adapters.
    The product is computed in FP64, so that a weight is rounded once."""
    adapters = adapters_in(tensors)
    weights = {name: tensor for name, tensor in tensors.items() if name not in adapters}
    for name, a in adapters.items():
        layer, _, leaf = name.rpartition(".")
        if leaf == A:
            b, weight = adapters[f"{layer}.{B}"], weights[f"{layer}.weight"]
            change = b.double() @ a.double() * (alpha / a.shape[0])
            weights[f"{layer}.weight"] = (weight.double() + change).to(weight.dtype)
    return weights

"""Builds a backbone's module from its spec, and the form of it that exporters take."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from dino_ds.models.base import Backbone
from dino_ds.models.specs.base import BackboneOptions, BackboneSpec


def build_backbone(spec: BackboneSpec, image_size: int, options: BackboneOptions | None = None) -> Backbone:
    """A backbone with weights as its class draws them; `image_size`: side of its native crop in pixels."""
    backbone: Backbone = _class(spec.builder)(spec, image_size, options or BackboneOptions())
    return backbone


def tensor_shapes(
    spec: BackboneSpec, image_size: int, options: BackboneOptions | None = None
) -> dict[str, tuple[int, ...]]:
    """Shapes of a backbone's tensors by name, without memory for them. Raises ConfigError."""
    with torch.device("meta"):
        state = build_backbone(spec, image_size, options).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


class PlainBackbone(nn.Module):
    """Images (b, c, h, w) -> features (b, d), by the backbone itself."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone.features(images)


def plain_form(backbone: Backbone) -> nn.Module:
    """The same network, images (b, c, h, w) -> features (b, d), as exporters can trace it. Raises ConfigError."""
    found: nn.Module = _class(backbone.spec.plain_form)(backbone)
    return found


def _class(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)

"""Builds a backbone from its spec."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dino_ds.models.base import Backbone
from dino_ds.models.foreign import ForeignBackbone
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.models.specs.base import BackboneOptions, BackboneSpec
from dino_ds.models.specs.foreign_backbones import ForeignSpec
from dino_ds.models.vit import VisionTransformer

BACKBONE_CLASSES: dict[type[BackboneSpec], Callable[..., Backbone]] = {
    ViTSpec: VisionTransformer,
    ForeignSpec: ForeignBackbone,
}
"""The class of the backbones that each kind of spec describes: it takes spec, side of the native crop and options."""


def build_backbone(spec: BackboneSpec, image_size: int, options: BackboneOptions | None = None) -> Backbone:
    """Build a backbone, initialized by its class; `image_size`: side of its native crop in pixels."""
    return BACKBONE_CLASSES[type(spec)](spec, image_size, options or BackboneOptions())


def tensor_shapes(
    spec: BackboneSpec, image_size: int, options: BackboneOptions | None = None
) -> dict[str, tuple[int, ...]]:
    """Shapes of a backbone's tensors by name, without memory for them. Raises ConfigError."""
    with torch.device("meta"):
        state = build_backbone(spec, image_size, options).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}

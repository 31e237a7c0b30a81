"""From a backbone's spec to its module, and from the module to the form that exporters take."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

from dino_ds.models.base import Backbone
from dino_ds.models.specs.backbones import BackboneOptions, BackboneSpec


def build_backbone(spec: BackboneSpec, image_size: int, options: BackboneOptions | None = None) -> Backbone:
    """A backbone with weights as its class draws them; `image_size`: side of its native crop in pixels."""
    backbone: Backbone = _class(spec.builder)(spec, image_size, options or BackboneOptions())
    return backbone


def plain_form(backbone: Backbone) -> nn.Module:
    """The same network, images (b, c, h, w) -> features (b, d), as exporters can trace it. Raises ConfigError."""
    found: nn.Module = _class(backbone.spec.plain_form)(backbone)
    return found


def _class(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)

"""From a backbone's spec to the module."""

from __future__ import annotations

from importlib import import_module

from dino_ds.models.base import Backbone
from dino_ds.models.specs.backbones import BackboneOptions, BackboneSpec


def build_backbone(spec: BackboneSpec, image_size: int, options: BackboneOptions | None = None) -> Backbone:
    """A backbone with weights as its class draws them; `image_size`: side of its native crop in pixels."""
    module, _, name = spec.builder.partition(":")
    backbone: Backbone = getattr(import_module(module), name)(spec, image_size, options or BackboneOptions())
    return backbone

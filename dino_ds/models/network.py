"""Backbone and head as one module: what the DeepSpeed engine trains and what the teacher is a copy of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dino_ds.models.head import DinoHead
from dino_ds.models.vit import VisionTransformer


class DinoNetwork(nn.Module):
    """One forward for all crops of a micro-batch: DeepSpeed wants one engine call per backward.

    `freezes_backbone`: that it will be frozen for a while, and wants parameter groups of its own; `started_from` says
    which weights it was given, for people.
    """

    def __init__(self, backbone: VisionTransformer, head: DinoHead, freezes_backbone: bool = False) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.freezes_backbone, self.started_from = freezes_backbone, ""
        self._backbone_frozen = False

    def forward(self, views: list[Tensor], drop_keys: Tensor | None = None) -> Tensor:
        """Views (b, 3, h, w), equal sizes adjacent; drop_keys (b,) int64 or None -> logits (v * b, k), view-major."""
        features = self.backbone(views, drop_keys)
        if self._backbone_frozen and torch.is_grad_enabled():
            features = _ZeroGrad.apply(features)
        return self.head(features)

    def checkpoint_activations(self, blocks: int, on_cpu: bool) -> None:
        """Recompute the first `blocks` blocks in the backward pass; `on_cpu` keeps their inputs in host memory."""
        self.backbone.checkpoint_blocks = blocks
        self.backbone.checkpoint_on_cpu = on_cpu

    def freeze_prototypes(self, frozen: bool) -> None:
        self.head.prototypes.frozen = frozen

    def freeze_backbone(self, frozen: bool) -> None:
        """While frozen its gradients are exactly zero: as of the prototypes, every ZeRO stage gets one for each."""
        self._backbone_frozen = frozen


class _ZeroGrad(torch.autograd.Function):
    """The identity, whose gradient is zero."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        return features.view_as(features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return torch.zeros_like(grad_outputs[0])

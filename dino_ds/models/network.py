"""Backbone and head as one module: what the DeepSpeed engine trains and what the teacher is a copy of."""

from __future__ import annotations

from torch import Tensor, nn

from dino_ds.models.head import DinoHead
from dino_ds.models.vit import VisionTransformer


class DinoNetwork(nn.Module):
    """One forward for all crops of a micro-batch: DeepSpeed wants one engine call per backward."""

    def __init__(self, backbone: VisionTransformer, head: DinoHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, views: list[Tensor], drop_keys: Tensor | None = None) -> Tensor:
        """Views (b, 3, h, w), equal sizes adjacent; drop_keys (b,) int64 or None -> logits (v * b, k), view-major."""
        return self.head(self.backbone(views, drop_keys))

    def checkpoint_activations(self, blocks: int, on_cpu: bool) -> None:
        """Recompute the first `blocks` blocks in the backward pass; `on_cpu` keeps their inputs in host memory."""
        self.backbone.checkpoint_blocks = blocks
        self.backbone.checkpoint_on_cpu = on_cpu

    def freeze_prototypes(self, frozen: bool) -> None:
        self.head.prototypes.frozen = frozen

"""Backbone and heads as one module: what the DeepSpeed engine trains and what a teacher is a copy of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dino_ds.models.base import CLS, Backbone, Crops, cls_of


class Network(nn.Module):
    """One forward for all crops of a micro-batch: DeepSpeed wants one engine call per backward pass.

    heads: by the name that their parameters and their output have; each says by `reads` which feature it takes.
    features: the backbone's features that are given as they are, such as "cls", "patches/global", or of "cls" the rows
    of one group, "cls/global".
    `freezes_backbone`: it will be frozen for a while, and needs parameter groups of its own; `started_from` describes
    the weights that it was given.
    """

    def __init__(
        self,
        backbone: Backbone,
        heads: Mapping[str, nn.Module],
        features: Sequence[str] = (),
        freezes_backbone: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        for name, head in heads.items():
            self.add_module(name, head)
        self.head_names, self.features = tuple(heads), tuple(features)
        read = {str(head.reads) for head in heads.values()} | set(features)
        unknown = [name for name in read if name != CLS and name.partition("/")[0] not in ("cls", "patches")]
        assert not unknown, f"{unknown[0]} is neither a head nor a feature"
        self._patches = [name.removeprefix("patches/") for name in sorted(read) if name.startswith("patches/")]
        self._reads_cls_by_group = any(name.startswith("cls/") for name in read)
        self.freezes_backbone, self.started_from = freezes_backbone, ""
        self._backbone_frozen = False

    def heads(self) -> dict[str, nn.Module]:
        """The heads by name."""
        return {name: getattr(self, name) for name in self.head_names}

    def forward(self, crops: Crops, drop_keys: Tensor | None = None) -> dict[str, Tensor]:
        """Crops by group; drop_keys (b,) int64 or None -> outputs by name: each head's, and `features`.

        Outputs of whole crops are (v * b, ...), crop-major, groups in order.
        """
        found = self.backbone(crops, drop_keys, [group for group in self._patches if group in crops])
        if self._reads_cls_by_group:
            rows = [sum(len(crop) for crop in group) for group in crops.values()]
            found |= {cls_of(name): part for name, part in zip(crops, found[CLS].split(rows), strict=True)}
        if self._backbone_frozen and torch.is_grad_enabled():
            found = {name: _ZeroGrad.apply(feature) for name, feature in found.items()}
        outputs = {name: head(found[head.reads]) for name, head in self.heads().items() if head.reads in found}
        return outputs | {name: found[name] for name in self.features if name in found}

    def freeze_prototypes(self, frozen: bool) -> None:
        for head in self.heads().values():
            prototypes = getattr(head, "prototypes", None)
            if prototypes is not None:
                prototypes.frozen = frozen

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

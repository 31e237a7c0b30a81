"""Backbone and heads as one module, which the DeepSpeed engine trains and teachers copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dino_ds.config.crops import Masks
from dino_ds.models.base import CLS, NOTHING, Backbone, Crops, cls_of, masked_of, patches_of
from dino_ds.models.prototypes import Compared, Comparison, Logits

Output = Tensor | Logits | Compared


class Query(NamedTuple):
    """An output of a network: that of `head` for `feature`. width: number of outputs of a head that is one linear
    layer, or 0 for a projection head."""

    head: str
    feature: str
    width: int = 0


class Network(nn.Module):
    """One forward pass for all crops of a micro-batch: DeepSpeed needs one engine call per backward pass.

    A feature is an output of the backbone, such as "cls" or "patches/global"; the rows of "cls" of one group, such as
    "cls/global"; or the features of a group's hidden patches, such as "masked/global".

    Args:
        heads: modules by name; the names of a head's parameters begin with the head's.
        queries: head and input of each output, by the output's name.
        features: names of the features that are outputs themselves.
        freezes_backbone: the backbone is frozen for a while, and needs separate parameter groups.

    Attributes:
        started_from: description of the weights that the network starts from.
        began_with: those weights, FP32, until an engine has taken them.
    """

    def __init__(
        self,
        backbone: Backbone,
        heads: Mapping[str, nn.Module],
        queries: Mapping[str, Query],
        features: Sequence[str] = (),
        freezes_backbone: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        for name, head in heads.items():
            self.add_module(name, head)
        self.head_names, self.queries, self.features = tuple(heads), dict(queries), tuple(features)
        read = {query.feature for query in queries.values()} | set(features)
        kinds = {name: name.partition("/") for name in read}
        unknown = [name for name, (kind, _, _) in kinds.items() if kind not in ("cls", "patches", "masked")]
        assert not unknown, f"{unknown[0]} is not a feature"
        self._masked = sorted(group for kind, _, group in kinds.values() if kind == "masked")
        shown_patches = {group for kind, _, group in kinds.values() if kind == "patches"}
        self._patches = sorted(shown_patches | set(self._masked))
        self._reads_cls_by_group = any(kind == "cls" and group for kind, _, group in kinds.values())
        self.freezes_backbone, self.started_from = freezes_backbone, ""
        self.began_with: Mapping[str, Tensor] = {}
        self._backbone_frozen = False

    def heads(self) -> dict[str, nn.Module]:
        return {name: getattr(self, name) for name in self.head_names}

    def forward(
        self,
        crops: Crops,
        drop_keys: Tensor | None = None,
        masks: Masks = NOTHING,
        comparisons: Mapping[str, Comparison] = NOTHING,
        step_key: int | None = None,
    ) -> dict[str, Output]:
        """Crops by group; drop_keys (b,) int64, step_key or None -> outputs by name: queries, and `features`. Outputs
        of whole crops are (v * b, ...), crop-major, groups in order. In a group without "mask" nothing is hidden.
        comparisons: by query, the targets of its logits; a query without targets gives the logits."""
        hidden = {name: mask["mask"] for name, mask in masks.items() if "mask" in mask}
        patches = [group for group in self._patches if group in crops]
        features = self.backbone(crops, drop_keys, patches, hidden, step_key)
        if self._reads_cls_by_group:
            rows = [sum(len(crop) for crop in group) for group in crops.values()]
            features |= {cls_of(name): part for name, part in zip(crops, features[CLS].split(rows), strict=True)}
        for name in self._masked:
            if name in crops:
                rows_of_patches = features[patches_of(name)].flatten(0, 1)
                features[masked_of(name)] = rows_of_patches.index_select(0, masks[name]["rows"])
        if self._backbone_frozen and torch.is_grad_enabled():
            features = {name: _ZeroGrad.apply(feature) for name, feature in features.items()}
        outputs: dict[str, Output] = {name: features[name] for name in self.features if name in features}
        for name, query in self.queries.items():
            if query.feature in features:
                outputs[name] = getattr(self, query.head)(features[query.feature], comparisons.get(name))
        return outputs

    def freeze_prototypes(self, frozen: bool) -> None:
        for head in self.heads().values():
            prototypes: Any = getattr(head, "prototypes", None)
            if prototypes is not None:
                prototypes.frozen = frozen

    def freeze_backbone(self, frozen: bool) -> None:
        """Make the backbone's gradients exactly zero if frozen, not None: every ZeRO stage still gets them."""
        self._backbone_frozen = frozen


class _ZeroGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        return features.view_as(features)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return torch.zeros_like(grad_outputs[0])

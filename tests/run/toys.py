"""A second backbone, as small as its contract allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from dino_ds.engine import distributed
from dino_ds.models.base import CLS, Backbone, Crops, patches_of
from dino_ds.models.foreign import BACKBONE_CLASSES
from dino_ds.models.specs.base import BackboneOptions, BackboneSpec


@dataclass(frozen=True)
class ToySpec(BackboneSpec):
    """A linear layer on the means of patches."""

    width: int = 24
    depth: int = 1
    stride: int = 8
    in_chans: int = 3


class RunningScale(nn.Module):
    """Divides by a running mean of the features' size, a buffer that is equal on all ranks; counts its calls."""

    scale: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.empty(()))
        self.register_buffer("calls", torch.empty((), dtype=torch.long))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.calls.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            size = distributed.sum_across_ranks(x.detach().float().abs().mean()) / distributed.world_size()
            self.scale.lerp_(size, 0.1)
            self.calls += 1
        return x / self.scale.to(x.dtype)


class ToyBackbone(Backbone):
    def __init__(self, spec: ToySpec, image_size: int, options: BackboneOptions) -> None:
        super().__init__(spec)
        self.embed = nn.Linear(spec.in_chans, spec.width)
        self.mix = nn.Linear(spec.width, spec.width)
        self.scale = RunningScale()

    def segments(self) -> Sequence[nn.Module]:
        return [self.mix]

    def forward(
        self,
        crops: Crops,
        drop_keys: Tensor | None = None,
        patches: Sequence[str] = (),
        masks: Mapping[str, Tensor] = MappingProxyType({}),
        step_key: int | None = None,
    ) -> dict[str, Tensor]:
        cls, found = [], {}
        for name, group in crops.items():
            means = nn.functional.avg_pool2d(torch.cat(list(group)), self.spec.stride)
            tokens = self.embed(means.flatten(2).transpose(1, 2).to(self.embed.weight.dtype))
            tokens = tokens + self.run_segment(0, self.mix, nn.functional.gelu(tokens))
            cls.append(tokens.mean(dim=1))
            if name in patches:
                found[patches_of(name)] = tokens
        return {CLS: self.scale(torch.cat(cls)), **found}


BACKBONE_CLASSES[ToySpec] = ToyBackbone

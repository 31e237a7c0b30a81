"""A user's own backbone, as small as one can be; its names are those that are likely to be mistaken for others."""

from __future__ import annotations

from torch import Tensor, nn


class Own(nn.Module):
    def __init__(self, in_chans: int, width: int = 8) -> None:
        super().__init__()
        self.module = nn.Conv2d(in_chans, width, 3, 4, 1)
        self.bn = nn.BatchNorm2d(width)
        self.layers = nn.Conv2d(width, 2 * width, 3, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.layers(self.bn(self.module(images)).relu())
        return out

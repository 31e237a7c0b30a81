"""The narrow ResNet of the recorded runs, as a user's own class: torchvision's, with 6, 12, 24 and 48 channels."""

from __future__ import annotations

from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet


class NarrowResNet(ResNet):
    def __init__(self, in_chans: int = 3) -> None:
        super().__init__(BasicBlock, [1, 1, 1, 1])
        self.inplanes = 6
        self.conv1 = nn.Conv2d(in_chans, 6, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        for i in range(4):
            setattr(self, f"layer{i + 1}", self._make_layer(BasicBlock, 6 * 2**i, 1, stride=1 if i == 0 else 2))
        self.fc = nn.Identity()

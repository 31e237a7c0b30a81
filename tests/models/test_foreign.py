"""The adapter of foreign networks: what a teacher gives is what their own code gives with the weights it has now."""

from __future__ import annotations

import pytest
import torch
from timm.layers import StdConv2d
from torch import Tensor, nn

from dino_ds.basics.own_code import allow_code
from dino_ds.method.ema import _low_precision_copy
from dino_ds.models.foreign import ForeignBackbone
from dino_ds.models.network import Network
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.specs.foreign import ForeignSpec

TINY_VIT = (
    '{"embed_dims": [8, 8, 8, 16], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "window_sizes": [2, 2, 2, 2]}'
)


class Standardised(nn.Module):
    """Each of its children is a segment."""

    def __init__(self, in_chans: int) -> None:
        super().__init__()
        self.stem, self.last = StdConv2d(in_chans, 16, 3), nn.Linear(16, 8)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.stem(images).mean((2, 3)))


def _built(name, arguments="{}"):
    torch.manual_seed(0)
    return ForeignBackbone(ForeignSpec(name, arguments=arguments), 64, BackboneOptions())


@pytest.mark.slow
@torch.no_grad()
def test_attention_biases_of_a_teacher_are_those_of_its_weights():
    """timm's TinyViT, LeViT, EfficientFormer and EfficientViT keep them from pass to pass in evaluation."""
    backbone, images = _built("tiny_vit_5m_224", TINY_VIT).eval(), torch.randn(2, 3, 64, 64)
    before = backbone.features(images)
    state = {name: tensor + ("attention_biases" in name) * torch.rand_like(tensor.float()) for name, tensor in
             backbone.state_dict().items()}  # fmt: skip
    backbone.load_state_dict(state)
    fresh = _built("tiny_vit_5m_224", TINY_VIT).eval()
    fresh.load_state_dict(state)
    assert torch.equal(backbone.features(images), fresh.features(images))
    assert not torch.equal(backbone.features(images), before)


@torch.no_grad()
def test_a_low_precision_copy_has_what_autocast_casts():
    """Equal to the bit; weights of a convolution that standardises them stay FP32, where it is a segment too."""
    allow_code([own := f"{__name__}:Standardised"])
    network = Network(_built(own), {}, {}, ["cls"]).eval()
    running, (copies, _) = _low_precision_copy(network, torch.bfloat16)
    assert [tuple(tensor.shape) for tensor in copies] == [(8, 16), (8,)]
    images = {"global": [torch.randn(4, 3, 32, 32)]}
    torch._foreach_copy_(copies, [network.backbone.get_parameter(f"last.{name}") for name in ("weight", "bias")])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(running(images)["cls"], network(images)["cls"])


@pytest.mark.parametrize(("wanted", "found"), [(None, False), (False, False), (True, True)])
def test_images_are_channels_last_where_it_is_asked_for(wanted, found):
    """On a CPU not by default. The features are the same to 1e-5: sums in another order."""
    images, seen = torch.randn(2, 3, 64, 64), []
    spec = ForeignSpec("resnet18", arguments='{"channels": [8, 8, 8, 8], "layers": [1, 1, 1, 1]}')
    backbone = ForeignBackbone(spec, 64, BackboneOptions(channels_last=wanted)).eval()
    backbone.conv1.register_forward_pre_hook(
        lambda module, given: seen.append(given[0].is_contiguous(memory_format=torch.channels_last))
    )
    other = ForeignBackbone(spec, 64, BackboneOptions(channels_last=not found)).eval()
    other.load_state_dict(backbone.state_dict())
    torch.testing.assert_close(backbone.features(images), other.features(images), rtol=1e-5, atol=1e-5)
    assert seen == [found]

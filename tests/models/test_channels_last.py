"""Memory format of the images that a foreign backbone gets."""

from __future__ import annotations

import pytest
import torch

from dino_ds.backbones import BackboneOptions, backbone_spec
from dino_ds.models.build import build_backbone


@pytest.mark.parametrize(("wanted", "found"), [(None, False), (False, False), (True, True)])
def test_images_are_channels_last_where_it_is_asked_for(wanted, found):
    """On a CPU not by default. The features are the same to 1e-5: sums in another order."""
    images, seen = torch.randn(2, 3, 64, 64), []
    backbone = build_backbone(backbone_spec("resnet18"), 64, BackboneOptions(channels_last=wanted)).eval()
    backbone.conv1.register_forward_pre_hook(
        lambda module, given: seen.append(given[0].is_contiguous(memory_format=torch.channels_last))
    )
    other = build_backbone(backbone_spec("resnet18"), 64, BackboneOptions(channels_last=not found)).eval()
    other.load_state_dict(backbone.state_dict())
    torch.testing.assert_close(backbone.features(images), other.features(images), rtol=1e-5, atol=1e-5)
    assert seen == [found]

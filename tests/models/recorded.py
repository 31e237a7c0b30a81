"""What the recorded ViTs of dinov2 and dinov3 are compared by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dino_ds.models.base import CLS, patches_of
from dino_ds.models.vit import VisionTransformer


def compare_features(
    numbers: Mapping[str, Tensor],
    sizes: Mapping[str, Any],
    vit: VisionTransformer,
    registers: str | None,
    **close: float,
) -> None:
    """CLS, patches and registers of each size, one by one and all sizes in one pass. registers: how these are called;
    None: of a masked pass, of which they are not recorded."""
    masked = registers is None
    crops = {size: [numbers[f"{size}.input"]] for size in sizes}
    masks = {size: numbers[f"{size}.masks"] for size in crops} if masked else {}
    together = vit(crops, patches=list(crops), masks=masks)
    for row, (size, (images,)) in enumerate(crops.items()):
        prefix = f"{size}.masked" if masked else size
        own = {name: mask for name, mask in masks.items() if name == size}
        alone = vit({size: [images]}, patches=[size], masks=own)
        cls, patches = numbers[f"{prefix}.x_norm_clstoken"], numbers.get(f"{prefix}.x_norm_patchtokens")
        for found, rows in ((alone, slice(0, 2)), (together, slice(2 * row, 2 * row + 2))):
            torch.testing.assert_close(found[CLS][rows], cls, **close)
            if patches is not None:
                torch.testing.assert_close(found[patches_of(size)][:1], patches, **close)
        if registers is not None and vit.arch.registers:
            ours = vit.tokens(images)[:, 1 : 1 + vit.arch.registers]
            torch.testing.assert_close(ours, numbers[f"{size}.{registers}"], **close)


def run_probe(numbers: Mapping[str, Tensor], vit: VisionTransformer) -> dict[str, Tensor]:
    """The probe of a masked pass, whose value must be the recorded one to 1e-5, and its backward pass -> what was
    recorded of its gradients, by the reference's names."""
    features = vit({"global": [numbers["global.input"]]}, patches=["global"], masks={"global": numbers["global.masks"]})
    width = vit.arch.width
    probe = (features[CLS].square() * torch.linspace(0, 1, width)).sum()
    probe = probe + (features[patches_of("global")] * torch.linspace(-1, 1, width)).sin().mean()
    torch.testing.assert_close(probe, numbers["global.probe"].squeeze(), rtol=1e-5, atol=0)
    probe.backward()
    recorded = {name.removeprefix("global.grad."): t for name, t in numbers.items() if name.startswith("global.grad.")}
    assert len(recorded) == 2
    return recorded

"""How well masks of objects fit: by region (J) and by boundary (F), as DAVIS judges them.

Source: `metrics.py` and `evaluation.py` of davisvideochallenge/davis2017-evaluation (Perazzi et al. 2016, Pont-Tuset et
al. 2017). Masks are boolean (n, h, w); results one a mask, in [0, 1].
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_TOLERANCE = 0.008
"""Of the image's diagonal: how far a boundary may be off."""
_MASKS = 16
"""Dilated at once."""


def region_similarity(found: Tensor, wanted: Tensor) -> Tensor:
    """Intersection over union, FP64; 1 where both masks are empty."""
    inside = (found & wanted).sum(dim=(1, 2)).double()
    union = (found | wanted).sum(dim=(1, 2)).double()
    return torch.where(union > 0, inside / union.clamp_min(1), 1.0)


def boundary_similarity(found: Tensor, wanted: Tensor) -> Tensor:
    """F-measure of precision and recall of the boundaries' pixels, FP64; a pixel matches within the tolerance."""
    radius = math.ceil(_TOLERANCE * math.hypot(*found.shape[1:]))
    pairs = zip(found.split(_MASKS), wanted.split(_MASKS), strict=True)
    return torch.cat([_boundary_similarity(boundaries(a), boundaries(b), radius) for a, b in pairs])


def boundaries(masks: Tensor) -> Tensor:
    """Pixels that differ from one of those to the right, below, and right below: half a pixel off, 1 pixel wide."""
    padded = F.pad(masks.float(), (0, 1, 0, 1), mode="replicate") > 0
    right, below, both = padded[:, :-1, 1:], padded[:, 1:, :-1], padded[:, 1:, 1:]
    return (masks ^ right) | (masks ^ below) | (masks ^ both)


def dilate(masks: Tensor, radius: int) -> Tensor:
    """Every pixel within `radius` pixels of one of the mask, Euclidean."""
    offsets = torch.arange(-radius, radius + 1, device=masks.device)
    disk = (offsets[:, None] ** 2 + offsets[None] ** 2 <= radius**2).float()
    near = F.conv2d(masks[:, None].float(), disk[None, None], padding=radius)
    return near[:, 0] > 0.5


def _boundary_similarity(found: Tensor, wanted: Tensor, radius: int) -> Tensor:
    hits = (found & dilate(wanted, radius)).sum(dim=(1, 2)).double()
    recalled = (wanted & dilate(found, radius)).sum(dim=(1, 2)).double()
    of_found, of_wanted = (boundary.sum(dim=(1, 2)).double() for boundary in (found, wanted))
    # Nothing found is precise, nothing wanted is recalled.
    precision = torch.where(of_found > 0, hits / of_found.clamp_min(1), 1.0)
    recall = torch.where(of_wanted > 0, recalled / of_wanted.clamp_min(1), 1.0)
    both = precision + recall
    return torch.where(both > 0, 2 * precision * recall / both.clamp_min(1e-12), 0.0)

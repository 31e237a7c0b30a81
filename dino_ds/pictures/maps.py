"""From tokens and attention to maps over the patches: plain tensors, nothing drawn."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_EDGE = 0.01
"""Part of the values at each end that may be cut off when colours are stretched."""


def mass_mask(attention: Tensor, mass: float) -> Tensor:
    """The fewest patches of each map (..., h, w) that together hold `mass` of it: a mask of the same shape.

    Source: facebookresearch/dino `visualize_attention.py --threshold`, figure 1 of the paper (mass 0.6).
    """
    flat = attention.flatten(-2)
    values, order = flat.sort(dim=-1, descending=True)
    share = values.cumsum(dim=-1) / values.sum(dim=-1, keepdim=True)
    # The patch that crosses the line belongs to it.
    inside = torch.cat((torch.ones_like(share[..., :1], dtype=torch.bool), share[..., :-1] < mass), dim=-1)
    mask = torch.zeros_like(inside).scatter(-1, order, inside)
    return mask.unflatten(-1, attention.shape[-2:])


def pca_colours(tokens: Tensor) -> Tensor:
    """Patch tokens (b, h, w, d) of one set of images -> their first three principal components as RGB (b, h, w, 3).

    One PCA for all images, so that equal colours mean equal things; each colour is stretched to [0, 1] between the 1 %
    and 99 % points. The sign of a component is arbitrary: made such that its largest weight is positive.
    Source: DINOv2 (arXiv 2304.07193), figure 1, without its removal of the background.
    """
    flat = tokens.flatten(0, 2).float()
    centred = flat - flat.mean(dim=0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    axes = vectors.flip(dims=(1,))[:, :3]
    axes = axes * axes.gather(0, axes.abs().argmax(dim=0, keepdim=True)).sign()
    values = centred @ axes
    low, high = (values.quantile(q, dim=0) for q in (_EDGE, 1 - _EDGE))
    return ((values - low) / (high - low).clamp_min(1e-6)).clamp(0, 1).unflatten(0, tokens.shape[:3])


def patch_similarity(tokens: Tensor, image: int, row: int, column: int) -> Tensor:
    """Cosines of one patch with all patches of all images: tokens (b, h, w, d) -> (b, h, w)."""
    unit = F.normalize(tokens.float(), dim=-1)
    return unit @ unit[image, row, column]

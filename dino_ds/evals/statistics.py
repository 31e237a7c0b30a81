"""What features look like without any label: spread out or collapsed, along how many directions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_PAIRS = 4096


@torch.no_grad()
def feature_statistics(features: Tensor, seed: int = 0) -> dict[str, float]:
    """Features (n, d), of any length; n >= 2.

    feature_std: mean over dimensions of the standard deviation of unit-length features, times sqrt(d): 1 for features
    spread evenly over the sphere, 0 for a collapse to one point (SimSiam, arXiv 2011.10566, figure 2).
    rankme: exp of the entropy of the singular values (arXiv 2210.02885, equation 1): directions in use, 1 to d.
    uniformity: log of the mean of exp(-2 |x - y|^2) over pairs (arXiv 2005.10242): 0 for a point, less is more even;
    over all pairs up to 4096 features, else of as many drawn at random.
    """
    features = features.float()
    unit = F.normalize(features, dim=-1)
    std = unit.std(dim=0, unbiased=False).mean() * features.shape[1] ** 0.5
    singular = torch.linalg.svdvals(features)
    shares = singular / singular.sum() + 1e-7
    rankme = torch.exp(-(shares * shares.log()).sum())
    if len(unit) > _PAIRS:
        generator = torch.Generator().manual_seed(seed)
        unit = unit[torch.randperm(len(unit), generator=generator)[:_PAIRS].to(unit.device)]
    uniformity = torch.pdist(unit).square().mul(-2).exp().mean().log()
    return {"feature_std": float(std), "rankme": float(rankme), "uniformity": float(uniformity)}


@torch.no_grad()
def alignment(first: Tensor, second: Tensor) -> float:
    """Mean squared distance of the unit-length features of two views of each image, (n, d) each: 0 for equal."""
    return float((F.normalize(first.float(), dim=-1) - F.normalize(second.float(), dim=-1)).square().sum(dim=-1).mean())

"""Shape of features: spread out or collapsed, along how many directions, how near to what should be near."""

from __future__ import annotations

import zlib

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dino_ds.basics.hashing import crop_seed
from dino_ds.data.cutting import RandomCrop
from dino_ds.data.normalisation import Normalisation
from dino_ds.engine import distributed
from dino_ds.evals.knn import nearest

_PAIRS = 4096
_RANK_IMAGES = 25600
"""Number of images that RankMe's authors took."""


@torch.no_grad()
def feature_statistics(features: Tensor, seed: int = 0) -> dict[str, float]:
    """Features (n, d), of any length; n >= 2.

    feature_std: mean over dimensions of the standard deviation of unit-length features, times sqrt(d): 1 for features
    spread evenly over the sphere, 0 for a collapse to one point (SimSiam, arXiv 2011.10566, figure 2).
    rankme: exp of the entropy of the singular values (arXiv 2210.02885, equation 1): directions in use, 1 to d; of
    25600 features at most, drawn at random.
    uniformity: log of the mean of exp(-2 |x - y|^2) over pairs (arXiv 2005.10242): 0 for a point, less is more even;
    over all pairs of at most 4096 features, drawn at random.
    """
    features = features.float()
    unit = F.normalize(features, dim=-1)
    std = unit.std(dim=0, unbiased=False).mean() * features.shape[1] ** 0.5
    singular = torch.linalg.svdvals(_drawn(features, _RANK_IMAGES, seed))
    shares = singular / singular.sum() + 1e-7
    rankme = torch.exp(-(shares * shares.log()).sum())
    uniformity = torch.pdist(_drawn(unit, _PAIRS, seed)).square().mul(-2).exp().mean().log()
    return {"feature_std": float(std), "rankme": float(rankme), "uniformity": float(uniformity)}


def _drawn(rows: Tensor, most: int, seed: int) -> Tensor:
    if len(rows) <= most:
        return rows
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return rows[order[:most].to(rows.device)]


@torch.no_grad()
def alignment(first: Tensor, second: Tensor) -> float:
    """Mean squared distance of the unit-length features of two crops of each image, (n, d) each: 0 for equal.

    Source: arXiv 2005.10242.
    """
    return float((F.normalize(first.float(), dim=-1) - F.normalize(second.float(), dim=-1)).square().sum(dim=-1).mean())


@torch.no_grad()
def label_purity(features: Tensor, labels: Tensor, k: int) -> float:
    """Mean percentage of the k nearest others (n, d) of each image, by cosine, that have its label (n,); k < n.

    Every rank must call it with the same rows; each searches for its share.
    """
    mine = torch.arange(distributed.rank(), len(labels), distributed.world_size(), device=labels.device)
    same = torch.zeros((), dtype=torch.long, device=labels.device)
    for rows in mine.split(4096):
        _, index = nearest(features[rows], features, k + 1)
        others = index != rows[:, None]
        others[others.all(dim=1), -1] = False  # equal features may hide the image itself: then any k of them
        same += ((labels[index] == labels[rows, None]) & others).sum()
    return 100.0 * float(distributed.sum_across_ranks(same)) / (k * len(labels))


class TwoCrops:
    """Image -> two random crops of it, stacked (2, c, size, size); they follow from its pixels and the seed."""

    def __init__(self, size: int, normalisation: Normalisation, seed: int) -> None:
        self._crop, self._seed = RandomCrop(size, normalisation), seed

    def __call__(self, image: Image.Image | np.ndarray) -> Tensor:
        content = zlib.crc32(np.ascontiguousarray(image).tobytes())
        return torch.stack([self._crop(image, crop_seed(self._seed, i, content)) for i in range(2)])

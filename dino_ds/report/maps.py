"""Maps of patches from tokens and attention, and the map of an image collection; nothing is drawn here."""

from __future__ import annotations

import importlib.util

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.errors import ConfigError

TITLES = {"tsne": "t-SNE", "pca": "PCA"}
"""Names of the methods that place images on a map."""


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


class PatchColors:
    """The first three principal components of patch tokens as RGB.

    Fitted once, to the tokens (n, d) of all images or frames, so that equal colors mean equal things and nothing
    flickers or changes its sign from one to the next. A component's sign is arbitrary: its largest weight is positive.
    Source: DINOv3's `notebooks/pca.ipynb`: components of unit variance, doubled, through a sigmoid.
    """

    def __init__(self, tokens: Tensor) -> None:
        flat = tokens.double()
        self.mean = flat.mean(dim=0)
        variances, axes = _principal_axes(flat - self.mean, 3)
        # Where there is no variance at all every patch gets the middle gray.
        self.axes = axes / (variances.sqrt() + 1e-12)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Tokens (..., d) -> colors (..., 3) in [0, 1]."""
        return torch.sigmoid(2 * ((tokens.double() - self.mean) @ self.axes)).float()


def foreground(tokens: Tensor, attention: Tensor) -> Tensor:
    """Tokens (b, h, w, d) and attention (b, heads, h, w) -> a mask (b, h, w): one side of the first component.

    It is the side at which the CLS token looks more, on average over its patches.
    Source: DINOv2 (arXiv 2304.07193), figures 1 and 9, which leave out patches with a negative score; but which side is
    negative is a matter of chance (facebookresearch/dinov2 issue 292).
    """
    flat = tokens.flatten(0, 2).double()
    centered = flat - flat.mean(dim=0)
    _, axes = _principal_axes(centered, 1)
    above = (centered @ axes[:, 0] > 0).unflatten(0, tokens.shape[:3])
    looked_at = attention.mean(dim=1)
    if above.all() or not above.any():
        return torch.ones_like(above)
    return above if looked_at[above].mean() >= looked_at[~above].mean() else ~above


def find_method(name: str | None) -> str:
    """The named method of a map; without a name t-SNE if scikit-learn is installed, else PCA.

    Raises:
        ConfigError: t-SNE is asked for, and scikit-learn is not installed.
    """
    try:
        spec = importlib.util.find_spec("sklearn")
    except ValueError:  # a stand-in for a module may have no spec
        spec = None
    # A cache that outlives a module is a folder of its name, which has no file to import.
    has_tsne = spec is not None and spec.origin is not None
    if name == "tsne" and not has_tsne:
        raise ConfigError("--map tsne needs sklearn: pip install 'dino_ds[viz]', or --map pca")
    return name or ("tsne" if has_tsne else "pca")


def place(features: Tensor, method: str) -> np.ndarray:
    """Features (n, d), n > 1 -> points (n, 2), the same ones each time. Cosines decide, as in k-NN."""
    unit = F.normalize(features.float(), dim=-1)
    if method == "tsne" and len(unit) >= 5:  # fewer images have no neighborhoods to keep
        from sklearn.manifold import TSNE

        return TSNE(perplexity=min(30.0, (len(unit) - 1) / 3), init="pca", random_state=0).fit_transform(unit.numpy())
    centered = unit - unit.mean(dim=0)
    _, _, axes = torch.linalg.svd(centered, full_matrices=False)
    return (centered @ axes[:2].T).numpy()


def _principal_axes(centered: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(n, d) -> variances (count,) and unit axes (d, count), the largest first."""
    values, vectors = torch.linalg.eigh(centered.T @ centered / len(centered))
    axes = vectors.flip(dims=(1,))[:, :count]
    signs = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True)).sign()
    return values.flip(dims=(0,))[:count].clamp_min(0), axes * signs

"""Linear classification of frozen features: logistic regression to its optimum, or a closed form.

Deterministic and free of a learning rate: the regularisation is chosen on a part of the training images.
Source of the protocol: DINOv2 (arXiv 2304.07193) and CLIP (arXiv 2103.00020) fit L-BFGS logistic regression so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

REGULARISATIONS = tuple(10.0**exponent for exponent in range(-6, 3))
"""Weights of |W|^2 / 2 beside the mean cross-entropy that are tried."""
_HELD_OUT = 0.1


@dataclass(frozen=True)
class LinearProbe:
    """Features (n, d) -> logits (n, classes): features are standardised by the training set's mean and deviation."""

    mean: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor
    regularisation: float

    def __call__(self, features: Tensor) -> Tensor:
        return ((features.float() - self.mean) / self.scale) @ self.weight.T + self.bias

    def accuracy(self, features: Tensor, labels: Tensor) -> float:
        """Top-1 in percent."""
        return 100.0 * float((self(features).argmax(dim=1) == labels).float().mean())


def fit_linear(
    features: Tensor, labels: Tensor, classes: int, regularisations: Sequence[float] = REGULARISATIONS, seed: int = 0
) -> LinearProbe:
    """Logistic regression on features (n, d) and labels (n,) int64, in FP32 on their device.

    Of several regularisations the one that is best on a tenth of the images, held out, is fitted to all of them.
    """
    best = regularisations[0]
    if len(regularisations) > 1:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).to(labels.device)
        held = order[: max(1, int(_HELD_OUT * len(labels)))]
        rest = order[len(held) :]
        scores = []
        start: Tensor | None = None
        for strength in sorted(regularisations, reverse=True):  # each starts at the smoother one before it
            probe = _fit(features[rest], labels[rest], classes, strength, start)
            start = torch.cat((probe.weight, probe.bias[:, None]), dim=1)
            # The loss: less noisy than the accuracy on few images.
            scores.append((float(F.cross_entropy(probe(features[held]), labels[held])), strength))
        best = min(scores)[1]
    return _fit(features, labels, classes, best, None)


def fit_ridge(features: Tensor, labels: Tensor, classes: int, regularisation: float = 1e-3) -> LinearProbe:
    """The closed form: least squares to one-hot labels with |W|^2 * regularisation; one solve of a (d, d) system."""
    mean, scale = _moments(features)
    x = (features.float() - mean) / scale
    wanted = F.one_hot(labels, classes).float()
    average = wanted.mean(dim=0)
    gram = x.T @ x / len(x) + regularisation * torch.eye(x.shape[1], device=x.device)
    weight = torch.linalg.solve(gram, x.T @ (wanted - average) / len(x)).T
    return LinearProbe(mean, scale, weight.contiguous(), average, regularisation)


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    features = features.float()
    return features.mean(dim=0), features.std(dim=0, unbiased=False).clamp_min(1e-6)


def _fit(features: Tensor, labels: Tensor, classes: int, strength: float, start: Tensor | None) -> LinearProbe:
    """L-BFGS on the whole set; the last column of the parameters is the bias, which is not regularised."""
    mean, scale = _moments(features)
    x = (features.float() - mean) / scale
    parameters = torch.zeros(classes, x.shape[1] + 1, device=x.device) if start is None else start.clone()
    parameters.requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [parameters], max_iter=200, tolerance_grad=1e-6, tolerance_change=1e-9, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        weight, bias = parameters[:, :-1], parameters[:, -1]
        value = F.cross_entropy(x @ weight.T + bias, labels) + 0.5 * strength * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    found = parameters.detach()
    return LinearProbe(mean, scale, found[:, :-1].contiguous(), found[:, -1].contiguous(), strength)

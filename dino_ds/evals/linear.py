"""Linear classification of frozen features: logistic regression to its optimum, or a closed form.

Deterministic and without a learning rate: the regularization is chosen on a part of the training images. Every rank
must call a fit with the same rows; each computes its share of the sums over them, and all get the same probe.
Source of the protocol: L-BFGS logistic regression as in DINOv2 (arXiv 2304.07193) and CLIP (arXiv 2103.00020).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.engine import distributed
from dino_ds.evals.features import GaveUp

REGULARISATIONS = tuple(10.0**exponent for exponent in range(-6, 3))
"""Candidate weights of |W|^2 / 2 next to the mean cross-entropy."""
_HELD_OUT = 0.1
_ROWS = 65536
"""Images whose logits are in memory at once: a quarter of a GB for 1000 classes instead of three times 5 GB."""
_MAX_STEPS = 1000
"""Largest number of iterations: weak regularization takes 800; after 200, accuracy is uncertain by half a point."""


@dataclass(frozen=True)
class LinearProbe:
    """Features (..., d) -> logits (..., classes): standardized by the training set's mean and standard deviation."""

    mean: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor
    regularisation: float

    def __call__(self, features: Tensor) -> Tensor:
        return ((features.float() - self.mean) / self.scale) @ self.weight.T + self.bias

    def accuracy(self, features: Tensor, labels: Tensor) -> float:
        """Top-1 accuracy in percent."""
        parts = zip(features.split(_ROWS), labels.split(_ROWS), strict=True)
        return 100.0 * sum(int((self(rows).argmax(dim=1) == wanted).sum()) for rows, wanted in parts) / len(labels)


def fit_linear(
    features: Tensor,
    labels: Tensor,
    classes: int,
    regularisations: Sequence[float] = REGULARISATIONS,
    seed: int = 0,
    give_up: Callable[[], bool] = lambda: False,
) -> LinearProbe:
    """Logistic regression on features (n, d) and labels (n,) int64, in FP32 on their device.

    The regularization with the lowest loss on a held-out tenth of the images is used for the fit to all of them; with a
    single image, the first regularization is used. Raises GaveUp.
    """
    best, start = regularisations[0], None
    if len(regularisations) > 1 and len(labels) > 1:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).to(labels.device)
        held = order[: max(1, int(_HELD_OUT * len(labels)))]
        rest = order[len(held) :]
        scores: dict[float, float] = {}
        starts: dict[float, Tensor] = {}
        for strength in sorted(regularisations, reverse=True):  # each fit starts at the previous optimum
            probe = _fit(features[rest], labels[rest], classes, strength, start, give_up)
            start = starts[strength] = torch.cat((probe.weight, probe.bias[:, None]), dim=1)
            # The loss: less noisy than the accuracy on few images.
            scores[strength] = float(F.cross_entropy(probe(features[held]), labels[held]))
        best = min(scores, key=lambda strength: (scores[strength], strength))
        start = starts[best]
    return _fit(features, labels, classes, best, start, give_up)


def fit_ridge(features: Tensor, labels: Tensor, classes: int, regularisation: float = 1e-3) -> LinearProbe:
    """Least squares to one-hot labels with regularisation * |W|^2, in closed form: one solve of a (d, d) system."""
    mean, scale = _moments(features)
    average = torch.bincount(labels, minlength=classes).float() / len(labels)
    x = (_mine(features).float() - mean) / scale
    wanted = F.one_hot(_mine(labels), classes).float() - average
    sums = distributed.sum_across_ranks(torch.cat((x.T @ x, x.T @ wanted), dim=1)) / len(labels)
    normal = sums[:, : x.shape[1]] + regularisation * torch.eye(x.shape[1], device=x.device)
    weight = torch.linalg.solve(normal, sums[:, x.shape[1] :]).T
    return LinearProbe(mean, scale, weight.contiguous(), average, regularisation)


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    features = features.float()
    return features.mean(dim=0), features.std(dim=0, unbiased=False).clamp_min(1e-6)


def _mine(rows: Tensor) -> Tensor:
    return rows[distributed.rank() :: distributed.world_size()]


def _fit(
    features: Tensor,
    labels: Tensor,
    classes: int,
    strength: float,
    start: Tensor | None,
    give_up: Callable[[], bool],
) -> LinearProbe:
    """Fit by L-BFGS to all rows; the last column of the parameters is the bias, which is not regularized."""
    mean, scale = _moments(features)
    x, wanted = (_mine(features).float() - mean) / scale, _mine(labels)
    parameters = torch.zeros(classes, x.shape[1] + 1, device=x.device) if start is None else start.clone()

    def loss_and_gradient(values: Tensor) -> Tensor:
        """The mean cross-entropy and its gradient over the rows of all ranks: (1 + classes * (width + 1),)."""
        sums = torch.zeros(1 + values.numel(), device=x.device)
        for rows, targets in zip(x.split(_ROWS), wanted.split(_ROWS), strict=True):
            logits = rows @ values[:, :-1].T + values[:, -1]
            error = logits.softmax(dim=1)
            error[torch.arange(len(rows), device=x.device), targets] -= 1
            sums[0] += F.cross_entropy(logits, targets, reduction="sum")
            sums[1:] += torch.cat((error.T @ rows, error.sum(dim=0)[:, None]), dim=1).flatten()
        return distributed.sum_across_ranks(sums) / len(labels)

    with torch.no_grad():
        optimum = minimise(loss_and_gradient, parameters, strength, give_up)
    return LinearProbe(mean, scale, optimum[:, :-1].contiguous(), optimum[:, -1].contiguous(), strength)


def minimise(
    loss_and_gradient: Callable[[Tensor], Tensor], parameters: Tensor, strength: float, give_up: Callable[[], bool]
) -> Tensor:
    """Minimize by L-BFGS; all ranks must call it and get the same result.

    parameters: (classes, width + 1), the start; the last column is the bias. loss_and_gradient: such parameters ->
    (1 + classes * (width + 1),), summed over all ranks; `strength` * |weights|^2 / 2 is added here.
    Rank 0 runs the optimizer, so that rounding can't make ranks differ; the others only compute losses and gradients.
    `give_up` is called before each of these; if it returns true on any rank, all raise GaveUp.
    """

    def evaluate(values: Tensor) -> Tensor:
        if float(distributed.sum_across_ranks(values.new_tensor(float(give_up())))):
            raise GaveUp
        return loss_and_gradient(values)

    message = parameters.new_zeros(1 + parameters.numel())  # whether to continue, and the parameters
    if distributed.rank() > 0:
        while float(distributed.broadcast_from_first(message)[0]):
            evaluate(message[1:].view_as(parameters))
        return message[1:].view_as(parameters)
    parameters.requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [parameters], max_iter=_MAX_STEPS, tolerance_grad=1e-6, tolerance_change=1e-9, line_search_fn="strong_wolfe"
    )

    def send(proceed: float) -> None:
        message[0], message[1:] = proceed, parameters.detach().flatten()
        distributed.broadcast_from_first(message)

    def closure() -> Tensor:
        send(1.0)
        values = evaluate(parameters.detach())
        parameters.grad = values[1:].view_as(parameters).clone()
        weight = parameters.detach()[:, :-1]
        parameters.grad[:, :-1] += strength * weight
        return values[0] + 0.5 * strength * weight.square().sum()

    optimizer.step(closure)
    send(0.0)
    return parameters.detach()

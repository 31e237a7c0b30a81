"""Evaluations of frozen features, by name: each takes labelled features of a training and a test set.

A new one is a function with this signature and a line in EVALUATIONS; what it returns is printed, written and reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dino_ds.evals.knn import knn_accuracies
from dino_ds.evals.linear import fit_linear, fit_ridge
from dino_ds.evals.retrieval import class_retrieval
from dino_ds.evals.statistics import feature_statistics

_FEW_SHOT_FRACTIONS = (0.01, 0.1)
_FEW_SHOT_DRAWS = 3
_RETRIEVAL_IMAGES = 5000


@dataclass(frozen=True)
class Labelled:
    """Features (n, d), FP32, and labels (n,) int64 below `classes`, on one device."""

    features: Tensor
    labels: Tensor
    classes: int


@dataclass(frozen=True)
class Settings:
    """ks: numbers of neighbours; temperature of their votes; seed of the draws of few-shot images."""

    ks: tuple[int, ...] = (10, 20, 100, 200)
    temperature: float = 0.07
    seed: int = 0


Evaluation = Callable[[Labelled, Labelled, Settings], dict[str, float]]


def knn(train: Labelled, test: Labelled, settings: Settings) -> dict[str, float]:
    """The protocol of DINO: top-1 in percent for each k that the training set has neighbours for."""
    ks = [k for k in settings.ks if k <= len(train.labels)]
    found = knn_accuracies(
        train.features, train.labels, test.features, test.labels, ks or [len(train.labels)], settings.temperature
    )
    return {f"knn_{k}": accuracy for k, accuracy in found.items()}


def linear(train: Labelled, test: Labelled, settings: Settings) -> dict[str, float]:
    """Logistic regression to its optimum: top-1 in percent; the regularisation is chosen on a tenth of `train`."""
    probe = fit_linear(train.features, train.labels, train.classes, seed=settings.seed)
    return {
        "linear": probe.accuracy(test.features, test.labels),
        "linear_train": probe.accuracy(train.features, train.labels),
        "linear_regularisation": probe.regularisation,
    }


def ridge(train: Labelled, test: Labelled, settings: Settings) -> dict[str, float]:
    """Least squares in closed form: seconds instead of minutes, a point or two below `linear`."""
    probe = fit_ridge(train.features, train.labels, train.classes)
    return {"ridge": probe.accuracy(test.features, test.labels)}


def few_shot(train: Labelled, test: Labelled, settings: Settings) -> dict[str, float]:
    """Logistic regression on 1 % and 10 % of each class, one image at least: mean of three draws, in percent."""
    generator = torch.Generator().manual_seed(settings.seed)
    results = {}
    for fraction in _FEW_SHOT_FRACTIONS:
        scores = []
        for _ in range(_FEW_SHOT_DRAWS):
            rows = draw_balanced(train.labels, fraction, generator)
            probe = fit_linear(train.features[rows], train.labels[rows], train.classes, regularisations=[1e-3])
            scores.append(probe.accuracy(test.features, test.labels))
        results[f"few_shot_{fraction:.0%}"] = sum(scores) / len(scores)
    return results


def retrieval(train: Labelled, test: Labelled, settings: Settings) -> dict[str, float]:
    """Each test image asks for the others of its class: mean average precision in percent, of 5000 images at most."""
    rows = torch.arange(len(test.labels), device=test.labels.device)
    if len(rows) > _RETRIEVAL_IMAGES:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(settings.seed))
        rows = rows[order[:_RETRIEVAL_IMAGES].to(rows.device)]
    return {"retrieval_map": class_retrieval(test.features[rows], test.labels[rows])}


def statistics(train: Labelled, test: Labelled, settings: Settings) -> dict[str, float]:
    """Of the test features, labels unused: see `feature_statistics`."""
    return feature_statistics(test.features, settings.seed)


EVALUATIONS: dict[str, Evaluation] = {
    "knn": knn,
    "linear": linear,
    "ridge": ridge,
    "few-shot": few_shot,
    "retrieval": retrieval,
    "statistics": statistics,
}


def draw_balanced(labels: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Indices of `fraction` of each class, one at least."""
    chosen = []
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        count = max(1, round(fraction * len(members)))
        order = torch.randperm(len(members), generator=generator)
        chosen.append(members[order[:count].to(members.device)])
    return torch.cat(chosen)

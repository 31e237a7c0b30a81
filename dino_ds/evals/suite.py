"""The evaluations: each is a function from an `EvalContext` to numbers; all ranks call it and get the same numbers.

To add one, write a function with this signature, and add it to `find_evaluation` and to EVALUATIONS of
`dino_ds.config.evaluation`. Its docstring goes into the table of docs/evaluations.md; its numbers are printed, written
and reported.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch

from dino_ds.config.evaluation import BENCHMARKS
from dino_ds.data.normalization import IMAGENET
from dino_ds.engine import distributed
from dino_ds.errors import DataError
from dino_ds.evals.context import EvalContext, NamedSources, Settings
from dino_ds.evals.knn import feature_statistics, knn_accuracies
from dino_ds.evals.linear import fit_linear, fit_ridge

Evaluation = Callable[[EvalContext], dict[str, float]]
"""Results are percentages unless the function's docstring says otherwise."""


def knn(context: EvalContext) -> dict[str, float]:
    """Weighted k-NN, top-1 for each of `--k`"""
    settings = context.settings
    _with_neighbors(settings.ks, len(context.train_indices))  # before features, which may take hours
    test, train = context.test, context.train
    images = len(train.labels)
    ks = _with_neighbors(settings.ks, images)
    if len(ks) < len(settings.ks):
        left_out = ", ".join(str(k) for k in settings.ks if k > images)
        context.note([f"k = {left_out} left out: there are {images} training images"])
    accuracies = knn_accuracies(train.features, train.labels, test.features, test.labels, ks, settings.temperature)
    return {f"knn_{k}": accuracy for k, accuracy in accuracies.items()}


def _with_neighbors(ks: Sequence[int], images: int) -> list[int]:
    """Numbers of neighbors in `ks` that `images` training images suffice for. Raises DataError if there is none."""
    if images < min(ks):
        raise DataError(f"{images} training images have no {min(ks)} neighbors: give a smaller --k, or more")
    return [k for k in ks if k <= images]


def linear(context: EvalContext) -> dict[str, float]:
    """Logistic regression to its optimum (L-BFGS), regularisation chosen on a tenth of the training images"""
    test, train = context.test, context.train
    seed, give_up = context.settings.seed, context.give_up
    probe = fit_linear(train.features, train.labels, train.classes, seed=seed, give_up=give_up)
    return {
        "linear": probe.accuracy(test.features, test.labels),
        "linear_train": probe.accuracy(train.features, train.labels),
        "linear_regularisation": probe.regularisation,
    }


def ridge(context: EvalContext) -> dict[str, float]:
    """Least squares to one-hot labels in closed form"""
    test, train = context.test, context.train
    return {"ridge": fit_ridge(train.features, train.labels, train.classes).accuracy(test.features, test.labels)}


def statistics(context: EvalContext) -> dict[str, float]:
    """Deviation, RankMe and uniformity of the features; no labels needed"""
    return feature_statistics(context.any_images.features, context.settings.seed)


def find_evaluation(name: str) -> Evaluation:
    """The function of an evaluation."""
    from dino_ds.evals.davis import davis
    from dino_ds.evals.landmarks import oxford, paris

    functions = (knn, linear, ridge, statistics, oxford, paris, davis)
    return {function.__name__: function for function in functions}[name]


def evaluate(name: str, context: EvalContext) -> dict[str, float]:
    """Run one evaluation; all ranks must call it and get rank 0's results, to the last bit."""
    return distributed.gather_objects(find_evaluation(name)(context))[0]


def preflight_eval(name: str, settings: Settings, sources: NamedSources) -> EvalContext:
    """Run an evaluation up to its first use of the model, so that missing data is found before hours of work.

    Returns its context. All ranks must call it. Raises ConfigError or DataError, on all ranks, if its images, labels or
    benchmark are missing.
    """
    methods = dict.fromkeys(("features", "patch_tokens"))
    sizes = dict.fromkeys(("image_size", "stride", "side_multiple", "width"), 1)
    no_model: Any = SimpleNamespace(**methods, **sizes, is_vit=False, normalization=IMAGENET)
    context = _Preflight(no_model, settings, torch.device("cpu"), sources)
    with distributed.raise_on_all_ranks(), suppress(_Ready):
        find_evaluation(name)(context)
    return context


class _Ready(Exception):
    """Raised when an evaluation has found everything that it needs before its first feature."""


class _Preflight(EvalContext):
    def begin(self) -> None:
        if "_labeled_sources" in self.__dict__:  # it needs labels: check those of the test images too
            _ = self.test_indices
        raise _Ready


def describe_result(
    name: str,
    context: EvalContext,
    results: dict[str, float],
    seconds: float,
    about: Mapping[str, Any],
    data: str | None = None,
) -> dict[str, Any]:
    """Entry of one evaluation in evaluations.json (evals/results.py).

    about: "step" and "images" of the model; data: the name of its images; a benchmark's entry has the benchmark's name.
    """
    train, test = (None, None) if name in BENCHMARKS else context.image_counts
    return {
        "step": about.get("step"),
        "images": about.get("images"),
        "date": datetime.date.today().isoformat(),
        "data": name if name in BENCHMARKS else data,
        "train_images": train,
        "test_images": test,
        "seconds": round(seconds, 1),
        "results": results,
    }

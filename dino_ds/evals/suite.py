"""The evaluations: each is a function from an `EvalContext` to numbers; all ranks call it and get the same numbers.

To add one, write a function with this signature, and add it to `find_evaluation` and to EVALUATIONS of
`dino_ds.config.evaluation`. Its docstring goes into the table of docs/evaluations.md; its numbers are printed, written
and reported."""

from __future__ import annotations

import datetime
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dino_ds.config.evaluation import BENCHMARKS
from dino_ds.data.images import Source, evenly_spaced_indices
from dino_ds.data.normalization import IMAGENET
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, DataError
from dino_ds.evals.classifiers import feature_statistics, fit_linear, fit_ridge, knn_accuracies
from dino_ds.evals.context import EvalContext, NamedSources, Settings

OF_ONE_SET = ("statistics",)


def with_recipe_keys(name: str, error: ConfigError | DataError) -> ConfigError | DataError:
    """Replace the flags of `dino-ds eval` in the error message of an evaluation by recipe keys."""
    words = {
        "(--images)": "(eval.bank_images, eval.test_images)",
        "--images": "--eval.bank_images",
        "with --test_root DIR": "with --eval.root DIR (--eval.val_share 0.1 holds some out of training), or leave "
        "this out with --eval.evals auto",
        "--test_root": "--eval.root",
        "--benchmark_root": "--eval.benchmark_root",
        "--k": "--eval.k",
    }
    text = re.sub("|".join(map(re.escape, words)), lambda flag: words[flag[0]], str(error))
    return type(error)(f"eval.evals {name}: {text}")


def note_on_shared(
    evaluations: Collection[str], train: Source | None, test: Source | None, option: str, which: str = "test"
) -> tuple[float, list[str]]:
    """The share of test images that are training images too, and notes on it: images of the same file, or else, among
    64 test images, of the same name and content. Looks only if an evaluation needs both; all ranks must call it and get
    rank 0's answer. option: the one for other test images, for a note to advise. which: the kind of test images."""
    share, notes = 0.0, list[str]()
    needed = set(evaluations) - set(OF_ONE_SET)
    if needed and train is not None and test is not None and distributed.rank() == 0:
        looked_at: Sequence[int] = range(len(test))
        if not (shared := _same_files(train, test)):
            looked_at = evenly_spaced_indices(len(test), 64)
            shared = _same_contents(train, test, looked_at)
        if shared:
            share = len(shared) / len(looked_at)
            such = f"{len(shared)} of {len(looked_at)} {which} images looked at are training images too, such as "
            such += test.name(shared[0])
            notes.append(f"{such}: a score on them says nothing about new images; name others with {option}")
    return distributed.gather_objects((share, notes))[0]


def _same_files(train: Any, test: Any) -> list[int]:
    """Indices of the test images whose files are those of training images, by whatever links or spelling."""
    if not all(hasattr(source, "file_keys") for source in (train, test)):
        return []
    keys, test_keys = train.file_keys(), test.file_keys()
    shared: list[int] = np.flatnonzero(np.isin(test_keys, keys)).tolist()
    # Files may have changed since the folder was listed and keys taken: compare the contents of one pair.
    is_true = shared and _is_same(train, int(np.argmax(keys == test_keys[shared[0]])), test, shared[0])
    return shared if is_true else []


def _same_contents(train: Source, test: Source, looked_at: Sequence[int]) -> list[int]:
    """Indices of test images with the content of a training image of the same name. Each is compared with at most two
    training images of its file name, and two of its folder's and file's name."""
    if not all(hasattr(source, "read") for source in (train, test)):
        return []
    names = {index: _name(test, index) for index in looked_at}
    wanted = {part for name in names.values() for part in (name, name[-1:])}
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index in range(len(train)):
        whole_name = _name(train, index)
        for name in (whole_name, whole_name[-1:]):
            if name in wanted and len(alike[name]) < 2:
                alike[name].append(index)
    others = {index: {*alike[name], *alike[name[-1:]]} for index, name in names.items()}
    return [index for index in names if any(_is_same(train, other, test, index) for other in others[index])]


def _name(source: Source, index: int) -> tuple[str, ...]:
    name: str = getattr(source, "member", source.name)(index)
    return tuple(name.split("/")[-2:])


def _is_same(train: Any, train_index: int, test: Any, test_index: int) -> bool:
    """Whether two files have the same content; False where one can't be read, which the evaluation reports."""
    with suppress(Exception):  # a source of the user's may raise anything
        pair = ((train, train_index), (test, test_index))
        sizes = {source.file_bytes(index) for source, index in pair if hasattr(source, "file_bytes")}
        return len(sizes) < 2 and bool(train.read(train_index) == test.read(test_index))
    return False


def knn(context: EvalContext) -> dict[str, float]:
    """Weighted k-NN, top-1 for each of `--k`"""
    settings = context.settings
    _with_neighbors(settings.ks, len(context.train_indices))  # before features, which may take hours
    test, train = context.test, context.train
    images = len(train.labels)
    ks = _with_neighbors(settings.ks, images)
    if left_out := ", ".join(str(k) for k in settings.ks if k > images):
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
    probe = fit_linear(train.features, train.labels, train.classes, give_up=context.give_up)
    accuracy, of_train = (probe.accuracy(images.features, images.labels) for images in (test, train))
    return {"linear": accuracy, "linear_train": of_train, "linear_regularisation": probe.regularisation}


def ridge(context: EvalContext) -> dict[str, float]:
    """Least squares to one-hot labels in closed form"""
    test, train = context.test, context.train
    return {"ridge": fit_ridge(train.features, train.labels, train.classes).accuracy(test.features, test.labels)}


def statistics(context: EvalContext) -> dict[str, float]:
    """Deviation, RankMe and uniformity of the features; no labels needed"""
    return feature_statistics(context.any_images.features)


def find_evaluation(name: str) -> Callable[[EvalContext], dict[str, float]]:
    """The function of an evaluation; its results are percentages unless its docstring says otherwise."""
    from dino_ds.evals.benchmarks import davis, oxford, paris

    functions = (knn, linear, ridge, statistics, oxford, paris, davis)
    return {function.__name__: function for function in functions}[name]


def evaluate(name: str, context: EvalContext) -> dict[str, float]:
    """Run one evaluation; all ranks must call it and get rank 0's results, to the last bit."""
    return distributed.gather_objects(find_evaluation(name)(context))[0]


def preflight_eval(name: str, settings: Settings, sources: NamedSources) -> EvalContext:
    """Run an evaluation up to its first use of the model, and return its context. All ranks must call it. Raises
    ConfigError or DataError, on all ranks, before hours of work, if its images, labels or benchmark are missing."""
    no_model: Any = SimpleNamespace(features=None, image_size=1, normalization=IMAGENET)
    context = _Preflight(no_model, settings, torch.device("cpu"), sources)
    with distributed.raise_on_all_ranks(), suppress(_Ready):
        find_evaluation(name)(context)
    return context


class _Ready(Exception):
    """Raised when an evaluation has found everything that it needs before its first feature."""


class _Preflight(EvalContext):
    def begin(self) -> None:
        if "labeled_sources" in self.__dict__:  # it needs labels: check those of the test images too
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
    """Entry of one evaluation in evaluations.json (evals/tracking.py). about: "step" and "images" of the model; data:
    the name of its images; a benchmark's entry has the benchmark's name."""
    train, test = (None, None) if name in BENCHMARKS else context.image_counts
    entry = {"step": about.get("step"), "images": about.get("images"), "date": datetime.date.today().isoformat()}
    entry |= {"data": name if name in BENCHMARKS else data, "train_images": train, "test_images": test}
    return entry | {"seconds": round(seconds, 1), "results": results}

"""The figures of a run that a reader wants first; `--json` prints them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dino_ds.basics.digits import short
from dino_ds.costs.step_costs import count_parameters, student_facts
from dino_ds.errors import ConfigError
from dino_ds.models.specs.trained import ALL
from dino_ds.report.charts import EVALUATED, find_others, summarise_knn
from dino_ds.report.curves import Curve, Metrics
from dino_ds.report.folder import RunFiles


def summarise(run: RunFiles) -> dict[str, Any]:
    """Plain values for JSON; None for what the run does not tell. Losses in nats, accuracies in percent."""
    metrics = run.metrics
    return {
        "run": str(run.path),
        "state": run.state,
        "trained": describe_network(run),
        "step": run.step,
        "planned_steps": run.log.planned_steps,
        "images": _count(metrics["images"]),
        "epoch": _count(metrics["epoch"]),
        "training_seconds": training_seconds(metrics),
        **{key: _last(metrics[key]) for key in ("loss", "teacher_entropy", "kl")},
        **{key: _last(metrics[key]) for key in find_others(metrics) if not key.startswith(EVALUATED)},
        "knn": summarise_knn(metrics),
        "best": run.best or None,
        "images_per_second": mean_rate(metrics),
        "data_wait_fraction": _mean(metrics["data_wait_fraction"]),
        "memory_gib": _most(metrics["memory_gib"]),
        "memory_predicted_gib": _last(metrics["memory_predicted_gib"]),
        "skipped_steps": _count(metrics["skipped_steps"]),
        "bad_images": _count(metrics["bad_images"]),
        "evaluations": {e.name: {**e.about, "results": e.results} for e in run.evaluations},
        "incidents": run.log.counts,
        "notes": run.notes,
    }


def describe_network(run: RunFiles) -> str:
    """The network as "vit_tiny_patch16_224, patch 8, width 96, depth 2, 3 heads; 0.45 M weights with its head"."""
    if run.recipe is None:
        return "a network whose recipe can't be read"
    model = run.recipe.model
    try:
        weights = f"{short(count_parameters(run.recipe) / 1e6)} M weights with its head"
        if model.train != ALL:
            learning = sum(student_facts(run.recipe).trained.values()) / 1e6
            weights += f", {short(learning)} M trained ({model.train})"
    except ConfigError:  # the notes say which of the user's code is not here
        weights = "how many weights is not known here"
    return f"{model.backbone}, {model.spec().sizes}; {weights}"


def training_seconds(metrics: Metrics) -> float | None:
    """Seconds in steps alone: images over images per second, window by window; evaluations and pauses do not count."""
    images, rate = metrics["images"], metrics["images_per_second"]
    if not len(images) or len(images) != len(rate):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.diff(images.y, prepend=0) / rate.y
    return float(seconds[np.isfinite(seconds)].sum())


def mean_rate(metrics: Metrics) -> float | None:
    """Images per second of training."""
    seconds, images = training_seconds(metrics), _last(metrics["images"])
    return images / seconds if seconds and images else None


def _last(curve: Curve) -> float | None:
    """The last value, or None if there is none or it is not finite."""
    return curve.last if math.isfinite(curve.last) else None


def _count(curve: Curve) -> int | None:
    value = _last(curve)
    return None if value is None else int(value)


def _most(curve: Curve) -> float | None:
    return float(curve.finite.max()) if len(curve.finite) else None


def _mean(curve: Curve) -> float | None:
    return float(curve.finite.mean()) if len(curve.finite) else None

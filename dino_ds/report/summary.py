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
from dino_ds.report.text import percent

_NOISE, _FALL = 1.0, 0.2
"""Points of accuracy that are noise, and the part of the gain whose loss is worth a word."""


def summarise(run: RunFiles) -> dict[str, Any]:
    """Plain values for JSON; None for what the run does not tell. Losses in nats, accuracies in percent."""
    metrics = run.metrics
    return {
        "run": str(run.path),
        "state": run.state,
        "trained": describe_network(run),
        "step": run.step,
        "planned_steps": run.planned_steps,
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
        "incidents": run.events.counts,
        "notes": run.notes,
    }


def judge(run: RunFiles, knn: dict[str, float | int] | None) -> tuple[str, str]:
    """Whether the run has learned something: good, odd or bad, and a sentence with what to do."""
    if run.metrics["collapsed"].last == 1:
        return "bad", "Collapsed: the features of all images are alike. The incidents say what to change."
    if knn is None:
        return "odd", "Whether it has learned is not known without labels: dino-ds eval RUN --root DIR --test_root DIR."
    newest = f"{percent(knn['teacher'])} at step {knn['step']:,}"
    best = f"{percent(knn['best'])} at step {knn['best_step']:,}"
    start = knn.get("untrained", knn.get("start"))
    known = {"at the start": start, "of raw pixels": knn.get("raw_pixels"), "by chance": knn.get("chance")}
    bar, name = max(((value, name) for name, value in known.items() if value is not None), default=(0.0, "before"))
    if knn["best"] <= bar + _NOISE:
        return "odd", f"Not yet learned: k-NN has reached {best}, beside {percent(bar)} {name}. Train longer."
    if knn["teacher"] < knn["best"] - max(_NOISE, _FALL * (knn["best"] - bar)):
        kept = "best_teacher.safetensors has it" if run.best else "--eval.keep_best knn_top1 would have kept it"
        return "odd", f"Learned, and worse again: k-NN was {best}, and is {newest}; {kept}."
    return "good", f"Learned: k-NN is {newest}, beside {percent(bar)} {name}."


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

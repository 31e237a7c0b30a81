"""How a run went: its loss in two parts, its accuracy, its schedules and its speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEDULES = {
    "lr": "learning rate",
    "weight_decay": "weight decay",
    "teacher_temp": "teacher temperature",
    "teacher_momentum": "teacher momentum",
}
_BLUE, _ORANGE, _GREY, _PALE = "#3b6ea5", "#c98a3a", "#868e96", "#9db8d6"


def draw_curves(records: Sequence[dict[str, Any]]) -> Figure:
    """metrics.jsonl's records: the loss as teacher entropy + KL, k-NN accuracy where it was evaluated, the schedules
    and the throughput. What a record does not have, or has as NaN, is a gap."""
    from matplotlib.figure import Figure

    steps = [record for record in records if "loss" in record]
    evaluated = [record for record in records if "knn_top1" in record]
    figure = Figure(figsize=(10, 5), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[3, 2])
    above, below = parts
    large = above.subplots(1, 2 if evaluated else 1, squeeze=False)[0]
    small = below.subplots(1, len(SCHEDULES) + 1)
    x = _column(steps, "step")
    _loss(large[0], steps)
    if evaluated:
        _accuracy(large[1], evaluated)
    for axes, (key, name) in zip(small, {**SCHEDULES, "images_per_second": "images/s"}.items(), strict=True):
        axes.plot(x, _column(steps, key), color=_BLUE)
        axes.set_title(name, fontsize=8)
        axes.locator_params(axis="x", nbins=4)
    small[-1].set_ylim(0, 1.15 * _top(_column(steps, "images_per_second")))
    for axes in (*large, *small):
        axes.set_xlabel("step", fontsize=7)
        axes.tick_params(labelsize=7)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _loss(axes: Any, steps: Sequence[dict[str, Any]]) -> None:
    entropy, kl = (_column(steps, key) for key in ("teacher_entropy", "kl"))
    axes.stackplot(_column(steps, "step"), entropy, kl, labels=["teacher entropy", "KL"], colors=[_PALE, _ORANGE])
    axes.set_ylim(0, 1.15 * _top(_column(steps, "loss")))
    axes.set_title("loss = teacher entropy + KL", fontsize=9)
    axes.legend(fontsize=7, loc="upper right", ncols=2, frameon=False)


def _accuracy(axes: Any, evaluated: Sequence[dict[str, Any]]) -> None:
    x, accuracies = (_column(evaluated, key) for key in ("step", "knn_top1"))
    axes.plot(x, accuracies, "o-", color=_BLUE, markersize=4)
    axes.set_ylim(0, 1.1 * _top(accuracies) + 1)
    for key, name in (("knn_raw_pixels", "raw pixels"), ("knn_chance", "chance")):
        value = evaluated[-1].get(key)
        if value is not None:
            axes.axhline(value, ls="--", color=_GREY, lw=1)
            axes.annotate(f"{name} {value:.1f}", (x[-1], value), fontsize=7, ha="right", va="bottom", color=_GREY)
    axes.set_title(f"k-NN top-1, %: {accuracies[-1]:.1f} at the end", fontsize=9)


def _column(records: Sequence[dict[str, Any]], key: str) -> np.ndarray:
    """NaN and infinity are text in metrics.jsonl."""
    return np.array([float(record.get(key, "nan")) for record in records])


def _top(values: np.ndarray) -> float:
    """The largest that is a number; 1 where none is."""
    return float(max(values[np.isfinite(values)], default=1)) or 1.0

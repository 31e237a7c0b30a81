"""How a run went: its loss in two parts, its accuracy, its schedules and its speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dino_ds.pictures.series import Curve, Metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEDULES = {
    "lr": "learning rate",
    "weight_decay": "weight decay",
    "teacher_temp": "teacher temperature",
    "teacher_momentum": "teacher momentum",
}
_BASELINES = {"knn_raw_pixels": "raw pixels", "knn_chance": "chance"}
_BLUE, _ORANGE, _GREY, _PALE = "#3b6ea5", "#c98a3a", "#868e96", "#9db8d6"


def draw_curves(metrics: Metrics) -> Figure:
    """The loss as teacher entropy + KL, k-NN accuracy where it was evaluated, the schedules and the throughput.

    What a line of metrics does not have, or has as NaN, is a gap.
    """
    from matplotlib.figure import Figure

    evaluated = len(metrics["knn_top1"]) > 0
    figure = Figure(figsize=(10, 5), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[3, 2])
    above, below = parts
    large = above.subplots(1, 2 if evaluated else 1, squeeze=False)[0]
    small = below.subplots(1, len(SCHEDULES) + 1)
    _loss(large[0], metrics)
    if evaluated:
        _accuracy(large[1], metrics)
    for axes, (key, name) in zip(small, {**SCHEDULES, "images_per_second": "images/s"}.items(), strict=True):
        curve = metrics[key].thinned()
        axes.plot(curve.x, curve.y, color=_BLUE)
        axes.set_title(name, fontsize=8)
        axes.locator_params(axis="x", nbins=4)
    small[-1].set_ylim(0, 1.15 * _top(metrics["images_per_second"]))
    for axes in (*large, *small):
        axes.set_xlabel("step", fontsize=7)
        axes.tick_params(labelsize=7)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _loss(axes: Any, metrics: Metrics) -> None:
    steps = metrics["loss"].thinned().x
    parts = [metrics[key].at(steps) for key in ("teacher_entropy", "kl")]
    axes.stackplot(steps, *parts, labels=["teacher entropy", "KL"], colors=[_PALE, _ORANGE])
    axes.set_ylim(0, 1.15 * _top(metrics["loss"]))
    axes.set_title("loss = teacher entropy + KL", fontsize=9)
    axes.legend(fontsize=7, loc="upper right", ncols=2, frameon=False)


def _accuracy(axes: Any, metrics: Metrics) -> None:
    curve = metrics["knn_top1"]
    axes.plot(curve.x, curve.y, "o-", color=_BLUE, markersize=4)
    levels = [(name, metrics[key].last, "right") for key, name in _BASELINES.items() if len(metrics[key])]
    if curve.x[0] == 0 and np.isfinite(curve.y[0]):
        levels.append(("untrained", curve.y[0], "left"))
    axes.set_ylim(0, 1.1 * max(_top(curve), *(value for _, value, _ in levels if np.isfinite(value)), 0) + 1)
    for name, value, side in levels:
        axes.axhline(value, ls=":" if side == "left" else "--", color=_GREY, lw=1)
        place, over = (curve.x[0 if side == "left" else -1], value), "top" if side == "left" else "bottom"
        axes.annotate(f"{name} {value:.1f}", place, fontsize=7, ha=side, va=over, color=_GREY)
    axes.set_title(f"k-NN top-1, %: {curve.last:.1f} at the end", fontsize=9)


def _top(curve: Curve) -> float:
    """The largest that is a number; 1 where none is."""
    return float(max(curve.finite, default=1)) or 1.0

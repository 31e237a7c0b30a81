"""The curves of a run and their looks: one description for the report's page and for the picture `curves.png`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dino_ds.report.curves import Curve, Metrics
from dino_ds.report.terms import TermKeys, find_terms, title_of_scalar, title_of_term

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#2f6db3", "#dd8a2c", "#2a9461", "#b8406f", "#7659bd", "#8a6d3b", "#138a9b", "#7b8594")
"""The same as --c1 to --c8 of report/templates/page.css."""
KNN, RAW_PIXELS, CHANCE = "knn_top1", "knn_raw_pixels", "knn_chance"
KNN_BASELINES = {"start": "start", "untrained": "untrained", "raw_pixels": "raw pixels", "chance": "chance"}
EVALUATED = "eval/"
"""Prefix of the keys that evaluations during training write, except those of k-NN."""


@dataclass(frozen=True)
class Line:
    """One curve of a chart.

    kind: "line"; "dots" has a dot at each of up to 80 points; "area" is filled down to `base` or to the axis; "faint";
    "hidden" shows its values only where the reader points. color: 1 to 8.
    """

    name: str
    curve: Curve
    color: int
    kind: str = "line"
    base: Curve | None = None


@dataclass(frozen=True)
class Level:
    """A horizontal line to compare with."""

    name: str
    value: float


@dataclass(frozen=True)
class Chart:
    """Curves over one x axis. zero: the y axis begins at 0."""

    title: str
    unit: str
    lines: Sequence[Line]
    levels: Sequence[Level] = ()
    x_unit: str = "steps"
    zero: bool = False
    small: bool = False
    legend: bool = True


@dataclass(frozen=True)
class Series:
    """The look of one key of metrics.jsonl; its numbers times `factor` are in `unit`."""

    key: str
    title: str
    unit: str = ""
    zero: bool = False
    factor: float = 1.0

    def curve(self, metrics: Metrics) -> Curve:
        found = metrics[self.key]
        return Curve(found.x, found.y * self.factor)

    def chart(self, metrics: Metrics) -> Chart:
        color, kind = (3, "dots") if self.key.startswith(EVALUATED) else (1, "line")
        line = Line(self.title, self.curve(metrics), color, kind)
        return Chart(self.title, self.unit, [line], zero=self.zero, small=True)


LARGE = (
    Series("loss", "Loss", "nats"),
    Series(KNN, "k-NN top-1 of the teacher", "%"),
    Series("images_per_second", "Throughput", "images/s", zero=True),
    Series("data_wait_fraction", "Waiting for data", "% of the time", zero=True, factor=100),
)
SMALL = (
    Series("grad_norm", "Gradient norm, before clipping"),
    Series("lr", "Learning rate", zero=True),
    Series("weight_decay", "Weight decay"),
    Series("teacher_momentum", "Teacher momentum"),
    Series("teacher_temp", "Teacher temperature"),
    Series("loss_scale", "Loss scale"),
    Series("skipped_steps", "Skipped steps", "in all", zero=True),
    Series("bad_images", "Unreadable images", "in all", zero=True),
    Series("constant_images", "Images of one color", "part", zero=True),
    Series("memory_gib", "Peak memory of a process", "GiB", zero=True),
    Series("host_memory_gib", "Memory of the run's processes on a machine", "GiB", zero=True),
    Series("host_free_gib", "Free memory of the machine", "GiB", zero=True),
    Series("gpu_utilization", "GPU busy", "% of the time", zero=True, factor=100),
    Series("gpu_memory_gib", "Memory in use on the GPU", "GiB", zero=True),
    Series("gpu_watts", "Power of the GPU", "W", zero=True),
    Series("gpu_celsius", "Temperature of the GPU", "°C"),
    Series("gpu_joules_per_1000_images", "Energy of the GPU", "J per 1,000 images", zero=True),
    Series("save_seconds", "Duration of a save", "s", zero=True),
    Series("save_stall_seconds", "Training stopped for a save", "s", zero=True),
)
_SCHEDULES = ("lr", "weight_decay", "teacher_temp", "teacher_momentum")
_NOT_SHOWN = {"step", "images", "epoch", "memory_predicted_gib", "checkpoint_gib", "throughput_of_best", "collapsed"}
_NOT_SHOWN |= {"rolling_images_per_second", "rolling_data_wait_fraction", RAW_PIXELS, CHANCE}
_MOST_OTHERS = 60
SHARE = "share/"


def find_series(runs: Sequence[Metrics]) -> list[Series]:
    """The small charts: the loss terms' scalars and what later versions write, SMALL, evaluations while training."""
    keys = dict.fromkeys(key for metrics in runs for key in find_others(metrics))
    evaluated = [Series(key, key.removeprefix(EVALUATED)) for key in keys if key.startswith(EVALUATED)]
    titles = {name: title for metrics in runs for name, title in metrics.titles.items()}
    shares = [Series(key, f"Images from {key.removeprefix(SHARE)}", "%", factor=100) for key in find_shares(keys)]
    scalars = [Series(key, *title_of_scalar(key, titles)) for key in keys if not key.startswith((EVALUATED, SHARE))]
    return [*scalars[:_MOST_OTHERS], *SMALL, *shares[:_MOST_OTHERS], *evaluated[:_MOST_OTHERS]]


def find_shares(keys: Iterable[str]) -> list[str]:
    """Keys of the part of the images that came from each source of a mixture."""
    return [key for key in keys if key.startswith(SHARE)]


def find_others(metrics: Metrics) -> list[str]:
    """Keys that are not in the tables: what loss terms and evaluations write."""
    known = {series.key for series in (*LARGE, *SMALL)} | _NOT_SHOWN
    return [key for key in metrics.curves if key not in known]


def loss_charts(metrics: Metrics, prototypes: Mapping[str, int] | None = None) -> list[Chart]:
    """Charts of the weighted sum of several terms, and of each term with targets; `prototypes` are by a term's name."""
    several = any(key.endswith("_loss") for key in metrics.curves)
    charts = [Chart("Loss, all terms", "", [Line("loss", metrics["loss"], 1)])] if several else []
    known = prototypes or {}
    for term in find_terms(metrics):
        if term.entropy:
            alone = next(iter(known.values())) if len(known) == 1 and not term.name else None
            charts.append(_loss_chart(term, metrics, known.get(term.name, alone)))
    return charts or [_loss_chart(TermKeys("", "loss", "teacher_entropy", "kl"), metrics, None)]


def _loss_chart(term: TermKeys, metrics: Metrics, prototypes: int | None) -> Chart:
    """The KL divergence is drawn on top of the entropy; together they are the loss."""
    entropy = metrics[term.entropy]
    lines = [
        Line("teacher entropy", entropy, 1, "area"),
        Line("+ KL", metrics[term.kl], 4, "hidden"),
        Line(f"= {term.loss}", metrics[term.loss], 4, "area", base=entropy),
    ]
    levels = [Level("ln K: uniform", math.log(prototypes))] if prototypes else []
    return Chart(title_of_term(term.name, metrics.titles), "nats", lines, levels, zero=True)


def knn_chart(metrics: Metrics) -> Chart:
    found = summarise_knn(metrics) or {}
    levels = [Level(name, found[key]) for key, name in KNN_BASELINES.items() if key in found]
    return Chart("k-NN top-1", "%", [Line("teacher", metrics[KNN], 3, "dots")], levels)


def rolling_chart(series: Series, metrics: Metrics) -> Chart:
    """A chart of each logging window, faint, with the mean of the last five over it."""
    rolling = Series(f"rolling_{series.key}", "", factor=series.factor).curve(metrics)
    lines = [Line("each window", series.curve(metrics), 1, "faint" if len(rolling) else "line")]
    lines += [Line("mean of five", rolling, 1)] if len(rolling) else []
    return Chart(series.title, series.unit, lines, zero=series.zero)


def summarise_knn(metrics: Metrics) -> dict[str, float | int] | None:
    """The newest and the best accuracy of the teacher, each with its step, and its baselines, in percent, or None
    without evaluations.

    The first value is that of the untrained network, or of the weights that the run began with (start). Values before
    a resume with other test images or settings do not count.
    """
    curve = metrics[KNN]
    anew = metrics["measured_anew"]
    if len(anew):
        since = curve.x >= anew.x[-1]
        curve = Curve(curve.x[since], curve.y[since])
    if not len(curve.finite):
        return None
    best = int(np.where(np.isfinite(curve.y), curve.y, -np.inf).argmax())
    newest = int(curve.x[np.isfinite(curve.y)][-1])
    found = {"teacher": curve.last, "step": newest, "best": float(curve.y[best]), "best_step": int(curve.x[best])}
    if not len(anew) and (metrics.began_with_weights or curve.x[0] == 0):
        found["start" if metrics.began_with_weights else "untrained"] = float(curve.y[0])
    found |= {"raw_pixels": metrics[RAW_PIXELS].last, "chance": metrics[CHANCE].last}
    return {key: value for key, value in found.items() if math.isfinite(value)}


def draw_curves(metrics: Metrics) -> Figure:
    """Loss, k-NN accuracy where it was evaluated, schedules and throughput, as a matplotlib Figure.

    A value that is missing or NaN leaves a gap.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[3, 2])
    losses = loss_charts(metrics)
    large = [*losses[len(losses) > 2 :], *([knn_chart(metrics)] if len(metrics[KNN]) else [])]
    small = [series.chart(metrics) for series in SMALL if series.key in _SCHEDULES] + [LARGE[2].chart(metrics)]
    for part, charts in zip(parts, (large, small), strict=True):
        for axes, chart in zip(part.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
            _plot(axes, chart)
    return figure


def _plot(axes: Any, chart: Chart) -> None:
    values = [0.0]
    for line in chart.lines:
        curve, color = line.curve.thinned(), COLORS[line.color - 1]
        values += [*curve.finite]
        if line.kind == "area":
            floor = np.zeros(len(curve)) if line.base is None else line.base.at(curve.x)
            axes.fill_between(curve.x, floor, curve.y, color=color, alpha=0.28)
        points = ([], []) if line.kind == "hidden" else (curve.x, curve.y)
        dotted = line.kind == "dots" or len(curve.finite) == 1  # a line through one point can't be seen
        axes.plot(*points, "o-" if dotted else "-", color=color, markersize=4, label=line.name)
    for level in chart.levels:
        values.append(level.value)
        axes.axhline(level.value, ls="--", color=COLORS[-1], lw=1)
        place = (chart.lines[0].curve.x[-1], level.value)
        axes.annotate(f"{level.name} {level.value:.1f}", place, fontsize=7, ha="right", va="bottom", color=COLORS[-1])
    if chart.zero or chart.levels:
        axes.set_ylim(0, 1.15 * max(values) or 1.0)
    last = f": {chart.lines[0].curve.last:.1f} at the end" if chart.lines[0].kind == "dots" else ""
    axes.set_title(f"{chart.title}{f', {chart.unit}' if chart.unit else ''}{last}", fontsize=8 if chart.small else 9)
    if len(chart.lines) > 1:
        axes.legend(fontsize=7, loc="upper right", ncols=3, frameon=False, handlelength=1.2, columnspacing=1.0)
    axes.set_xlabel("step", fontsize=7)
    axes.tick_params(labelsize=7)
    if chart.small:
        axes.locator_params(axis="x", nbins=4)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.spines[["top", "right"]].set_visible(False)

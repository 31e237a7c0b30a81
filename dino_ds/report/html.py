"""HTML pages that are one file and fetch nothing, filled by jinja2, which escapes all text; and their charts, which
show keys of metrics.jsonl over the steps and are drawn as SVG by matplotlib."""

from __future__ import annotations

import io
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np

from dino_ds.basics.files import read_lines
from dino_ds.basics.formatting import number
from dino_ds.config.evaluation import EVALUATIONS
from dino_ds.config.stages import Origin, read_run_id
from dino_ds.errors import ConfigError
from dino_ds.method.specs.base import OF_EVERY_RUN

_PARTS = 400
KNN, RAW_PIXELS, CHANCE = "knn_top1", "knn_raw_pixels", "knn_chance"
KNN_BASELINES = {"start": "start", "untrained": "untrained", "raw_pixels": "raw pixels", "chance": "chance"}
EVALUATED, SHARE = "eval/", "share/"
"""Prefixes of keys: evaluations during training, except k-NN; shares of a mixture's sources."""
_OF_EVALUATIONS = {number: title for entry in EVALUATIONS.values() for number, title in entry.titles.items()}
_MOST_OTHERS = 60
_ENTROPY, _KL, _CROSS_ENTROPY, _LOSS, _HELD_OUT = "teacher_entropy", "kl", "cross_entropy", "_loss", "val_"
_SCALARS = {_ENTROPY: "teacher entropy", _KL: "KL of teacher and student", _CROSS_ENTROPY: "cross-entropy"}
"""Names of quantities in nats, by the end of their keys."""


@dataclass(frozen=True)
class Curve:
    """Values y (n,) at x (n,), FP64; x ascends strictly, y may hold NaN and infinities."""

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.x)

    @property
    def finite(self) -> np.ndarray:
        return self.y[np.isfinite(self.y)]

    @property
    def last(self) -> float:
        """The last value; NaN if there is none."""
        return float(self.y[-1]) if len(self) else float("nan")

    @property
    def constant(self) -> bool:
        return len(self) > 0 and bool(np.isfinite(self.y).all()) and bool((self.y == self.y[0]).all())

    def outline(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Split x into 400 equal parts; return mean x and lowest, mean and highest y of parts with finite values."""
        known = np.isfinite(self.y)
        x, y = self.x[known], self.y[known]
        edges = np.linspace(self.x[0], self.x[-1], _PARTS + 1)[1:-1]
        starts = np.unique(np.searchsorted(x, [self.x[0], *edges]))
        starts = starts[starts < len(x)]
        counts = np.diff([*starts, len(x)])
        means = np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts
        return means[0], np.minimum.reduceat(y, starts), means[1], np.maximum.reduceat(y, starts)


EMPTY = Curve(np.empty(0), np.empty(0))


@dataclass(frozen=True)
class Metrics:
    """Curves over the step by key of metrics.jsonl. lines, broken: numbers of lines that were read, and skipped.
    titles: of the loss terms by name, {} if unknown. began_with_weights: the initial weights were not random, by the
    recipe. first_step: step at which this run began, above 0 if its stage counts on from another run's. before: curves
    of the runs before a stage, in its steps. marks: steps of resumes and of a stage's begin, by description."""

    curves: dict[str, Curve]
    lines: int
    broken: int
    titles: Mapping[str, str] = field(default_factory=dict)
    began_with_weights: bool = False
    first_step: int = 0
    before: Mapping[str, Curve] = field(default_factory=dict)
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def images(self) -> Curve:
        """Number of images that this run alone has trained on; its global batch may have changed on a resume."""
        curve = self["images"]
        batch = np.round(curve.y / np.maximum(curve.x, 1))
        return Curve(curve.x, np.cumsum(np.diff(curve.x, prepend=self.first_step) * batch))

    def __getitem__(self, key: str) -> Curve:
        return self.curves.get(key, EMPTY)


def read_metrics(path: Path) -> Metrics:
    """Curves of a metrics.jsonl, with a step's last value. Raises OSError, ConfigError for another kind of file."""
    points: dict[str, array[float]] = {}
    lines = broken = 0
    for line in read_lines(path):
        try:
            record = _numbers(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            broken += bool(line.strip())
            continue
        lines += 1
        step = record.pop("step")
        for key, value in record.items():
            points.setdefault(key, array("d")).extend((step, value))
    curves = dict[str, Curve]()
    for key, pairs in points.items():
        steps, values = np.frombuffer(pairs)[0::2], np.frombuffer(pairs)[1::2]
        # Values that no run has would break arithmetic: beyond 1e100 they become infinity, below 1e-100 zero.
        size = np.abs(values)
        sane = np.where(size < 1e-100, 0.0, np.where(size > 1e100, np.copysign(np.inf, values), values))
        ascending, last = np.unique(steps[::-1], return_index=True)
        curves[key] = Curve(ascending, sane[::-1][last])
    return Metrics(curves, lines, broken)


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line, where NaN and infinity are text. Raises an error if step or values are missing."""
    try:
        values = dict(zip(record, map(float, record.values()), strict=True))
    except (TypeError, ValueError):
        values = {key: float(value) for key, value in record.items() if isinstance(value, (int, float))}
    if not 0 <= values["step"] < 2**53 or len(values) < 2:
        raise ValueError("no step, or no value")
    return values


@dataclass(frozen=True)
class Line:
    """One curve of a chart. kind: "line" or "dots". color: 1 to 8."""

    name: str
    curve: Curve
    color: int = 1
    kind: str = "line"


@dataclass(frozen=True)
class Chart:
    """Curves over the axis `x`. levels: horizontal lines by name; marks: vertical ones. zero: 0 is on the y axis."""

    title: str
    unit: str
    lines: Sequence[Line]
    levels: Mapping[str, float]
    zero: bool = False
    small: bool = False
    x: str = "steps"
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Series:
    """How one key of metrics.jsonl is shown; its values times `factor` are in `unit`."""

    key: str
    title: str
    unit: str = ""
    zero: bool = False
    factor: float = 1.0

    def chart(self, metrics: Metrics, small: bool = True) -> Chart:
        color, kind = (3, "dots") if self.key.startswith(EVALUATED) else (1, "line")
        curve = Curve(metrics[self.key].x, metrics[self.key].y * self.factor)
        return Chart(self.title, self.unit, [Line(self.title, curve, color, kind)], {}, zero=self.zero, small=small)


SPEED = (
    Series("images_per_second", "Images per second", "images/s", zero=True),
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
    Series("save_seconds", "Duration of a save", "s", zero=True),
    Series("save_stall_seconds", "Training stopped for a save", "s", zero=True),
)


def find_series(metrics: Metrics) -> list[Series]:
    """List the small charts: scalars of loss terms and unknown keys, SMALL, shares of a mixture, evaluations."""
    others = find_others(metrics)
    names = {key: key.removeprefix(EVALUATED) for key in others if key.startswith(EVALUATED)}
    sources = {key: key.removeprefix(SHARE) for key in others if key.startswith(SHARE)}
    scalars = [Series(key, *_title_of(key, metrics.titles)) for key in others if key not in {**names, **sources}]
    shares = [Series(key, f"Images from {source}", "%", factor=100) for key, source in sources.items()]
    evaluated = [Series(key, *_OF_EVALUATIONS.get(name, (name, ""))) for key, name in names.items()]
    return [*scalars[:_MOST_OTHERS], *SMALL, *shares[:_MOST_OTHERS], *evaluated[:_MOST_OTHERS]]


def find_others(metrics: Metrics) -> list[str]:
    """The keys that only some runs have: those of loss terms, evaluations and mixtures."""
    known = {*OF_EVERY_RUN, KNN, RAW_PIXELS, CHANCE, "measured_anew"} - {"kl"}
    return [key for key in metrics.curves if key not in known]


def learning_charts(metrics: Metrics) -> list[Chart]:
    """Charts of k-NN and loss. If the loss is one term, its targets' entropy is shown, below which it can't fall."""
    knn, marks = summarize_knn(metrics) or {}, metrics.marks
    levels = {name: knn[key] for key, name in KNN_BASELINES.items() if key in knn}
    at = f" at step {knn['step']:,}" if knn else ""
    accuracies, losses, unit = [Line(f"teacher{at}", metrics[KNN], 3, "dots")], [Line("loss", metrics["loss"])], ""
    several = any(key.endswith(_LOSS) and key != f"{_HELD_OUT}loss" for key in metrics.curves)
    if len(metrics[_ENTROPY]) and not several:
        losses, unit = [*losses, Line("entropy of the targets: the floor", metrics[_ENTROPY], 8)], "nats"
    for key, lines in ((KNN, accuracies), ("loss", losses)):
        if key in metrics.before:
            lines.append(Line("before the stage", metrics.before[key], 5, lines[0].kind))
    title = "Loss, the weighted sum of all terms" if several else "Loss"
    of_knn = Chart("k-NN top-1 of the teacher", "%", accuracies, levels, marks=marks)
    return [of_knn, Chart(title, unit, losses, {}, marks=marks)]


def curves_before(origin: Origin | None) -> dict[str, Curve]:
    """The curves of loss and k-NN of the runs (20 at most) before a stage, each up to the checkpoint with which the
    next began, in the stage's steps; a run that is gone or can't be read leaves out all before it too."""
    curves, later = dict[str, Curve](), 0
    for _ in range(20):
        if origin is None or read_run_id(Path(origin.run)) != origin.run_id:
            break
        try:
            metrics = read_metrics(Path(origin.run) / "metrics.jsonl")
        except (OSError, ConfigError):
            break
        later += origin.first_step - origin.step
        for key in {KNN, "loss"} & metrics.curves.keys():
            curve, after = metrics[key], curves.get(key, EMPTY)
            kept = curve.x <= origin.step
            x = np.concatenate([curve.x[kept] + later, after.x])
            curves[key] = Curve(x, np.concatenate([curve.y[kept], after.y]))
        origin = Origin.read(Path(origin.run))
    return {key: curve for key, curve in curves.items() if len(curve.finite)}


def summarize_knn(metrics: Metrics) -> dict[str, float | int] | None:
    """The newest and the best accuracy of the teacher, each with its step, and baselines, in percent; None without any.
    The first value is the baseline "untrained", or "start" if the run began with weights. Values before a resume with
    other test images or settings do not count."""
    curve, anew = metrics[KNN], metrics["measured_anew"]
    if len(anew):
        since = curve.x >= anew.x[-1]
        curve = Curve(curve.x[since], curve.y[since])
    if not len(curve.finite):
        return None
    best = int(np.where(np.isfinite(curve.y), curve.y, -np.inf).argmax())
    newest = int(curve.x[np.isfinite(curve.y)][-1])
    knn = {"teacher": float(curve.finite[-1]), "step": newest}
    knn |= {"best": float(curve.y[best]), "best_step": int(curve.x[best])}
    if not len(anew) and curve.x[0] == metrics.first_step:
        knn["start" if metrics.began_with_weights else "untrained"] = float(curve.y[0])
    knn |= {"raw_pixels": metrics[RAW_PIXELS].last, "chance": metrics[CHANCE].last}
    return {key: value for key, value in knn.items() if math.isfinite(value)}


def _title_of(key: str, titles: Mapping[str, str]) -> tuple[str, str]:
    """Title and unit of a curve of a loss term, in training or of held-out images; `titles` of the terms by name."""
    if key.startswith(_HELD_OUT):
        title, unit = _title_of(key.removeprefix(_HELD_OUT), titles)
        return f"{title}, held-out images", unit
    for end, words in _SCALARS.items():
        if key == end or key.endswith(f"_{end}"):
            name = key.removesuffix(end).rstrip("_")
            title = titles.get(name, f"Loss of {name}")
            return f"{title}: {words}" if name else words[0].upper() + words[1:], "nats"
    name, words = key.removesuffix(_LOSS), key.replace("_", " ")
    if name != key:
        return titles.get(name, f"Loss of {name}") if name else "Loss", ""
    return words[0].upper() + words[1:], ""


COLORS = ("#2f6db3", "#dd8a2c", "#2a9461", "#b8406f", "#7659bd", "#8a6d3b", "#138a9b", "#7b8594")
"""The colors --c1 to --c8 of templates/page.css, which inverts a chart on a dark page."""
_INK = "#5c6776"
_ROUND = [1, 2, 2.5, 5, 10]
_TEMPLATES = Path(__file__).parent / "templates"


def chart_svg(chart: Chart) -> str:
    """Draw a chart as an SVG element; "" if no line has two finite values."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    if all(len(line.curve.finite) < 2 for line in chart.lines):
        return ""
    width, height = (340, 190) if chart.small else (520, 270)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.title, "path.simplify": True}):
        figure = Figure(figsize=(width / 72, height / 72), frameon=False)
        wide = width - 52 - (118 if chart.levels else 18)  # room for the longest name of a level
        axes = figure.add_axes((52 / width, 22 / height, wide / width, (height - 42) / height))
        axes.patch.set_visible(False)
        axes.set_title("", y=1.0)  # else each drawing computes the title's position four times
        _plot(axes, chart)
        axes.text(-50 / wide, 1.03, chart.unit, transform=axes.transAxes, color=_INK, style="italic")
        file = io.StringIO()
        FigureCanvasSVG(figure).print_svg(file, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = file.getvalue()
    return svg[svg.index("<svg") :]  # without the head of a file


def _plot(axes: Any, chart: Chart) -> None:
    """Draw the lines, and the levels dashed with name and value, in limits that include all finite values. y is
    logarithmic if all values are positive and the largest is at least 100 times the smallest. A curve with more points
    than can be told apart becomes a band from the lowest to the highest values, with their mean over it."""
    lines = [line for line in chart.lines if len(line.curve.finite)]
    values = np.concatenate([line.curve.finite for line in lines] or [np.zeros(1)])
    is_log = not chart.zero and values.min() > 0 and values.max() >= 100 * values.min()
    values = np.concatenate([values, [*chart.levels.values()], [0.0] if chart.zero else []])
    low, high = (np.log10(end) if is_log else end for end in (values.min(), values.max()))
    pad = 0.06 * (high - low)
    pad = (pad if pad >= 1e-9 * abs(high) else 0.1 * abs(high)) or 1.0  # the second where all values are equal
    low -= 0.0 if chart.zero and low == 0 else pad
    high += 0.0 if chart.zero and high == 0 > low + pad else pad
    axes.set_yscale("log" if is_log else "linear")
    axes.set_ylim(*((10.0**low, 10.0**high) if is_log else (low, high)))
    ends = [end for line in lines for end in line.curve.x[[0, -1]]] or [0.0]
    axes.set_xlim(*((min(ends), max(ends)) if min(ends) < max(ends) else (ends[0] - 1, ends[0] + 1)))
    for line in chart.lines:
        curve, color = line.curve, COLORS[line.color - 1]
        x, y = curve.x, curve.y
        if len(curve) > 4 * _PARTS and line.kind != "dots" and len(curve.finite):  # points that can't be told apart
            x, lowest, y, highest = curve.outline()
            axes.fill_between(x, lowest, highest, color=color, alpha=0.2, linewidth=0)
        dotted = (line.kind == "dots" and len(x) <= 80) or len(curve.finite) == 1
        axes.plot(x, y, "o-" if dotted else "-", color=color, markersize=4, linewidth=1.6, clip_on=False)
    for mark in {mark for steps in chart.marks.values() for mark in steps}:
        axes.axvline(mark, linestyle=(0, (1, 2)), color=COLORS[-1], linewidth=1.2)
    height, room = axes.get_window_extent().height * 72 / axes.figure.dpi, 0.0
    for name, value in sorted(chart.levels.items(), key=lambda level: level[1]):
        axes.axhline(value, linestyle=(0, (4, 3)), color=COLORS[-1], linewidth=1)
        room = max(room, float(axes.transLimits.transform((0, value))[1]))
        shown = f"{name} {number(value, 3)}"
        axes.text(1.015, room, shown, transform=axes.transAxes, fontsize=7, va="center_baseline", color=_INK)
        room += 13 / height  # points of a name's height: names that would overlap move apart
    _style(axes, chart.small, is_log)


def _style(axes: Any, small: bool, is_log: bool) -> None:
    """Set few round ticks with short numbers, a faint grid and no frame."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.xaxis.set_major_locator(MaxNLocator(4 if small else 6, integer=True, steps=_ROUND))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_locator(LogLocator(numticks=6) if is_log else MaxNLocator(4 if small else 5, steps=_ROUND))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(colors=_INK, labelsize=9, length=3)
    axes.grid(axis="y", color=_INK, alpha=0.2, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_INK)


class Tag(NamedTuple):
    text: str
    css: str = ""
    tag: str = "span"


_environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
)
_environment.filters |= {"number": number}
# Whether a cell, a text or a Tag, has a word, such as a path, inside which a line may break.
_environment.tests["long"] = lambda cell: any(len(word) > 28 for word in (getattr(cell, "text", "") or cell).split())


def render(template: str, **values: Any) -> str:
    """The HTML of a template filled with values, which are all escaped."""
    return _environment.get_template(template).render(values)


def draw_chart(chart: Chart) -> str:
    """The HTML of a chart with title and newest values, or "" if no line has two finite values."""
    svg = chart_svg(chart)
    lines = [line for line in chart.lines if len(line.curve.finite)]
    lost = sum(len(line.curve) - len(line.curve.finite) for line in lines)
    return render("chart.html", chart=chart, lines=lines, lost=lost, svg=svg) if svg else ""


def build_document(title: str, body: str) -> str:
    """Wrap HTML into a complete document, whose content security policy forbids scripts and all requests."""
    style = (_TEMPLATES / "page.css").read_text(encoding="utf-8")
    return render("page.html", title=title, body=body, style=style)

"""The charts of a run as descriptions (their lines, titles, units), from the columns of metrics.jsonl."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dino_ds.basics.files import read_lines
from dino_ds.config.evaluation import EVALUATIONS
from dino_ds.config.stages import Origin, read_run_id
from dino_ds.errors import ConfigError
from dino_ds.method.specs.base import OF_EVERY_RUN

_PARTS, _MOST_STAGES = 400, 20
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

    @property
    def is_long(self) -> bool:
        """Whether the curve has more points than a chart can show apart."""
        return len(self) > 4 * _PARTS

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
    titles: of the loss terms by name, {} if the run's recipe is unknown. began_with_weights: the recipe says that the
    initial weights were not random. first_step: at which the run began, that of the run before for a stage that goes
    on. before: curves of the runs that a stage began with, in its steps. marks: steps of resumes and of a stage's
    begin, by what they are."""

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
        """Number of images that the run itself has trained on, whose global batch may have changed on a resume."""
        curve = self["images"]
        batch = np.round(curve.y / np.maximum(curve.x, 1))
        return Curve(curve.x, np.cumsum(np.diff(curve.x, prepend=self.first_step) * batch))

    def __getitem__(self, key: str) -> Curve:
        return self.curves.get(key, EMPTY)


def read_metrics(path: Path) -> Metrics:
    """Read the curves of a metrics.jsonl; of two lines with the same step the later counts.

    Raises OSError, or ConfigError for another kind of file.
    """
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
    return Metrics({key: _curve_of(np.frombuffer(pairs)) for key, pairs in points.items()}, lines, broken)


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line, where NaN and infinity are text. Raises an error if step or values are missing."""
    try:
        values = dict(zip(record, map(float, record.values()), strict=True))
    except (TypeError, ValueError):
        values = {key: float(value) for key, value in record.items() if isinstance(value, (int, float))}
    if not 0 <= values["step"] < 2**53 or len(values) < 2:
        raise ValueError("no step, or no value")
    return values


def _curve_of(pairs: np.ndarray) -> Curve:
    """Alternating steps and values, in the order of the file -> a curve; of equal steps the last one counts.

    Values beyond 1e100, which no run has, become infinite, and those below 1e-100 zero, so that arithmetic is safe.
    """
    steps, values = pairs[0::2], pairs[1::2]
    size = np.abs(values)
    sane = np.where(size < 1e-100, 0.0, np.where(size > 1e100, np.copysign(np.inf, values), values))
    ascending, last = np.unique(steps[::-1], return_index=True)
    return Curve(ascending, sane[::-1][last])


@dataclass(frozen=True)
class Line:
    """One curve of a chart. kind: "line" or "dots". color: 1 to 8."""

    name: str
    curve: Curve
    color: int = 1
    kind: str = "line"


@dataclass(frozen=True)
class Chart:
    """Curves over one x axis, named by `x`. levels: horizontal lines by name; marks: vertical ones. zero: 0 is on the y
    axis."""

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

    def curve(self, metrics: Metrics) -> Curve:
        curve = metrics[self.key]
        return Curve(curve.x, curve.y * self.factor)

    def chart(self, metrics: Metrics, small: bool = True) -> Chart:
        color, kind = (3, "dots") if self.key.startswith(EVALUATED) else (1, "line")
        line = Line(self.title, self.curve(metrics), color, kind)
        return Chart(self.title, self.unit, [line], {}, zero=self.zero, small=small)


LARGE = (
    Series("loss", "Loss"),
    Series(KNN, "k-NN top-1 of the teacher", "%"),
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
    keys, titles = find_others(metrics), metrics.titles
    names = [key.removeprefix(EVALUATED) for key in keys if key.startswith(EVALUATED)]
    evaluated = [Series(f"{EVALUATED}{name}", *_OF_EVALUATIONS.get(name, (name, ""))) for name in names]
    shares = [Series(key, f"Images from {key.removeprefix(SHARE)}", "%", factor=100) for key in find_shares(keys)]
    scalars = [Series(key, *title_of_scalar(key, titles)) for key in keys if not key.startswith((EVALUATED, SHARE))]
    return [*scalars[:_MOST_OTHERS], *SMALL, *shares[:_MOST_OTHERS], *evaluated[:_MOST_OTHERS]]


def find_shares(keys: Iterable[str]) -> list[str]:
    """Return the keys with the share of images from each source of a mixture."""
    return [key for key in keys if key.startswith(SHARE)]


def find_others(metrics: Metrics) -> list[str]:
    """Return the keys that only some runs have: those of loss terms, evaluations and mixtures."""
    known = {*OF_EVERY_RUN, KNN, RAW_PIXELS, CHANCE, "measured_anew"} - {"kl"}
    return [key for key in metrics.curves if key not in known]


def loss_chart(metrics: Metrics) -> Chart:
    """Chart the loss; for an objective of one term with the entropy of its targets, below which it can't fall."""
    lines, unit = [Line("loss", metrics["loss"])], ""
    several = any(key.endswith(_LOSS) and key != f"{_HELD_OUT}loss" for key in metrics.curves)
    if len(metrics[_ENTROPY]) and not several:
        lines, unit = [*lines, Line("entropy of the targets: the floor", metrics[_ENTROPY], 8)], "nats"
    title = "Loss, the weighted sum of all terms" if several else "Loss"
    return Chart(title, unit, [*lines, *_before(metrics, "loss", "line")], {}, marks=metrics.marks)


def knn_chart(metrics: Metrics) -> Chart:
    knn = summarize_knn(metrics) or {}
    levels = {name: knn[key] for key, name in KNN_BASELINES.items() if key in knn}
    at = f" at step {knn['step']:,}" if knn else ""
    lines = [Line(f"teacher{at}", metrics[KNN], 3, "dots"), *_before(metrics, KNN, "dots")]
    return Chart("k-NN top-1 of the teacher", "%", lines, levels, marks=metrics.marks)


def _before(metrics: Metrics, key: str, kind: str) -> list[Line]:
    return [Line("before the stage", metrics.before[key], 5, kind)] if key in metrics.before else []


def curves_before(origin: Origin | None) -> dict[str, Curve]:
    """The curves of loss and k-NN of the runs that a stage began with, each up to its checkpoint, in the stage's steps;
    without runs that are gone or can't be read."""
    curves, later = dict[str, Curve](), 0
    for _ in range(_MOST_STAGES):
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
            both = np.concatenate([curve.x[kept] + later, after.x]), np.concatenate([curve.y[kept], after.y])
            curves[key] = Curve(*both)
        origin = Origin.read(Path(origin.run))
    return {key: curve for key, curve in curves.items() if len(curve.finite)}


def summarize_knn(metrics: Metrics) -> dict[str, float | int] | None:
    """Return the newest and the best accuracy of the teacher, each with its step, and baselines, in percent; None
    without evaluations.

    The first value is the baseline "untrained", or "start" if the run began with weights. Values before a resume with
    other test images or settings do not count.
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
    knn = {"teacher": float(curve.finite[-1]), "step": newest, "best": float(curve.y[best])}
    knn["best_step"] = int(curve.x[best])
    if not len(anew) and curve.x[0] == metrics.first_step:
        knn["start" if metrics.began_with_weights else "untrained"] = float(curve.y[0])
    knn |= {"raw_pixels": metrics[RAW_PIXELS].last, "chance": metrics[CHANCE].last}
    return {key: value for key, value in knn.items() if math.isfinite(value)}


def title_of_term(name: str, titles: Mapping[str, str]) -> str:
    """Return the title of a term's loss: the one in `titles`, if the run's recipe is known."""
    return titles.get(name, f"Loss of {name}") if name else "Loss"


def title_of_scalar(key: str, titles: Mapping[str, str]) -> tuple[str, str]:
    """Return title and unit of a curve of a loss term, in training or of held-out images."""
    if key.startswith(_HELD_OUT):
        title, unit = title_of_scalar(key.removeprefix(_HELD_OUT), titles)
        return f"{title}, held-out images", unit
    for end, words in _SCALARS.items():
        if key == end or key.endswith(f"_{end}"):
            name = key.removesuffix(end).rstrip("_")
            return f"{title_of_term(name, titles)}: {words}" if name else words[0].upper() + words[1:], "nats"
    words = key.replace("_", " ")
    return title_of_term(key.removesuffix(_LOSS), titles) if key.endswith(_LOSS) else words[0].upper() + words[1:], ""

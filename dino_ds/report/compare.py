"""The page about several runs: what the template compare.html shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dino_ds.report.charts import (
    EVALUATED,
    KNN,
    LARGE,
    Chart,
    Line,
    find_others,
    find_series,
    title_of_scalar,
)
from dino_ds.report.curves import Curve
from dino_ds.report.folder import RunFiles
from dino_ds.report.html import Tag, draw_chart, render
from dino_ds.report.plot import COLORS
from dino_ds.report.single_run import state_badge
from dino_ds.report.summary import show_plain, summarise
from dino_ds.report.text import duration, gib, nats, number, percent

_EVALUATED_ON = (
    *("data.source", "data.root", "crops.global_size"),
    *("eval.root", "eval.k", "eval.bank_images", "eval.test_images"),
)
"""Settings that an accuracy depends on besides the network: if they differ accuracies can't be compared."""
_NO_BEST = ("_train", "regularisation", "feature_std", "uniformity", "alignment", "rankme")
"""Ends of names of figures that are not better for being higher."""
_MOST_IN_LEGENDS = 4
Facts = dict[str, Any]
Cell = str | Tag


def names_of(runs: Sequence[RunFiles]) -> list[str]:
    """The folders' names, with as much of the path before them as tells them apart."""
    parts = [run.path.resolve().parts for run in runs]
    length = 1
    while len({path[-length:] for path in parts}) < len(parts):
        length += 1
    return ["/".join(path[-length:]) for path in parts]


def draw_comparison(runs: Sequence[RunFiles]) -> str:
    names, facts = names_of(runs), [summarise(run) for run in runs]
    settings = [run.settings for run in runs]
    other = [key for key in _EVALUATED_ON if len({_shown(one, key) for one in settings}) > 1]
    keys = dict.fromkeys(key for one in settings for key in one)
    differences = [(key, [_shown(one, key) for one in settings]) for key in keys]
    large, small = _curves(runs, names)
    return render(
        "compare.html",
        keys=[Tag(name, f"key c{color_of(i)}") for i, name in enumerate(names)],
        figures=_figures(facts, _scalars(runs), mark=not other),
        other=other,
        notes=[f"{name}: {text}" for name, run in zip(names, runs, strict=True) for text in run.notes],
        large_charts=large,
        small_charts=small,
        evaluations=_evaluations(runs, mark=not other),
        marked=not other,
        differences=[(Tag(key, tag="code"), *values) for key, values in differences if len(set(values)) > 1],
    )


def color_of(index: int) -> int:
    return index % len(COLORS) + 1


def _shown(settings: dict[str, Any], key: str) -> str:
    return show_plain(settings[key]) if key in settings else "–"


def _figures(facts: Sequence[Facts], scalars: dict[str, str], mark: bool) -> list[list[Cell]]:
    """A row a figure, a column a run. mark: the best accuracy; losses of other recipes mean other things."""
    wait = "data_wait_fraction"
    knn = [one["knn"] or {} for one in facts]
    of_knn: dict[str, list[Cell]] = {
        "k-NN top-1": _marked([one.get("teacher") for one in knn], percent, mark),
        "k-NN at step": [number(one.get("step")) for one in knn],
        "best k-NN top-1": _marked([one.get("best") for one in knn], percent, mark),
        "best at step": [number(one.get("best_step")) for one in knn],
        "start / raw pixels / chance": [_baselines(one) for one in knn],
    }
    rows: dict[str, Callable[..., Cell]] = {
        "state": state_badge,
        "trained": lambda one: one["trained"],
        "steps": lambda one: number(one["step"]),
        "images": lambda one: number(one["images"]),
        "time in steps": lambda one: duration(one["training_seconds"]),
        "loss": lambda one: nats(one["loss"]),
        "= teacher entropy + KL": lambda one: f"{nats(one['teacher_entropy'])} + {nats(one['kl'])}",
        **{title: lambda one, key=key: nats(one.get(key)) for title, key in scalars.items()},
        "images per second": lambda one: number(one["images_per_second"], 3),
        "waiting for data": lambda one: percent(None if one[wait] is None else 100 * one[wait]),
        "peak memory": lambda one: gib(one["memory_gib"]),
        "predicted peak memory": lambda one: gib(one["memory_predicted_gib"]),
        "skipped steps": lambda one: number(one["skipped_steps"]),
        "unreadable images": lambda one: number(one["bad_images"]),
        "incidents": lambda one: ", ".join(f"{kind} {number(n)}" for kind, n in one["incidents"].items()) or "none",
        "folder": lambda one: one["run"],
    }
    table = [[name, *cells] for name, cells in of_knn.items()]
    return table + [[name, *map(show, facts)] for name, show in rows.items()]


def _scalars(runs: Sequence[RunFiles]) -> dict[str, str]:
    """Titles and keys of what the runs' loss terms write, but for the sums of a run of one term."""
    titles = {name: title for run in runs for name, title in run.metrics.titles.items()}
    keys = [key for run in runs for key in find_others(run.metrics) if not key.startswith(EVALUATED)]
    return {title_of_scalar(key, titles)[0]: key for key in keys if key not in ("teacher_entropy", "kl")}


def _baselines(knn: dict[str, float]) -> str:
    start = knn.get("untrained", knn.get("start"))
    return " / ".join(percent(value) for value in (start, knn.get("raw_pixels"), knn.get("chance")))


def _marked(values: Sequence[float | None], show: Callable[[float | None], str], mark: bool = True) -> list[Cell]:
    """The largest is marked, where there are others to compare with."""
    known = {value for value in values if value is not None}
    best = max(known) if mark and len(known) > 1 else None
    return [show(value) if value is None or value != best else Tag(show(value), "best") for value in values]


def _curves(runs: Sequence[RunFiles], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Large and small charts, a color a run; over images where the runs' global batches differ."""
    batches = [run.recipe.data.global_batch if run.recipe else None for run in runs]
    scales = [batch for batch in batches if batch is not None]
    by_images = len(set(batches)) > 1 and len(scales) == len(batches)
    drawn: dict[bool, list[str]] = {True: [], False: []}
    for series in (*LARGE, *find_series([run.metrics for run in runs])):
        curves, large = [series.curve(run.metrics) for run in runs], series in LARGE
        if not large and all(one.constant or not len(one.finite) for one in curves) and len(_lasts(curves)) < 2:
            continue
        if by_images:
            curves = [Curve(curve.x * batch, curve.y) for curve, batch in zip(curves, scales, strict=True)]
        kind = "dots" if series.key == KNN or series.key.startswith(EVALUATED) else "line"
        chart = Chart(
            series.title,
            series.unit,
            [Line(names[i], curve, color_of(i), kind) for i, curve in enumerate(curves)],
            {},
            "images" if by_images else "steps",
            series.zero,
            small=not large,
            legend=len(runs) <= _MOST_IN_LEGENDS,
        )
        drawn[large].append(draw_chart(chart))
    return drawn[True], drawn[False]


def _lasts(curves: Sequence[Curve]) -> set[float]:
    return {float(curve.finite[-1]) for curve in curves if len(curve.finite)}


def _evaluations(runs: Sequence[RunFiles], mark: bool) -> list[list[Cell]]:
    """mark: the best of a row."""
    results: dict[tuple[str, str], list[float | None]] = {}
    for i, run in enumerate(runs):
        for evaluation in run.evaluations:
            for metric, value in evaluation.results.items():
                results.setdefault((evaluation.name, metric), [None] * len(runs))[i] = value
    return [
        [name, metric, *_marked(values, number, mark and not metric.endswith(_NO_BEST))]
        for (name, metric), values in results.items()
    ]

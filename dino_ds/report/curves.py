"""Which curves a report shows, and how: one table for a run alone and for several side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from dino_ds.pictures.series import Curve
from dino_ds.report.chart import COLOURS, Level, Line, draw_chart
from dino_ds.report.folder import RunFiles
from dino_ds.report.html import join, note
from dino_ds.report.summary import CHANCE, KNN, RAW_PIXELS, summarise_knn
from dino_ds.report.text import number


@dataclass(frozen=True)
class Shown:
    """A curve of metrics.jsonl; factor: from its numbers to `unit`."""

    key: str
    title: str
    unit: str
    zero: bool = False
    factor: float = 1.0


_LARGE = (
    Shown("loss", "Loss", "nats"),
    Shown(KNN, "k-NN top-1 of the teacher", "%"),
    Shown("images_per_second", "Throughput", "images/s", zero=True),
    Shown("data_wait_fraction", "Waiting for data", "% of the time", zero=True, factor=100),
)
_SMALL = (
    Shown("teacher_entropy", "Teacher entropy", "nats"),
    Shown("kl", "KL of teacher and student", "nats"),
    Shown("grad_norm", "Gradient norm, before clipping", ""),
    Shown("lr", "Learning rate", "", zero=True),
    Shown("weight_decay", "Weight decay", ""),
    Shown("teacher_momentum", "Teacher momentum", ""),
    Shown("teacher_temp", "Teacher temperature", ""),
    Shown("loss_scale", "Loss scale", ""),
    Shown("skipped_steps", "Skipped steps", "in all", zero=True),
    Shown("bad_images", "Unreadable images", "in all", zero=True),
    Shown("memory_gib", "Peak memory of a process", "GiB", zero=True),
    Shown("gpu_utilization", "GPU busy", "% of the time", zero=True, factor=100),
    Shown("gpu_memory_gib", "Memory in use on the GPU", "GiB", zero=True),
    Shown("gpu_watts", "Power of the GPU", "W", zero=True),
    Shown("gpu_celsius", "Temperature of the GPU", "°C"),
    Shown("gpu_joules_per_1000_images", "Energy of the GPU", "J per 1,000 images", zero=True),
    Shown("save_seconds", "A save takes", "s", zero=True),
    Shown("save_stall_seconds", "Standstill of a save", "s", zero=True),
)
_NOT_SHOWN = {"step", "images", "epoch", "memory_predicted_gib", "checkpoint_gib", "throughput_of_best", "collapsed"}
_NOT_SHOWN |= {"rolling_images_per_second", "rolling_data_wait_fraction", RAW_PIXELS, CHANCE}
_MOST_OTHERS = 60
_MOST_IN_LEGENDS = 4
EVALUATED = "eval/"
"""Before the names of figures of evaluations while training, but for those of k-NN."""


def draw_run(run: RunFiles) -> Markup:
    """All curves of one run; those that never change are one sentence."""
    large = [_loss(run), _knn(run), *(_with_rolling(run, shown) for shown in _LARGE[2:])]
    small = [shown for shown in (*_SMALL, *_others([run])) if len(_scaled(run, shown).finite)]
    drawn = [shown for shown in small if not _scaled(run, shown).constant]
    flat = [_flat(run, shown) for shown in small if shown not in drawn]
    parts = [
        Markup('<div class="charts">{}</div>').format(join(large)),
        Markup('<div class="charts three">{}</div>').format(join(_small(run, shown) for shown in drawn)),
    ]
    if flat:
        parts.append(note(f"The same from beginning to end: {'; '.join(flat)}."))
    return join(parts)


def _small(run: RunFiles, shown: Shown) -> Markup:
    line = Line(shown.title, _scaled(run, shown), *((3, "dots") if shown.key.startswith(EVALUATED) else (1, "line")))
    return draw_chart(shown.title, shown.unit, [line], zero=shown.zero, small=True)


def _flat(run: RunFiles, shown: Shown) -> str:
    unit = f" {shown.unit}" if shown.unit in ("s", "GiB", "nats") else ""
    return f"{shown.title[0].lower()}{shown.title[1:]} {number(_scaled(run, shown).last)}{unit}"


def draw_together(runs: Sequence[RunFiles], names: Sequence[str]) -> Markup:
    """The same curves, a colour a run; over images where the runs' global batches differ."""
    batches = {run.recipe.data.global_batch if run.recipe else None for run in runs}
    by_images = len(batches) > 1 and None not in batches
    x_unit = "images" if by_images else "steps"
    parts: dict[bool, list[Markup]] = {True: [], False: []}
    for shown in (*_LARGE, *_SMALL, *_others(runs)):
        curves = [_scaled(run, shown) for run in runs]
        flat = all(curve.constant or not len(curve.finite) for curve in curves) and len(_lasts(curves)) < 2
        if flat and shown not in _LARGE:
            continue
        if by_images:
            curves = [_over_images(run, curve) for run, curve in zip(runs, curves, strict=True)]
        kind = "dots" if shown.key == KNN or shown.key.startswith(EVALUATED) else "line"
        lines = [Line(names[i], curve, colour_of(i), kind) for i, curve in enumerate(curves)]
        levels = _shared_levels(runs) if shown.key == KNN else []
        large = shown in _LARGE
        few = len(runs) <= _MOST_IN_LEGENDS
        parts[large].append(draw_chart(shown.title, shown.unit, lines, levels, x_unit, shown.zero, not large, few))
    key = Markup('<span class="key c{}">{}</span>')
    legend = join(key.format(colour_of(i), name) for i, name in enumerate(names))
    return Markup('<div class="legend">{}</div><div class="charts">{}</div><div class="charts three">{}</div>').format(
        legend, join(parts[True]), join(parts[False])
    )


def colour_of(index: int) -> int:
    return index % COLOURS + 1


def _scaled(run: RunFiles, shown: Shown) -> Curve:
    curve = run.metrics[shown.key]
    return Curve(curve.x, curve.y * shown.factor)


def _over_images(run: RunFiles, curve: Curve) -> Curve:
    assert run.recipe is not None
    return Curve(curve.x * run.recipe.data.global_batch, curve.y)


def _lasts(curves: Sequence[Curve]) -> set[float]:
    return {float(curve.finite[-1]) for curve in curves if len(curve.finite)}


def _loss(run: RunFiles) -> Markup:
    """The KL lies on the entropy; both together are the loss."""
    metrics = run.metrics
    entropy = metrics["teacher_entropy"]
    lines = [
        Line("teacher entropy", entropy, 1, "area"),
        Line("+ KL", metrics["kl"], 4, "hidden"),
        Line("= loss", metrics["loss"], 4, "area", base=entropy),
    ]
    levels = [Level("ln K: uniform", math.log(run.recipe.head.prototypes))] if run.recipe else []
    return draw_chart("Loss", "nats", lines, levels, zero=True)


def _knn(run: RunFiles) -> Markup:
    found = summarise_knn(run.metrics) or {}
    names = {"untrained": "untrained", "raw_pixels": "raw pixels", "chance": "chance"}
    levels = [Level(name, found[key]) for key, name in names.items() if key in found]
    return draw_chart("k-NN top-1", "%", [Line("teacher", run.metrics[KNN], 3, "dots")], levels)


def _with_rolling(run: RunFiles, shown: Shown) -> Markup:
    """Each window faint, and the mean of the last five over it."""
    rolling = _scaled(run, Shown(f"rolling_{shown.key}", "", "", factor=shown.factor))
    raw = _scaled(run, shown)
    lines = [Line("each window", raw, 1, "faint" if len(rolling) else "line")]
    lines += [Line("mean of five", rolling, 1)] if len(rolling) else []
    return draw_chart(shown.title, shown.unit, lines, zero=shown.zero)


def _shared_levels(runs: Sequence[RunFiles]) -> list[Level]:
    """Baselines that are the same for all."""
    levels = []
    for key, name in ((RAW_PIXELS, "raw pixels"), (CHANCE, "chance")):
        values = _lasts([run.metrics[key] for run in runs])
        if len(values) == 1:
            levels.append(Level(name, values.pop()))
    return levels


def _others(runs: Sequence[RunFiles]) -> list[Shown]:
    """Keys that this table does not know: evaluations during training, and what later versions write."""
    known = {shown.key for shown in (*_LARGE, *_SMALL)} | _NOT_SHOWN
    keys = dict.fromkeys(key for run in runs for key in run.metrics.curves if key not in known)
    return [Shown(key, key.removeprefix(EVALUATED), "") for key in list(keys)[:_MOST_OTHERS]]

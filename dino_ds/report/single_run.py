"""The page about one run: what the template run.html shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dino_ds.config.recipe import Recipe
from dino_ds.method.specs.of_recipe import known_terms
from dino_ds.report.charts import (
    KNN_BASELINES,
    LARGE,
    SHARE,
    Series,
    find_series,
    find_shares,
    find_terms,
    knn_chart,
    loss_charts,
    rolling_chart,
)
from dino_ds.report.curves import Metrics
from dino_ds.report.folder import LEVELS, MOST_OF_A_KIND, Evaluation, RunFiles
from dino_ds.report.html import Tag, draw_chart, embedded_file, render
from dino_ds.report.summary import changed_settings, environment_rows, judge, reproduction, summarise
from dino_ds.report.text import duration, gib, nats, number, percent

_STATES = {
    "finished": "finished",
    "stopped": "stopped",
    "failed": "ended by an error",
    "running": "still running",
    "unfinished": "not finished",
}
_OPEN_LINES = 12
_WIDTH, _STRIP_WIDTH = 1300, 800
"""Pixels of embedded pictures."""
_MOST, _MOST_IN_STRIP = 24, 6
_WIDE_FROM = 2.2
"""Times its height: over both columns."""
_PICTURES = {
    "map": "Map of the features: images that are alike lie together",
    **dict.fromkeys(("neighbors", "neighbours"), "Nearest neighbors, with their cosines"),
    "pca": "First three principal components of the patches, as colors",
    "attention": "Self-attention of the CLS token, head by head",
    "crops": "Crops that the network sees",
}
"""Titles, in the order of the page."""


def draw_run(run: RunFiles) -> str:
    facts = summarise(run)
    level, verdict = judge(run, facts["knn"])
    return render(
        "run.html",
        run=run,
        facts=facts,
        state=state_badge(facts),
        images=_images(run),
        level=level,
        verdict=verdict,
        bars_of_knn=_knn_bars(facts["knn"] or {}),
        alarms=_alarms(run),
        cards=_cards(facts, run.metrics),
        **_charts(run.metrics, run.recipe),
        pictures=_load_pictures(run),
        evaluations=_evaluations(run.evaluations),
        memory=_memory(run, facts),
        settings=changed_settings(run),
        incidents=_incidents(run),
        most_of_a_kind=MOST_OF_A_KIND,
        open_lines=_OPEN_LINES,
        environment=environment_rows(run),
        origin=reproduction(run),
    )


def state_badge(facts: dict[str, Any]) -> Tag:
    """The state of a run; how far it was where it has not reached its length."""
    state, step, planned = facts["state"], facts["step"], facts["planned_steps"]
    at = f" at {number(step)} of {number(planned)}" if planned and step < planned else ""
    return Tag(f"{_STATES[state]}{at}", f"state {state}")


def _images(run: RunFiles) -> str:
    """The images in words, such as "2,880 images of photos"."""
    count, place = run.events.fact("images", "images", int), run.events.fact("images", "place", str)
    if count is None or place is None:
        return "images whose number is not known"
    words = f"{count:,} images {'of' if run.recipe and place == run.recipe.data.source else 'in'} {place}"
    shares = {key.removeprefix(SHARE): run.metrics[key].y for key in find_shares(run.metrics.curves)}
    achieved = ", ".join(f"{name} {percent(100 * float(np.nanmean(part)))}" for name, part in shares.items())
    return words + (f" (drawn: {achieved})" if achieved else "")


def _knn_bars(knn: dict[str, float]) -> list[tuple[str, str, list[tuple[int, float]]]]:
    """Bars on one axis: the newest and the best teacher, each with its step, and what they are compared with."""
    names = {key: name for key, name in KNN_BASELINES.items() if key in knn}
    if "teacher" in knn:
        names["teacher"] = f"newest, step {knn['step']:,}"
    if knn.get("best") != knn.get("teacher"):
        names["best"] = f"best, step {knn['best_step']:,}"
    colors = {"teacher": 3, "best": 3}
    return [(name, percent(knn[key]), [(colors.get(key, 8), knn[key])]) for key, name in names.items()]


def _alarms(run: RunFiles) -> list[str]:
    """The newest line of each kind that is bad."""
    newest = {incident.kind: incident for incident in run.events.incidents if LEVELS[incident.kind] == "bad"}
    times = {kind: f", {number(n)} times" if n > 1 else "" for kind, n in run.events.counts.items()}
    return [f"{incident.line} ({incident.time}{times[kind]})" for kind, incident in newest.items()]


def _cards(facts: dict[str, Any], metrics: Metrics) -> list[tuple[str, str, str]]:
    """Title, figure and explanation of the figures of speed and memory."""
    of = f"of {number(facts['planned_steps'])}; " if facts["planned_steps"] else ""
    epochs = f", epoch {number(facts['epoch'])}" if facts["epoch"] is not None else ""
    wait, best = facts["data_wait_fraction"], facts["best"]
    waiting = "" if wait is None else f"{100 * wait:.0f} % of the time waiting for data"
    return [
        *([_best_card(best)] if best else []),
        ("steps", number(facts["step"]), f"{of}{number(facts['images'])} images{epochs}"),
        ("time in steps", duration(facts["training_seconds"]), "without evaluations and pauses"),
        ("loss", nats(facts["loss"]), _loss_parts(metrics)),
        ("images per second", number(facts["images_per_second"], 3), waiting),
        ("peak memory", gib(facts["memory_gib"]), f"predicted {gib(facts['memory_predicted_gib'])}"),
    ]


def _best_card(best: dict[str, Any]) -> tuple[str, str, str]:
    value, start = (number(best[key]) if isinstance(best[key], float) else "" for key in ("value", "start"))
    began = f", {start} at the start" if start else ""
    return f"best {best['metric']}", value, f"step {best['step']}{began}: best_teacher.safetensors"


def _loss_parts(metrics: Metrics) -> str:
    """The newest "entropy 2.10 + KL 0.61", or each of several terms by its name, unweighted."""
    parts = []
    for term in find_terms(metrics):
        values = {key: metrics[key].last for key in (term.loss, term.entropy, term.kl)}
        sums = f"entropy {nats(values[term.entropy])} + KL {nats(values[term.kl])}" if term.entropy else ""
        figure = nats(values[term.loss]) if sums else number(values[term.loss], 3)
        parts.append(" ".join(filter(None, [term.name, figure, sums and f"= {sums}"])) if term.name else sums)
    return "; ".join(parts)


def _charts(metrics: Metrics, recipe: Recipe | None) -> dict[str, Any]:
    """The charts in the order of the page; curves that never change are text."""
    terms = known_terms(recipe) if recipe else []
    prototypes = {term.name: head.prototypes for term in terms for head in term.heads.values()}
    small = [series for series in find_series([metrics]) if len(series.curve(metrics).finite)]
    drawn = [series for series in small if not series.curve(metrics).constant]
    return {
        "learning": [draw_chart(chart) for chart in (knn_chart(metrics), *loss_charts(metrics, prototypes))],
        "speed": [draw_chart(rolling_chart(series, metrics)) for series in LARGE[2:]],
        "others": [draw_chart(series.chart(metrics)) for series in drawn],
        "constants": [_constant(series, metrics) for series in small if series not in drawn],
    }


def _constant(series: Series, metrics: Metrics) -> str:
    unit = f" {series.unit}" if series.unit in ("s", "GiB", "nats") else ""
    title = series.title if series.title[1:2].isupper() else f"{series.title[0].lower()}{series.title[1:]}"
    return f"{title} {number(series.curve(metrics).last)}{unit}"


def _load_pictures(run: RunFiles) -> dict[str, Any]:
    """Pictures of the folder itself, the map first, then of its folders (training steps), six of a kind at most."""
    folder, order = run.path / "pictures", list(_PICTURES)
    # The page draws curves itself, from all lines of metrics.jsonl.
    own = [path for path in run.pictures if path.parent == folder and path.stem != "curves"]
    own.sort(key=lambda path: order.index(path.stem) if path.stem in order else len(order))
    strips: dict[str, list[Path]] = {}
    for path in run.pictures:
        if path.parent != folder:
            strips.setdefault(path.stem, []).append(path)
    return {
        "folder": folder,
        "own": [_picture(path, _PICTURES.get(path.stem, path.stem), _WIDTH) for path in own[:_MOST]],
        "left_out": max(0, len(own) - _MOST),
        "strips": [
            {
                "title": _PICTURES.get(kind, kind),
                "count": len(paths),
                "shown": [_picture(path, _step_of(path, folder), _STRIP_WIDTH) for path in _spread(paths)],
            }
            for kind, paths in list(strips.items())[:_MOST]
        ],
    }


def _step_of(path: Path, folder: Path) -> str:
    """The name of its folder: "step_00000500" -> "step 500"."""
    name = str(path.parent.relative_to(folder))
    word, _, digits = name.rpartition("_")
    return f"{word} {int(digits):,}" if word and digits.isascii() and digits.isdigit() else name


def _spread(paths: list[Path]) -> list[Path]:
    chosen = np.unique(np.linspace(0, len(paths) - 1, min(len(paths), _MOST_IN_STRIP)).round().astype(int))
    return [paths[i] for i in chosen]


def _picture(path: Path, caption: str, width: int) -> dict[str, Any]:
    """Embed one file; one that can't be read has an `error` instead."""
    try:
        address, (wide, high) = embedded_file(path, width)
    except (OSError, ValueError) as error:
        return {"error": f"{path.name} can't be shown: {getattr(error, 'strerror', None) or error}"}
    is_wide = width == _WIDTH and wide > _WIDE_FROM * high
    return {"error": "", "caption": caption, "address": address, "width": wide, "height": high, "wide": is_wide}


def _evaluations(evaluations: Sequence[Evaluation]) -> dict[str, Any] | None:
    """The table, without columns that would be empty; what is known of an evaluation is in its first row."""
    if not evaluations:
        return None
    header = ("evaluation", "figure", "value", "step", "images", "made")
    rows: list[tuple[str, ...]] = []
    for evaluation in evaluations:
        for i, (metric, value) in enumerate(evaluation.results.items()):
            name, *rest = (evaluation.name, *_about(evaluation.about)) if i == 0 else ("",) * 4
            rows.append((name, metric, number(value), *rest))
    filled = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return {
        "header": [header[i] for i in filled],
        "rows": [[row[i] for i in filled] for row in rows],
        "numbers": [column for column, i in enumerate(filled) if header[i] in ("value", "step")],
    }


def _about(about: dict[str, Any]) -> tuple[str, str, str]:
    """Step and images of an evaluation, and when it was made."""
    names = {"train_images": "training", "test_images": "test"}
    numbers = {key: value for key, value in about.items() if isinstance(value, float)}
    images = [about["data"]] if isinstance(about.get("data"), str) else []
    images += [f"{number(about[key])} {name}" for key, name in names.items() if key in numbers]
    made = [str(about["date"])] if "date" in about else []
    made += [duration(numbers["seconds"])] if "seconds" in numbers else []
    return number(numbers["step"]) if "step" in numbers else "", ", ".join(images), ", ".join(made)


def _memory(run: RunFiles, facts: dict[str, Any]) -> dict[str, Any] | None:
    """Bars of predicted and measured memory, and a key of the predicted parts."""
    measured, predicted = facts["memory_gib"], facts["memory_predicted_gib"]
    if not measured or not predicted:
        return None
    parts = (run.events.fact("memory", "parts", dict) or {}).items()
    sizes = [(size, name) for name, size in parts if isinstance(size, float)]
    shown = sorted((part for part in sizes if 0.01 * predicted <= part[0] <= predicted), reverse=True)
    rest = predicted - sum(size for size, _ in shown)
    colored = [(i % 6 + 2, name, size) for i, (size, name) in enumerate(shown)]
    colored += [(8, "the rest", rest)] if shown and rest > 0.005 * predicted else []
    plan = [(color, size) for color, _, size in colored] or [(2, predicted)]
    return {
        "bars": [("predicted", gib(predicted), plan), ("measured", gib(measured), [(1, measured)])],
        "most": max(measured, predicted),
        "parts": colored,
        "moment": run.events.fact("memory", "moment", str),
        "percent": None if run.environment.get("devices") == "cpu" else f"{100 * measured / predicted:.0f}",
    }


def _incidents(run: RunFiles) -> dict[str, Any]:
    events = run.events
    return {
        "header": ("UTC", "", ""),
        "rows": [(one.time, Tag(one.kind, f"incident {LEVELS[one.kind]}"), one.line) for one in events.incidents],
        "counts": "; ".join(f"{name} {number(count)}" for name, count in events.counts.items()),
        "most": max(events.counts.values(), default=0),
    }

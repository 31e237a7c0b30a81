"""The page about one run: what the template run.html shows."""

from __future__ import annotations

from collections.abc import Sequence
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
    knn_chart,
    loss_charts,
    rolling_chart,
)
from dino_ds.report.curves import Metrics
from dino_ds.report.folder import Evaluation, RunFiles
from dino_ds.report.found_pictures import load_pictures
from dino_ds.report.html import Tag, render
from dino_ds.report.log import MOST_OF_A_KIND
from dino_ds.report.origin import changed_settings, environment_rows, reproduction
from dino_ds.report.summary import summarise
from dino_ds.report.svg import draw_chart
from dino_ds.report.terms import find_terms
from dino_ds.report.text import duration, gib, nats, number, percent

_STATES = {
    "finished": "finished",
    "stopped": "stopped",
    "failed": "ended by an error",
    "running": "still running",
    "unfinished": "not finished",
}
_OPEN_LINES = 12


def draw_run(run: RunFiles) -> str:
    facts = summarise(run)
    return render(
        "run.html",
        run=run,
        facts=facts,
        state=state_badge(facts),
        images=_images(run),
        cards=_cards(facts, run.metrics),
        baselines=_baselines(facts["knn"] or {}),
        alarms=_alarms(run),
        **_curves(run.metrics, run.recipe),
        evaluations=_evaluations(run.evaluations),
        pictures=load_pictures(run),
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


def _cards(facts: dict[str, Any], metrics: Metrics) -> list[tuple[str, str, str]]:
    """Title, figure and explanation of the figures at the top."""
    of = f"of {number(facts['planned_steps'])}; " if facts["planned_steps"] else ""
    epochs = f", epoch {number(facts['epoch'])}" if facts["epoch"] is not None else ""
    wait = facts["data_wait_fraction"]
    waiting = "" if wait is None else f"{100 * wait:.0f} % of the time waiting for data"
    best = facts["best"]
    return [
        *([_best_card(best)] if best else []),
        ("steps", number(facts["step"]), f"{of}{number(facts['images'])} images{epochs}"),
        ("time in steps", duration(facts["training_seconds"]), "without evaluations and pauses"),
        ("loss, nats", nats(facts["loss"]), _loss_parts(metrics)),
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


def _images(run: RunFiles) -> str:
    """The images in words, such as "2,880 images of photos"."""
    count, _, place = run.log.facts.get("images", "").partition(";")[0].partition(" in ")
    if not count.isdecimal():
        return "images that log.txt does not name"
    words = f"{int(count):,} images {'of' if run.recipe and place == run.recipe.data.source else 'in'} {place}"
    shares = {key.removeprefix(SHARE): run.metrics[key].y for key in find_shares(run.metrics.curves)}
    achieved = ", ".join(f"{name} {percent(100 * float(np.nanmean(part)))}" for name, part in shares.items())
    return words + (f" (drawn: {achieved})" if achieved else "")


def _baselines(knn: dict[str, float]) -> list[tuple[str, str, list[tuple[int, float]]]]:
    """Bars on one axis: the newest and the best teacher, and what they are compared with."""
    names = {"teacher": "teacher", "best": "best teacher", **KNN_BASELINES}
    shown = [key for key in names if key in knn and not (key == "best" and knn[key] == knn.get("teacher"))]
    return [(names[key], percent(knn[key]), [(3 if "teacher" in names[key] else 8, knn[key])]) for key in shown]


def _alarms(run: RunFiles) -> list[str]:
    """The newest line of each kind that is bad."""
    newest = {found.kind.name: found for found in run.log.incidents if found.kind.level == "bad"}
    lines = []
    for name, found in newest.items():
        count = run.log.counts[name]
        about = [f"{found.time} UTC"] if found.time else []
        about += [f"{number(count)} times"] if count > 1 else []
        lines.append(f"{found.line} ({', '.join(about)})" if about else found.line)
    return lines


def _curves(metrics: Metrics, recipe: Recipe | None) -> dict[str, Any]:
    """Large and small charts; curves that never change are text."""
    prototypes = _prototypes(recipe) if recipe else {}
    large = [*loss_charts(metrics, prototypes), knn_chart(metrics), *(rolling_chart(one, metrics) for one in LARGE[2:])]
    small = [series for series in find_series([metrics]) if len(series.curve(metrics).finite)]
    drawn = [series for series in small if not series.curve(metrics).constant]
    return {
        "large_charts": [draw_chart(chart) for chart in large],
        "small_charts": [draw_chart(series.chart(metrics)) for series in drawn],
        "constants": [_constant(series, metrics) for series in small if series not in drawn],
    }


def _prototypes(recipe: Recipe) -> dict[str, int]:
    """The prototypes of each term that has targets over them, by its name."""
    return {term.name: head.prototypes for term in known_terms(recipe) for head in term.heads.values()}


def _constant(series: Series, metrics: Metrics) -> str:
    unit = f" {series.unit}" if series.unit in ("s", "GiB", "nats") else ""
    title = series.title if series.title[1:2].isupper() else f"{series.title[0].lower()}{series.title[1:]}"
    return f"{title} {number(series.curve(metrics).last)}{unit}"


def _evaluations(found: Sequence[Evaluation]) -> dict[str, Any] | None:
    """The table, without columns that would be empty; what is known of an evaluation is in its first row."""
    if not found:
        return None
    header = ("evaluation", "figure", "value", "step", "images", "made")
    rows: list[tuple[str, ...]] = []
    for evaluation in found:
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
    parts = dict(sorted(run.log.memory_parts.items(), key=lambda part: -part[1]))
    rest = predicted - sum(parts.values())
    if parts and rest > 0.005 * predicted:
        parts["the rest"] = rest
    colored = [(8 if name == "the rest" else i % 6 + 2, name, size) for i, (name, size) in enumerate(parts.items())]
    plan = [(color, size) for color, _, size in colored] or [(2, predicted)]
    return {
        "bars": [("predicted", gib(predicted), plan), ("measured", gib(measured), [(1, measured)])],
        "most": max(measured, predicted),
        "parts": colored,
        "percent": None if run.environment.get("devices") == "cpu" else f"{100 * measured / predicted:.0f}",
    }


def _incidents(run: RunFiles) -> dict[str, Any]:
    found = run.log.incidents
    return {
        "header": ("UTC", "", ""),
        "rows": [(one.time, Tag(one.kind.name, f"incident {one.kind.level}"), one.line) for one in found],
        "counts": "; ".join(f"{name} {number(count)}" for name, count in run.log.counts.items()),
        "most": max(run.log.counts.values(), default=0),
    }

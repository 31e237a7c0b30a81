"""The page about several runs: figures, curves, evaluations and settings side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup

from dino_ds.report.curves import colour_of, draw_together
from dino_ds.report.folder import RunFiles
from dino_ds.report.html import Piece, join, note, section, table
from dino_ds.report.one import PERCENT, bars, state_badge
from dino_ds.report.origin import show_plain
from dino_ds.report.summary import summarise
from dino_ds.report.text import duration, gib, nats, number, percent

_EVALUATED_ON = (
    *("data.source", "data.root", "crops.global_size"),
    *("eval.root", "eval.k", "eval.temperature", "eval.bank_images", "eval.test_images"),
)
"""What an accuracy depends on besides the network: where it differs accuracies can't be compared."""
_NOT_COMPARABLE = "Accuracies are of different images or settings ({}): compare each with its own baselines."
_NO_BEST = ("_train", "regularisation", "feature_std", "uniformity", "alignment", "rankme")
"""Ends of names of figures that are not better for being higher."""


def names_of(runs: Sequence[RunFiles]) -> list[str]:
    """The folders' names, with as much of the path before them as tells them apart."""
    parts = [run.path.resolve().parts for run in runs]
    length = 1
    while len({path[-length:] for path in parts}) < len(parts):
        length += 1
    return ["/".join(path[-length:]) for path in parts]


def draw_comparison(runs: Sequence[RunFiles]) -> Markup:
    names = names_of(runs)
    facts = [summarise(run) for run in runs]
    key = Markup('<span class="key c{}">{}</span>')
    keys = [key.format(colour_of(i), name) for i, name in enumerate(names)]
    settings = [run.settings for run in runs]
    other = [key for key in _EVALUATED_ON if len({_shown(one, key) for one in settings}) > 1]
    notes = [f"{name}: {text}" for name, run in zip(names, runs, strict=True) for text in run.notes]
    return join(
        [
            Markup("<h1>{} runs side by side</h1>").format(len(runs)),
            _figures(facts, keys, mark=not other),
            note(_NOT_COMPARABLE.format(", ".join(other))) if other else "",
            join(note(text) for text in notes),
            section("Curves", draw_together(runs, names)),
            section("Evaluations", _evaluations(runs, keys)),
            section("Throughput and memory", _speed(facts, names)),
            section("What differs between them", _differences(settings, keys)),
        ]
    )


def _figures(facts: Sequence[dict[str, Any]], keys: Sequence[Markup], mark: bool) -> Markup:
    """A row a figure, a column a run. mark: the best accuracy; losses of other recipes mean other things."""

    def row(name: str, show: Callable[[dict[str, Any]], Piece]) -> list[Piece]:
        return [name, *map(show, facts)]

    def knn(name: str, key: str) -> list[Piece]:
        values = [(one["knn"] or {}).get(key) for one in facts]
        return [name, *(_marked(values, percent) if mark else map(percent, values))]

    rows = [
        row("state", lambda one: state_badge(one["state"])),
        row("trained", lambda one: one["trained"]),
        row("steps", lambda one: number(one["step"])),
        row("images", lambda one: number(one["images"])),
        row("time in steps", lambda one: duration(one["training_seconds"])),
        row("loss, nats", lambda one: nats(one["loss"])),
        row("= teacher entropy + KL", lambda one: f"{nats(one['teacher_entropy'])} + {nats(one['kl'])}"),
        knn("k-NN top-1", "teacher"),
        knn("best k-NN top-1", "best"),
        row("untrained / raw pixels / chance", lambda one: _baselines(one["knn"] or {})),
        row("images per second", lambda one: number(one["images_per_second"], 3)),
        row("waiting for data", lambda one: _part(one["data_wait_fraction"])),
        row("peak memory", lambda one: gib(one["memory_gib"])),
        row("predicted peak memory", lambda one: gib(one["memory_predicted_gib"])),
        row("skipped steps", lambda one: number(one["skipped_steps"])),
        row("unreadable images", lambda one: number(one["bad_images"])),
        row("incidents", lambda one: _listed(one["incidents"])),
        row("folder", lambda one: one["run"]),
    ]
    return table(["", *keys], rows)


def _part(fraction: float | None) -> str:
    return percent(None if fraction is None else 100 * fraction)


def _baselines(knn: dict[str, float]) -> str:
    return " / ".join(percent(knn.get(key)) for key in ("untrained", "raw_pixels", "chance"))


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{kind} {number(count)}" for kind, count in counts.items()) or "none"


def _marked(values: Sequence[float | None], show: Callable[[float | None], str]) -> list[Piece]:
    """The largest is marked, where there are others to compare with."""
    known = {value for value in values if value is not None}
    best = max(known) if len(known) > 1 else None
    marked = Markup('<span class="best">{}</span>')
    return [marked.format(show(value)) if value is not None and value == best else show(value) for value in values]


def _evaluations(runs: Sequence[RunFiles], keys: Sequence[Markup]) -> Markup:
    """Of earlier files, which do not name the evaluation, a figure joins that of the same name."""
    found: dict[str, list[float | None]] = {}
    groups: dict[str, str] = {}
    for i, run in enumerate(runs):
        for evaluation in run.evaluations:
            for metric, value in evaluation.results.items():
                found.setdefault(metric, [None] * len(runs))[i] = value
                groups[metric] = groups.get(metric) or evaluation.name
    if not found:
        return note("There are none yet: dino-ds eval RUN makes them.")
    rows: list[list[Piece]] = []
    for metric, values in found.items():
        judged = not metric.endswith(_NO_BEST)
        rows.append([groups[metric], metric, *(_marked(values, number) if judged else map(number, values))])
    rows.append(["", "step of the teacher", *map(_step, runs)])
    about = note(f"{PERCENT} The best of a row is marked where more is better.")
    return table(["evaluation", "figure", *keys], rows, range(2, 2 + len(runs))) + about


def _step(run: RunFiles) -> str:
    steps = {e.about["step"] for e in run.evaluations if isinstance(e.about.get("step"), float)}
    return ", ".join(map(number, sorted(steps))) or "–"


def _speed(facts: Sequence[dict[str, Any]], names: Sequence[str]) -> Markup:
    parts = []
    for title, key, show in (
        ("Images per second, mean of all steps", "images_per_second", lambda value: number(value, 3)),
        ("Peak memory of a process", "memory_gib", gib),
    ):
        values = [(i, one[key]) for i, one in enumerate(facts) if one[key]]
        if values:
            rows = [(names[i], show(value), [(colour_of(i), value)]) for i, value in values]
            parts.append(Markup("<h3>{}</h3>{}").format(title, bars(rows, max(value for _, value in values))))
    return join(parts) if parts else note("No run has written its throughput.")


def _differences(settings: Sequence[dict[str, Any]], keys: Sequence[Markup]) -> Markup:
    rows: list[list[Piece]] = []
    for key in dict.fromkeys(key for one in settings for key in one):
        values = [_shown(one, key) for one in settings]
        if len(set(values)) > 1:
            rows.append([Markup("<code>{}</code>").format(key), *values])
    if not rows:
        return note("Nothing: the same recipe, ds config, versions and machine.")
    return table(["key", *keys], rows)


def _shown(settings: dict[str, Any], key: str) -> str:
    return show_plain(settings[key]) if key in settings else "–"

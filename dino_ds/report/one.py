"""The page about one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from dino_ds.report.curves import draw_run
from dino_ds.report.folder import Evaluation, RunFiles
from dino_ds.report.html import Piece, folded, join, note, section, table
from dino_ds.report.log import MOST_OF_A_KIND
from dino_ds.report.origin import show_environment, show_recipe, show_reproduction
from dino_ds.report.pictures import show_pictures
from dino_ds.report.summary import summarise
from dino_ds.report.text import duration, gib, nats, number, percent

_STATES = {
    "finished": "finished",
    "stopped": "stopped on request",
    "failed": "ended by an error",
    "running": "still running",
    "unfinished": "not finished",
}
_BASELINES = {"teacher": "teacher", "untrained": "untrained network", "raw_pixels": "raw pixels", "chance": "chance"}
_OPEN_LINES = 12


def draw_one(run: RunFiles) -> Markup:
    facts = summarise(run)
    return join(
        [
            _headline(run, facts),
            section("Curves", draw_run(run)),
            section("Evaluations", _evaluations(run.evaluations)),
            section("Pictures", show_pictures(run)),
            section("Memory against plan", _memory(run, facts)),
            section("Recipe", show_recipe(run)),
            section("Incidents", _incidents(run)),
            section("Checkpoints", _checkpoints(run)),
            section("Environment", show_environment(run)),
            section("How to reproduce", show_reproduction(run)),
        ]
    )


def state_badge(state: str) -> Markup:
    return Markup('<span class="state {}">{}</span>').format(state, _STATES[state])


def bars(rows: Sequence[tuple[str, str, Sequence[tuple[int, float]]]], most: float) -> Markup:
    """Rows of (name, figure, parts of the bar as (colour, length)); `most` is as long as a bar gets."""
    part = Markup('<i style="width:{:.2f}%;background:var(--c{})"></i>')
    row = Markup("<span>{}</span><div>{}</div><b>{}</b>")
    drawn = (
        row.format(name, join(part.format(100 * value / most, colour) for colour, value in parts), text)
        for name, text, parts in rows
    )
    return Markup('<div class="bars">{}</div>\n').format(join(drawn))


def _headline(run: RunFiles, facts: dict[str, Any]) -> Markup:
    """What was trained, how long, and what came of it."""
    of = f"of {number(facts['planned_steps'])}; " if facts["planned_steps"] else ""
    epochs = f", epoch {number(facts['epoch'])}" if facts["epoch"] is not None else ""
    wait = facts["data_wait_fraction"]
    parts = "" if facts["kl"] is None else f"entropy {nats(facts['teacher_entropy'])} + KL {nats(facts['kl'])}"
    waiting = "" if wait is None else f"{100 * wait:.0f} % of the time waiting for data"
    plan = f"predicted {gib(facts['memory_predicted_gib'])}"
    cards = [
        ("steps", number(facts["step"]), f"{of}{number(facts['images'])} images{epochs}"),
        ("time in steps", duration(facts["training_seconds"]), "evaluations and pauses left out"),
        ("loss, nats", nats(facts["loss"]), parts),
        ("images per second", number(facts["images_per_second"], 3), waiting),
        ("peak memory", gib(facts["memory_gib"]), plan),
    ]
    card = Markup('<div class="card"><span>{}</span><b>{}</b><small>{}</small></div>')
    return join(
        [
            Markup("<h1>{} {}</h1>").format(run.name, state_badge(run.state)),
            Markup('<p class="lead">{}; trained on {}.</p>\n').format(facts["trained"], _images(run)),
            Markup('<div class="cards">{}</div>\n').format(join(card.format(*words) for words in cards)),
            _knn(facts["knn"]),
            _alarm(run),
            join(note(text) for text in run.notes),
        ]
    )


def _images(run: RunFiles) -> str:
    """Such as "2,880 images of photos"."""
    count, _, place = run.log.facts.get("images", "").partition(";")[0].partition(" in ")
    if not count.isdecimal():
        return "images that log.txt does not name"
    return f"{int(count):,} images {'of' if run.recipe and place == run.recipe.data.source else 'in'} {place}"


def _knn(found: dict[str, Any] | None) -> Markup:
    if found is None:
        return note("No k-NN accuracy yet: the run has not evaluated its teacher.")
    rows = [
        (name, percent(found[key]), [(3 if key == "teacher" else 8, found[key])])
        for key, name in _BASELINES.items()
        if key in found
    ]
    better = f"; best {percent(found['best'])} at step {number(found['best_step'])}"
    best = "" if found["best"] == found.get("teacher") else better
    return Markup("<h3>k-NN top-1 of the teacher's features{}</h3>{}").format(best, bars(rows, 100))


def _alarm(run: RunFiles) -> Markup:
    """The newest line of each kind that is bad."""
    newest = {found.kind.name: found for found in run.log.incidents if found.kind.level == "bad"}
    lines = []
    for name, found in newest.items():
        count = run.log.counts[name]
        about = [f"{found.time} UTC"] if found.time else []
        about += [f"{number(count)} times"] if count > 1 else []
        lines.append(f"{found.line} ({', '.join(about)})" if about else found.line)
    return join(Markup('<p class="incident bad">{}</p>\n').format(line) for line in lines)


def _evaluations(found: Sequence[Evaluation]) -> Markup:
    if not found:
        return note("There are none yet: dino-ds eval RUN makes them (k-NN while training is among the curves).")
    rows: list[tuple[str, ...]] = []
    for evaluation in found:
        about: tuple[str, ...] = (evaluation.name, *_about(evaluation.about))
        for metric, value in evaluation.results.items():
            name, *rest = about
            rows.append((name, metric, number(value), *rest))
            about = ("",) * len(about)
    header = ("evaluation", "figure", "value", "step", "images", "made")
    filled = [i for i in range(len(header)) if any(row[i] for row in rows)]
    shown = [[row[i] for i in filled] for row in rows]
    numbers = [column for column, i in enumerate(filled) if header[i] in ("value", "step")]
    return table([header[i] for i in filled], shown, numbers) + note(PERCENT)


PERCENT = "Accuracies and mean average precisions are percent."


def _about(about: dict[str, Any]) -> tuple[str, str, str]:
    """Step, images, and when it was made."""
    names = {"train_images": "training", "test_images": "test"}
    numbers = {key: value for key, value in about.items() if isinstance(value, float)}
    images = [about["data"]] if isinstance(about.get("data"), str) else []
    images += [f"{number(about[key])} {name}" for key, name in names.items() if key in numbers]
    made = [str(about["date"])] if "date" in about else []
    made += [duration(numbers["seconds"])] if "seconds" in numbers else []
    return number(numbers["step"]) if "step" in numbers else "", ", ".join(images), ", ".join(made)


def _memory(run: RunFiles, facts: dict[str, Any]) -> Markup:
    measured, predicted = facts["memory_gib"], facts["memory_predicted_gib"]
    if not measured or not predicted:
        return note("The run has not written how much memory it took.")
    parts = dict(sorted(run.log.memory_parts.items(), key=lambda part: -part[1]))
    rest = predicted - sum(parts.values())
    if parts and rest > 0.005 * predicted:
        parts["the rest"] = rest
    colours = {name: 8 if name == "the rest" else i % 6 + 2 for i, name in enumerate(parts)}
    plan = [(colours[name], size) for name, size in parts.items()] or [(2, predicted)]
    rows = [("predicted", gib(predicted), plan), ("measured", gib(measured), [(1, measured)])]
    key = Markup('<span class="key c{}">{} <i>{}</i></span>')
    on_cpu = run.environment.get("devices") == "cpu"
    kind = "resident set with libraries and evaluations" if on_cpu else "tensors on the device, by torch's allocator"
    moment = f" The plan's fullest moment is {run.log.memory_moment}." if run.log.memory_moment else ""
    text = f"Measured is {100 * measured / predicted:.0f} % of the plan: the peak of rank 0 ({kind}).{moment}"
    return join(
        [
            bars(rows, max(measured, predicted)),
            Markup('<div class="legend">{}</div><p>{}</p>').format(
                join(key.format(colours[name], name, gib(size)) for name, size in parts.items()), text
            ),
        ]
    )


def _incidents(run: RunFiles) -> Markup:
    log = run.log
    more_in = note(f"More of them in {', '.join(run.traces)}.") if run.traces else Markup()
    if not log.incidents:
        return note("The log tells of none: no alarm, no resume, no unreadable image.") + more_in
    counts = "; ".join(f"{name} {number(count)}" for name, count in log.counts.items())
    label = Markup('<span class="incident {}">{}</span>')
    timed = any(incident.time for incident in log.incidents)
    rows: list[list[Piece]] = [
        [*([found.time] if timed else []), label.format(found.kind.level, found.kind.name), found.line]
        for found in log.incidents
    ]
    header = ("UTC", "", "") if timed else ()
    more = f", at most {MOST_OF_A_KIND} of a kind" if max(log.counts.values()) > MOST_OF_A_KIND else ""
    lines = folded(f"The lines of log.txt{more}", table(header, rows), is_open=len(rows) <= _OPEN_LINES)
    return Markup("<p>{}.</p>{}{}").format(counts, lines, more_in)


def _checkpoints(run: RunFiles) -> Markup:
    if not run.checkpoints:
        return note("There are none in the folder.")
    sizes = ", ".join(f"step {number(step)} ({gib(size)})" for step, size in run.checkpoints.items())
    every = run.log.facts.get("saves")
    return Markup("<p>{}.</p>{}").format(sizes, note(f"Saves: {every}.") if every else "")

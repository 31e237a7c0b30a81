"""Reads a run folder; a part that is missing or broken becomes a note, not an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from dino_ds.basics.files import read_lines, read_object, read_text
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import Origin, load_run_recipe, near_run
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.evals.tracking import RESULTS
from dino_ds.health.processes import RunLock
from dino_ds.method.specs.own import known_terms, teachers_of, terms_of
from dino_ds.report.html import Metrics, curves_before, read_metrics

T = TypeVar("T")
MOST_OF_A_KIND = 50
LEVELS = {
    **dict.fromkeys(("collapse", "not finite", "hang", "error", "save failed"), "bad"),
    **dict.fromkeys(("warning", "slow", "overflow", "unreadable image", "stopped"), "odd"),
    **dict.fromkeys(("resumed", "note", "evals"), "plain"),
}  # kinds of events that are incidents, and how bad they are
_ENDS = {"done": "finished", "ended": "ended", "stopped": "stopped", "error": "failed", "hang": "failed", "images": ""}
"""How a run has ended after the last event of these kinds; "" if it goes on."""


@dataclass
class Events:
    """The events of a run.

    Attributes:
        newest: the last event of each kind.
        ended: finished, ended (by eval.stop_after), stopped, failed or "".
        incidents: in the order of the file, at most 50 of a kind.
        counts: number of all incidents by kind.
        resumed: the steps at which the run was resumed.
    """

    newest: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: str = ""
    incidents: list[tuple[str, str, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)

    def fact(self, kind: str, name: str, of: type[T]) -> T | None:
        """A fact of the newest event of a kind, or None if it is missing or of another type."""
        value = self.newest.get(kind, {}).get(name)
        return value if isinstance(value, of) else None


@dataclass
class RunFiles:
    """One run folder.

    Attributes:
        best: metric, value, start and step of the best teacher, {} without one.
        state: finished, stopped (before its length), failed, running or unfinished.
        notes: missing and broken parts of the folder.
    """

    path: Path
    name: str
    metrics: Metrics
    events: Events
    recipe: Recipe | None = None
    recipe_text: str = ""
    ds: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    pictures: list[Path] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)
    state: str = "unfinished"
    notes: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The last step with metrics."""
        return int(max(curve.x[-1] for curve in self.metrics.curves.values()))

    @property
    def planned_steps(self) -> int | None:
        """Steps of the recipe's length, None if unknown; a start with --max_steps may end before."""
        if steps := self.events.fact("length", "steps", int):
            return steps
        if self.recipe is None or self.recipe.length.unit == "epochs":
            return None
        return self.recipe.length.in_steps(self.recipe.data.global_batch, 0)


def read_run(path: Path) -> RunFiles:
    """Read a run folder. Raises ConfigError if there is no run, or if the run has not written metrics yet."""
    if not path.is_dir():
        reason = "it is a file" if path.exists() else f"it does not exist{near_run(path)}"
        raise ConfigError(f"{path} is not a run folder: {reason}")
    if not (path / "config.yaml").exists() and not (path / "metrics.jsonl").exists():
        runs = sorted(str(run.parent) for run in path.glob("*/config.yaml"))
        inside = f"; are its runs meant? {', '.join(runs[:3])}{', ...' if len(runs) > 3 else ''}" if runs else ""
        raise ConfigError(f"{path} is not a run folder: it holds neither config.yaml nor metrics.jsonl{inside}")
    notes: list[str] = []
    metrics = _read(notes, path / "metrics.jsonl", read_metrics, Metrics({}, 0, 0), "no metrics")
    if not metrics.lines:
        why = notes[0] if (path / "metrics.jsonl").exists() and notes else f"{path} holds no metrics yet"
        if metrics.broken:
            why = f"{path / 'metrics.jsonl'} is damaged: all of its {metrics.broken} lines are broken"
        raise ConfigError(f"{why}: there is nothing to report before the first line of a run")
    if metrics.broken:
        notes.append(f"metrics.jsonl: {metrics.broken} broken lines were left out")
    events = _read(notes, path / "events.jsonl", read_events, Events(), "what happened when is not known")
    run = RunFiles(path, path.resolve().name, metrics, events, notes=notes)
    run.ds = _read(notes, path / "ds_config.json", read_object, {}, "the ds config is not known")
    run.environment = _read(notes, path / "environment.json", read_object, {}, "machine and versions are not known")
    _read_recipe(run)
    run.evaluations = _evaluations(path, notes)
    run.pictures = sorted(file for file in (path / "pictures").rglob("*.png") if file.is_file())
    if (file := path / "best_teacher.json").is_file():
        about: dict[str, Any] = _read(notes, file, read_object, {}, "the best teacher is not shown")
        if isinstance(best := about.get("best"), dict):
            run.best = {key: best.get(key) for key in ("metric", "value", "start")} | {"step": about.get("step")}
    run.state = _state(run)
    marks = dict[str, list[int]]()
    if resumed := events.resumed:
        times = f", the last of {len(resumed)} times" if len(resumed) > 1 else ""
        marks[f"resumed at step {resumed[-1]:,}{times}"] = resumed
    if origin := Origin.read(path):
        before = curves_before(origin)
        run.metrics = replace(run.metrics, first_step=origin.first_step, before=before)
        marks |= {f"stage begun at {origin.run}'s step {origin.step:,}": [origin.first_step]} if before else {}
    run.metrics = replace(run.metrics, marks=marks)
    return run


def _read(notes: list[str], path: Path, read: Callable[[Path], T], otherwise: T, so: str) -> T:
    if not path.exists():
        notes.append(f"there is no {path.name}: {so}")
        return otherwise
    try:
        return read(path)
    except ConfigError as error:
        notes.append(f"{error}: {so}")
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)
        notes.append(f"{path.name} can't be read ({reason}): {so}")
    return otherwise


def read_events(path: Path) -> Events:
    """Read the events of a run without broken lines. Raises OSError, and ConfigError for another kind of file."""
    events = Events()
    for raw in read_lines(path):
        try:
            event = json.loads(raw)
            kind, time, line = (str(event[key]) for key in ("kind", "time", "line"))
        except (ValueError, TypeError, KeyError, RecursionError):
            continue  # most often the line that was being written when the process ended
        events.newest[kind] = {**event, "line": line}
        if kind == "resumed" and isinstance(step := event.get("step"), int) and step:
            events.resumed.append(step)
        events.ended = _ENDS.get(kind, events.ended)
        if kind in LEVELS:
            events.counts[kind] = events.counts.get(kind, 0) + 1
            if events.counts[kind] <= MOST_OF_A_KIND:
                events.incidents.append((kind, time, line))
    return events


def _read_recipe(run: RunFiles) -> None:
    path, unknown = run.path / "config.yaml", "the recipe is not known"
    run.recipe_text = _read(run.notes, path, lambda p: read_text(str(p), "a recipe"), "", unknown)
    if run.recipe_text:
        try:
            recipe = run.recipe = load_run_recipe(run.path)
            began = recipe.model.init_from is not None or recipe.stage_start is not None
            titles = {term.name: term.title for term in known_terms(recipe)}
            run.metrics = replace(run.metrics, titles=titles, began_with_weights=began)
            unknown = "titles and weights are not known"
            terms_of(recipe), teachers_of(recipe)
        except (ConfigError, CheckpointError) as error:
            run.notes.append(f"{unknown}: {str(error).splitlines()[0]}")


def _evaluations(path: Path, notes: list[str]) -> dict[str, dict[str, Any]]:
    """The run's evaluations of a file that holds {name: {"results": {metric: value}, "step": ..., ...}}."""
    file, evaluations, content = path / RESULTS, dict[str, dict[str, Any]](), dict[str, Any]()
    if file.exists():
        content = _read(notes, file, read_object, {}, "no evaluations are shown")
    for name, entry in content.items():
        if isinstance(entry, dict) and isinstance(entry.get("results"), dict):
            about = {key: value for key, value in entry.items() if isinstance(value, str)} | _numbers(entry)
            if results := _numbers(entry["results"]):
                evaluations[name] = {**about, "results": results}
    return evaluations


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e100
    }


def _state(run: RunFiles) -> str:
    if run.events.ended:
        is_cut = run.events.ended == "finished" and run.step < (run.planned_steps or 0)
        return "stopped" if is_cut else "finished" if run.events.ended == "ended" else run.events.ended
    try:
        RunLock(run.path).check_free(0)
    except ConfigError:
        return "running"
    return "unfinished"

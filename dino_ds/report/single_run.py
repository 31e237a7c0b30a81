"""`dino-ds report`: the page about one run, which the template run.html shows, as one HTML file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from dino_ds import __version__
from dino_ds.basics.files import check_absent, replace_file, why_not_writable
from dino_ds.basics.formatting import duration, gib, nats, number, percent
from dino_ds.errors import ConfigError
from dino_ds.options.commands import ReportOptions
from dino_ds.options.definition import Result
from dino_ds.report.charts import LARGE, SHARE, Metrics, find_series, find_shares, knn_chart, loss_chart
from dino_ds.report.folder import LEVELS, MOST_OF_A_KIND, Evaluation, RunFiles, read_run
from dino_ds.report.html import Tag, build_document, draw_chart, embedded_file, render
from dino_ds.report.summary import changed_settings, environment_rows, make_finding, reproduction, summarize

_STATES = {
    "finished": "finished",
    "stopped": "stopped",
    "failed": "ended by an error",
    "running": "still running",
    "unfinished": "not finished",
}
_OPEN_LINES = 12
_WIDTH = 1000
"""Largest width of embedded pictures, in pixels."""
_MOST = 12
_WIDE_FROM = 2.2
"""Pictures that are wider than their height times this span both columns."""
_PICTURES = {
    "map": "Map of images: those whose features are alike lie together",
    "neighbors": "Nearest neighbors of six images, with the cosines of their features",
    "pca": "Patches, colored by the first three principal components of their features",
    "attention": "Attention of the CLS token, head by head",
}
"""Titles of the kinds of pictures, in the order of the page; the first two kinds are not folded."""
_OPEN = ("map", "neighbors")


def draw_run(run: RunFiles) -> str:
    facts = summarize(run)
    level, verdict = make_finding(run, facts["knn"])
    step, planned = facts["step"], facts["planned_steps"]
    at = f" at {number(step)} of {number(planned)}" if planned and step < planned else ""
    return render(
        "run.html",
        run=run,
        facts=facts,
        state=Tag(f"{_STATES[facts['state']]}{at}", f"state {facts['state']}"),
        images=_images(run),
        level=level,
        verdict=verdict,
        bars_of_knn=_knn_bars(facts["knn"] or {}),
        alarms=_alarms(run),
        cards=_cards(facts, run.environment.get("devices") == "cpu"),
        **_charts(run.metrics),
        pictures=_load_pictures(run),
        evaluations=_evaluations(run.evaluations),
        settings=changed_settings(run),
        incidents=_incidents(run),
        most_of_a_kind=MOST_OF_A_KIND,
        open_lines=_OPEN_LINES,
        environment=environment_rows(run),
        ds=json.dumps(run.ds, indent=2) if run.ds else "",
        again=reproduction(run),
    )


def _images(run: RunFiles) -> str:
    """Describe the images in words, such as "2,880 images of photos"."""
    count, root = run.events.fact("images", "images", int), run.events.fact("images", "place", str)
    if count is None or root is None:
        return "images whose number is not known"
    words = f"{count:,} images {'of' if run.recipe and root == run.recipe.data.source else 'in'} {root}"
    shares = {key.removeprefix(SHARE): run.metrics[key].y for key in find_shares(run.metrics.curves)}
    achieved = ", ".join(f"{name} {percent(100 * float(np.nanmean(part)))}" for name, part in shares.items())
    return words + (f" (drawn: {achieved})" if achieved else "")


def _knn_bars(knn: dict[str, float]) -> list[tuple[str, str, list[tuple[int, float]]]]:
    """Return the bars of k-NN: start, best and newest teacher, raw pixels and chance."""
    names = {"start": "start", "untrained": "start: untrained"}
    if knn.get("best") != knn.get("teacher"):
        names["best"] = f"best, step {knn['best_step']:,}"
    if "teacher" in knn:
        names["teacher"] = f"newest, step {knn['step']:,}"
    names |= {"raw_pixels": "raw pixels", "chance": "chance"}
    colors = {"teacher": 3, "best": 3}
    return [(name, percent(knn[key]), [(colors.get(key, 8), knn[key])]) for key, name in names.items() if key in knn]


def _alarms(run: RunFiles) -> list[str]:
    """Return the newest line of each kind of incident that is bad, with its time and number."""
    newest = {incident.kind: incident for incident in run.events.incidents if LEVELS[incident.kind] == "bad"}
    times = {kind: f", {number(n)} times" if n > 1 else "" for kind, n in run.events.counts.items()}
    return [f"{incident.line} ({incident.time}{times[kind]})" for kind, incident in newest.items()]


def _cards(facts: dict[str, Any], on_cpu: bool) -> list[tuple[str, str, str]]:
    """Return title, value and explanation of six figures: six fill rows of six, three and two."""
    of = f"of {number(facts['planned_steps'])}; " if facts["planned_steps"] else ""
    since = f" since step {number(facts['first_step'])}" if facts["first_step"] else ""
    epochs = f", epoch {number(facts['epoch'])}" if facts["epoch"] is not None else ""
    wait, entropy = facts["data_wait_fraction"], facts["teacher_entropy"]
    parts = "" if entropy is None else f"entropy {nats(entropy)} + KL {nats(facts['kl'])}"
    # A resident set holds what evaluations took too.
    without = ", without evaluations" if on_cpu else ""
    return [
        ("steps", number(facts["step"]), f"{of}{number(facts['images'])} images{since}{epochs}"),
        ("time in steps", duration(facts["training_seconds"]), "without evaluations and pauses"),
        ("loss", nats(facts["loss"]), parts),
        ("speed", number(facts["images_per_second"], 3), "images per second, the mean"),
        ("waiting for data", "–" if wait is None else f"{100 * wait:.0f} %", "of the time"),
        ("peak memory", gib(facts["memory_gib"]), f"predicted {gib(facts['memory_predicted_gib'])}{without}"),
    ]


def _charts(metrics: Metrics) -> dict[str, Any]:
    """Draw the charts in the order of the page; small ones of curves that change."""
    drawn = [one for one in find_series(metrics) if not one.curve(metrics).constant]
    large = {
        "learning": [knn_chart(metrics), loss_chart(metrics)],
        "speed": [series.chart(metrics, small=False) for series in LARGE[2:]],
    }
    return {
        **{name: [svg for chart in charts if (svg := draw_chart(chart))] for name, charts in large.items()},
        "others": [svg for series in drawn if (svg := draw_chart(series.chart(metrics)))],
    }


def _load_pictures(run: RunFiles) -> dict[str, Any]:
    """Load the first and newest pictures of each kind, to be shown side by side; then those of no training step."""
    folder, order = run.path / "pictures", list(_PICTURES)
    steps, others = dict[str, list[Path]](), list[Path]()
    for path in run.pictures:
        if path.parent == folder:
            others.append(path)
        else:
            steps.setdefault(path.stem, []).append(path)
    kinds = sorted(steps, key=lambda kind: (order.index(kind) if kind in order else len(order), kind))
    groups = [
        {
            "title": _PICTURES.get(kind, kind),
            "open": kind in _OPEN,
            "shown": [
                _picture(path, _step_of(path, folder)) for path in dict.fromkeys((steps[kind][0], steps[kind][-1]))
            ],
        }
        for kind in kinds[:_MOST]
    ]
    title = "Pictures of dino-ds pictures"
    named = [_picture(path, _PICTURES.get(path.stem, path.stem)) for path in others[:_MOST]]
    groups += [{"title": title, "open": not groups, "shown": named}] if named else []
    more = len(others) > _MOST or any(len(paths) > 2 for paths in steps.values())
    return {"folder": folder, "groups": groups, "more": more}


def _step_of(path: Path, folder: Path) -> str:
    """Describe a picture's step by the name of its folder: "step_00000500" -> "step 500"."""
    name = str(path.parent.relative_to(folder))
    word, _, digits = name.rpartition("_")
    if not (word and digits.isascii() and digits.isdigit()):
        return name
    return f"{word} {int(digits):,}" + (", before training" if int(digits) == 0 else "")


def _picture(path: Path, caption: str) -> dict[str, Any]:
    """Embed one picture; return an `error` instead for a file that can't be read."""
    try:
        address, (wide, high) = embedded_file(path, _WIDTH)
    except (OSError, ValueError) as error:
        return {"error": f"{path.name} can't be shown: {getattr(error, 'strerror', None) or error}"}
    is_wide = wide > _WIDE_FROM * high
    return {"error": "", "caption": caption, "address": address, "width": wide, "height": high, "wide": is_wide}


def _evaluations(evaluations: Sequence[Evaluation]) -> list[tuple[str, ...]]:
    """Return the rows of the table; facts about an evaluation are in its first row."""
    rows = list[tuple[str, ...]]()
    for evaluation in evaluations:
        about = evaluation.about
        images = [about["data"]] if isinstance(about.get("data"), str) else []
        counts = {"training": about.get("train_images"), "test": about.get("test_images")}
        images += [f"{number(count)} {name}" for name, count in counts.items() if isinstance(count, float)]
        step = number(about["step"]) if isinstance(about.get("step"), float) else ""
        for i, (metric, value) in enumerate(evaluation.results.items()):
            first = (evaluation.name, step, ", ".join(images)) if i == 0 else ("",) * 3
            rows.append((first[0], metric, number(value), *first[1:]))
    return rows


def _incidents(run: RunFiles) -> dict[str, Any]:
    events = run.events
    return {
        "header": ("UTC", "", ""),
        "rows": [
            (each.time, Tag(each.kind, f"incident {LEVELS[each.kind]}"), each.line.removeprefix(each.kind).lstrip())
            for each in events.incidents
        ],
        "counts": "; ".join(f"{name} {number(count)}" for name, count in events.counts.items()),
        "most": max(events.counts.values(), default=0),
    }


def run(options: ReportOptions) -> Result:
    """Write RUN/report.html; return its path and a summary of the run. Raises ConfigError."""
    folder = Path(os.path.expanduser(options.run))
    page = Path(os.path.expanduser(options.out)) if options.out else folder / "report.html"
    if page != folder / "report.html":
        check_absent(page)
    _check_out(page, folder)
    files = read_run(folder)
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    foot = render("foot.html", version=__version__, today=today, folders=[str(folder.resolve())])
    try:
        replace_file(page, build_document(files.name, draw_run(files) + foot))
    except OSError as error:
        raise ConfigError(f"{page} can't be written: {error.strerror or error}; name another with --out") from None
    facts = summarize(files)
    text = f"{_line(facts)}\nreport     {page} ({number(page.stat().st_size / 1e6, 3)} MB)"
    return Result({"report": str(page), **facts}, text, value=page)


def _check_out(page: Path, folder: Path) -> None:
    if page.suffix not in (".html", ".htm"):
        raise ConfigError(f"--out {page} must end in .html")
    is_missing = not page.parent.is_dir()
    if is_missing and page.parent == folder:
        return  # read_run reports it
    if is_missing or page.is_dir() or why_not_writable(page):
        raise ConfigError(f"{page} can't be written: {page.parent} is not a writable folder; name another with --out")


def _line(facts: dict[str, Any]) -> str:
    accuracies, planned = facts["knn"], facts["planned_steps"]
    knn = f", k-NN {percent(accuracies.get('teacher'))} at step {number(accuracies['step'])}" if accuracies else ""
    of = f" of {number(planned)}" if planned else ""
    return (
        f"{facts['state']:<11}{facts['run']}: step {number(facts['step'])}{of}, loss {nats(facts['loss'])}{knn}, "
        f"{duration(facts['training_seconds'])} in steps, {number(facts['images_per_second'], 3)} images/s, "
        f"{gib(facts['memory_gib'])}"
    )

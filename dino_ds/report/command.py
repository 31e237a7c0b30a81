"""`dino-ds report`: a run, or several side by side, as one HTML file."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dino_ds import __version__
from dino_ds.basics.durable import replace_file
from dino_ds.errors import ConfigError
from dino_ds.options.commands import ReportOptions
from dino_ds.report.compare import draw_comparison, names_of
from dino_ds.report.folder import RunFiles, read_run
from dino_ds.report.html import build_document, render
from dino_ds.report.single_run import draw_run
from dino_ds.report.summary import summarise
from dino_ds.report.text import duration, gib, nats, number, percent

_MOST_RUNS = 8


def run(options: ReportOptions) -> None:
    """Write the page, and print what it says first."""
    page, runs = write_page(options)
    found = [summarise(one) for one in runs]
    if options.json:
        print(json.dumps({"report": str(page), **({"runs": found} if options.compare else found[0])}, allow_nan=False))
    else:
        for facts in found:
            print(_line(facts))
        print(f"report     {page} ({number(page.stat().st_size / 1e6, 3)} MB)")


def write_page(options: ReportOptions) -> tuple[Path, list[RunFiles]]:
    """RUN/report.html, or RUN/compare.html of the first of several; and what was read. Raises ConfigError."""
    named = (*filter(None, [options.run]), *(options.compare or ()))
    folders = [Path(os.path.expanduser(text)) for text in named]
    if not folders or (options.compare and len(folders) < 2):
        raise ConfigError("give a run folder, and others with --compare RUN RUN: dino-ds report runs/cifar10")
    if len(folders) > _MOST_RUNS:
        raise ConfigError(f"{len(folders)} runs side by side: {_MOST_RUNS} are the most whose colors differ")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("a run is named twice: give each folder once")
    default = folders[0] / ("compare.html" if options.compare else "report.html")
    page = Path(os.path.expanduser(options.out)) if options.out else default
    _check_out(page, folders[0])
    runs = [read_run(folder) for folder in folders]
    _write(page, runs)
    return page, runs


def _check_out(page: Path, folder: Path) -> None:
    if page.suffix not in (".html", ".htm"):
        raise ConfigError(f"--out {page} must end in .html")
    where = page.parent
    if where == folder and not where.is_dir():
        return  # read_run reports it
    if not where.is_dir() or not os.access(where, os.W_OK | os.X_OK) or page.is_dir():
        raise ConfigError(
            f"{page} can't be written: {where} is not a folder that one may write to; name another with --out"
        )


def _write(page: Path, runs: list[RunFiles]) -> None:
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(names_of(runs))}"
    body = draw_run(runs[0]) if len(runs) == 1 else draw_comparison(runs)
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    folders = [str(one.path.resolve()) for one in runs]
    body += render("foot.html", version=__version__, today=today, folders=folders)
    try:
        replace_file(page, build_document(title, body))
    except OSError as error:
        raise ConfigError(f"{page} can't be written: {error.strerror or error}; name another with --out") from None


def _line(facts: dict[str, Any]) -> str:
    found, planned = facts["knn"], facts["planned_steps"]
    knn = f", k-NN {percent(found.get('teacher'))} at step {number(found['step'])}" if found else ""
    of = f" of {number(planned)}" if planned else ""
    return (
        f"{facts['state']:<11}{facts['run']}: step {number(facts['step'])}{of}, loss {nats(facts['loss'])}{knn}, "
        f"{duration(facts['training_seconds'])} in steps, {number(facts['images_per_second'], 3)} images/s, "
        f"{gib(facts['memory_gib'])}"
    )

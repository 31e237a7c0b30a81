"""`dino-ds report`: a run as one HTML file."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dino_ds import __version__
from dino_ds.basics.durable import check_absent, replace_file
from dino_ds.errors import ConfigError
from dino_ds.options.commands import ReportOptions
from dino_ds.options.definition import Result
from dino_ds.report.folder import read_run
from dino_ds.report.html import build_document, render
from dino_ds.report.single_run import draw_run
from dino_ds.report.summary import summarize
from dino_ds.report.text import duration, gib, nats, number, percent


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
    where = page.parent
    if where == folder and not where.is_dir():
        return  # read_run reports it
    if not where.is_dir() or not os.access(where, os.W_OK | os.X_OK) or page.is_dir():
        raise ConfigError(
            f"{page} can't be written: {where} is not a folder that one may write to; name another with --out"
        )


def _line(facts: dict[str, Any]) -> str:
    accuracies, planned = facts["knn"], facts["planned_steps"]
    knn = f", k-NN {percent(accuracies.get('teacher'))} at step {number(accuracies['step'])}" if accuracies else ""
    of = f" of {number(planned)}" if planned else ""
    return (
        f"{facts['state']:<11}{facts['run']}: step {number(facts['step'])}{of}, loss {nats(facts['loss'])}{knn}, "
        f"{duration(facts['training_seconds'])} in steps, {number(facts['images_per_second'], 3)} images/s, "
        f"{gib(facts['memory_gib'])}"
    )

"""Markdown tables of measurements, and findings of `doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with padded columns, all but the first aligned to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append(f"| {' | '.join(cells)} |")
    rules = [("-" * (w - 1) + ":") if i else "-" * w for i, w in enumerate(widths)]
    lines.insert(1, f"| {' | '.join(rules)} |")
    return "\n".join(lines)


FINE, WARNING, FAILURE = "ok", "warn", "FAIL"


@dataclass(frozen=True)
class Finding:
    """A line of `doctor`. level: FINE, WARNING (training works, but ...) or FAILURE (training stops); remedy: what to
    do about it."""

    topic: str
    level: str
    text: str
    remedy: str = ""


def judge(topic: str, text: str, remedy: str = "", bad: bool = True, level: str = WARNING) -> Finding:
    """Make a finding: of `level` and with the remedy if it is `bad` and has a remedy, else of level FINE."""
    return Finding(topic, level, text, remedy) if bad and remedy else Finding(topic, FINE, text)

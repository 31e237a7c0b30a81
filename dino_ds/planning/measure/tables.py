"""Prints what was measured: a Markdown table for people, or one JSON object for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with padded columns, all but the first aligned to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append(f"| {' | '.join(cells)} |")
    rules = [("-" * (w - 1) + ":") if i else "-" * w for i, w in enumerate(widths)]
    lines.insert(1, f"| {' | '.join(rules)} |")
    return "\n".join(lines)


def print_result(page: str, result: dict[str, Any], as_json: bool) -> None:
    """Print `page`, or `result` as one JSON object and nothing else, on rank 0."""
    if int(os.environ.get("RANK", 0)) == 0:  # not by dino_ds.engine.distributed: planning loads no torch
        print(json.dumps(result, indent=1) if as_json else page, flush=True)

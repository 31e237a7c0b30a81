"""The page that `dino-ds advise` prints."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from dino_ds.planning.data_report import duplicates_sentence

_SHORT = 0.1
"""Hours below which a prediction says little: starting takes as long."""
_WIDTH = 120


def _span(values: Mapping[str, float]) -> str:
    low, high = (f"{values[name]:,.0f}" for name in ("min", "max"))
    return low if low == high else f"{low} to {high}"


def page(result: Mapping[str, Any], images_of: str) -> str:
    """The advice as text of 120 columns; images_of: where the images are."""
    found = result["found"]
    images = f"{found['images']:,} in {images_of}"
    classes = "no labels" if found["classes"] is None else f"{found['classes']['count']:,} classes"
    sides = ", ".join(f"{side} {_span(found[side])}" for side in ("width", "height"))
    about = [
        f"images   {images}; {classes}; looked at {found['looked_at']:,}",
        f"size     {sides}, shorter side {found['shorter_side']['median']:,.0f} px in the median; "
        f"{result['decisive']['channels']} channel(s); {', '.join(found['formats'])}",
        f"alike    {duplicates_sentence(found)}",
        f"GPUs     {result['gpus_offered']} x {result['gpu']}" if result["gpu"] else "GPUs     none",
    ]
    lines = [*_listed(about, 9), ""]
    rows = [(row["setting"], row["value"], row["why"]) for row in result["advice"]]
    rows.append(("k-NN", *result["expected_knn"]))
    if prediction := result["prediction"]:
        memory = f"{prediction['memory_gib']:.1f} of {prediction['limit_gib']:.1f} GiB"
        rate = f"{prediction['images_per_second']:,.0f} images/s"
        why = f"{rate}; {memory}; {prediction['ds_config']}: predicted by dino-ds plan, not verified on a GPU"
        hours = f"{prediction['hours']:,.1f}" if prediction["hours"] >= _SHORT else f"less than {_SHORT}"
        rows.append(("hours", hours, why))
    for row in rows:
        lines += _wrapped(*row)
    notes = [f"note: {note}" for note in result["notes"]]
    return "\n".join([*lines, "", _folded(result["command"]), "", *_listed(result["remedies"]), *_listed(notes)])


def _wrapped(setting: str, value: str, why: str) -> list[str]:
    """A row of three columns, 120 characters wide."""
    cells = [[setting], textwrap.wrap(value, 30), textwrap.wrap(why, 70)]
    height = max(map(len, cells))
    filled = [cell + [""] * (height - len(cell)) for cell in cells]
    return [f"{a:<14} {b:<31} {c}".rstrip() for a, b, c in zip(*filled, strict=True)]


def _folded(command: str) -> str:
    """The command over several lines, as a shell takes it: an option and its value on one."""
    lines = [""]
    for part in re.split(r" (?=--[a-z])", command):
        if len(lines[-1]) + len(part) > _WIDTH - 8:
            lines.append("")
        lines[-1] += f" {part}" if lines[-1] else part
    return " \\\n    ".join(lines)


def _listed(texts: Sequence[str], indent: int = 2) -> list[str]:
    wrapper = textwrap.TextWrapper(
        _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return [
        line
        for text in texts
        for part in text.splitlines()
        for line in (
            textwrap.indent(_folded(part.strip()), "  ").splitlines()
            if part.startswith("  dino-ds ")
            else wrapper.wrap(part)
        )
    ]

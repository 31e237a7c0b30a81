"""Formats numbers and durations for readers."""

from __future__ import annotations

import math

from dino_ds.basics.digits import short


def number(value: float | None, digits: int = 4) -> str:
    """Format a number by `short`, or as a sign if it is unknown or not finite."""
    if value is None or math.isnan(value):
        return "–" if value is None else "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return short(value, digits - 1 if abs(value) < 1e-4 else digits)  # an exponent takes the place of a digit


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} %"


def duration(seconds: float | None) -> str:
    """Format a duration by its two largest units, such as "3 h 12 min"."""
    if seconds is None:
        return "–"
    left = round(seconds)
    parts: list[str] = []
    for size, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, size)
        if count or (name == "s" and not parts):
            parts.append(f"{count} {name}")
    return " ".join(parts[:2])


def gib(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} GiB" if value >= 0.1 else f"{number(value, 2)} GiB"


def nats(value: float | None) -> str:
    return f"{value:.3f}" if value is not None and math.isfinite(value) else number(value)

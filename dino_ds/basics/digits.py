"""Numbers for readers: a few digits, and no exponent for large ones."""

from collections.abc import Sequence


def short(value: float, digits: int = 3) -> str:
    """`value` with `digits` significant digits; a larger number whole, its thousands with commas."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def range_text(values: Sequence[float]) -> str:
    """Several numbers as one gives them on the command line, with commas between them."""
    return ",".join(f"{value:.10g}" for value in values)

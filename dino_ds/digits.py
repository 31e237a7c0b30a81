"""Numbers for readers: a few digits, and no exponent for large ones."""


def short(value: float, digits: int = 3) -> str:
    """`value` with `digits` significant digits; a larger number whole, its thousands with commas."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"

"""Tables of tests, of which a sample runs by default and the whole with `make test-all`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(cells: Iterable[Any], columns: Callable[[Any], tuple[Any, ...]] = tuple) -> list[Any]:
    """All cells as parameters; cells that are not needed to show each value of each column are marked `full`. columns:
    function that gives a cell's columns, by default its elements. Cells with the most new values come first."""
    cells = list(cells)
    shows = [{(column, str(value)) for column, value in enumerate(columns(cell))} for cell in cells]
    missing: set[tuple[int, str]] = set().union(*shows)
    kept = set()
    while missing:
        best = max(range(len(cells)), key=lambda i: len(shows[i] & missing))
        kept.add(best)
        missing -= shows[best]
    return [cell if i in kept else _full(cell) for i, cell in enumerate(cells)]


def _full(cell: Any) -> Any:
    return pytest.param(*(cell if isinstance(cell, tuple) else (cell,)), marks=pytest.mark.full)

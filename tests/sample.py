"""Tables of tests, of which a sample runs by default and the whole with `make test-all`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(cells: Iterable[Any], columns: Callable[[Any], tuple[Any, ...]] = tuple) -> list[Any]:
    """All cells as parameters; marked `full` those without which each value of each column still appears.

    columns: what a cell is made of, by default its elements. The cell that shows the most new values comes first.
    """
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

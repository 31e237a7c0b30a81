"""Ceilings on how much there is to read, to keep and to test.

They only go down. Whoever raises one says in the same line what it bought.
"""

from __future__ import annotations

import pytest

from scripts.measures import weigh

CEILINGS = {
    "package lines": 44_400,
    "package files": 305,
    "test lines": 39_300,
    "recipe keys": 140,
    "words of pages": 14_000,
    "words of notes": 8_800,  # Muon's measurements
}


@pytest.mark.parametrize("what", CEILINGS)
def test_no_heavier_than_it_was(what: str):
    assert weigh()[what] <= CEILINGS[what], f"{what}: see the docstring of tests/test_weight.py"

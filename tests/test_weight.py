"""Ceilings on how much there is to read, to keep and to test.

They only go down. Whoever raises one says in the same line what it bought.
"""

from __future__ import annotations

import pytest

from scripts.measures import weigh

CEILINGS = {
    "package lines": 40_470,
    "package files": 280,
    "test lines": 32_690,
    "recipe keys": 136,
    "words of pages": 13_620,
    "words of notes": 8_810,
    "variables named by a pronoun": 43,
}


@pytest.mark.parametrize("what", CEILINGS)
def test_no_heavier_than_it_was(what: str):
    assert weigh()[what] <= CEILINGS[what], f"{what}: see the docstring of tests/test_weight.py"

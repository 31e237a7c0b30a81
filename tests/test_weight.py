"""Ceilings on how much there is to read, to keep and to test.

They only go down. Whoever raises one says in the same line what it bought.
"""

from __future__ import annotations

import pytest

from scripts.measures import weigh

CEILINGS = {
    # 2,040 lines, 8 files and 2,220 lines of tests bought: data files that name no code, features with a digest,
    # servers and files that are bounded and compared, classes by name, one side for a file, users' own parts that
    # resume, BatchNorm that keeps a start, measured image settings, runs that end with their launcher, two hosts,
    # bench tune.
    "package lines": 42_300,
    "package files": 191,
    "test lines": 35_300,
    "recipe keys": 136,
    "words of pages": 14_150,
    "words of notes": 8_810,
    "variables named by a pronoun": 49,
}


@pytest.mark.parametrize("what", CEILINGS)
def test_no_heavier_than_it_was(what: str):
    assert weigh()[what] <= CEILINGS[what], f"{what}: see the docstring of tests/test_weight.py"

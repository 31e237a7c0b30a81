"""Ceilings on how much there is to read, to keep and to test.

They only go down. Whoever raises one says in the same line what it bought.
"""

from __future__ import annotations

import pytest

from scripts.measures import weigh

CEILINGS = {
    "package lines": 44_050,  # 724 bought images in buckets, 801 find and curate, 68 two refusals of eval
    "package files": 292,  # 3 and 4 for the same
    "test lines": 35_280,
    "recipe keys": 141,  # data.remote_cache_gib
    "words of pages": 13_900,
    "words of notes": 8_900,  # Muon's measurements, curated lists
    "variables named by a pronoun": 46,
}


@pytest.mark.parametrize("what", CEILINGS)
def test_no_heavier_than_it_was(what: str):
    assert weigh()[what] <= CEILINGS[what], f"{what}: see the docstring of tests/test_weight.py"

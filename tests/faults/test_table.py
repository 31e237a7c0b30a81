"""docs/reliability.md lists exactly the faults that are tested, and every exit code there is."""

from __future__ import annotations

import re

from dino_ds.errors import EXIT_CODES
from tests.faults.kinds import KINDS
from tests.faults.table import PAGE, listed_names


def test_the_page_lists_the_faults_that_are_tested():
    names = [kind.name for kind in KINDS]
    assert len(set(names)) == len(names) >= 24
    assert listed_names(PAGE.read_text()) == names, "run: python -m tests.faults.table"


def test_the_page_has_every_exit_code():
    listed = [int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE)]
    assert sorted(listed) == sorted(EXIT_CODES)

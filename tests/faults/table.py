"""The table of faults in docs/reliability.md, made by running them.

python -m tests.faults.table [pytest's options]      # with -k NAME the rows of the others stay as they are
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.kinds import GROUPS, KINDS

PAGE = Path(__file__).parent.parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- made by python -m tests.faults.table -->", "<!-- end -->"
_HEAD = "| fault | injected by | exit codes | s |"


class _Results:
    """A plugin of pytest that keeps what `test_fault` has recorded."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.rows.update({value["name"]: value for name, value in report.user_properties if name == "fault"})


def main(options: list[str]) -> int:
    """Runs the faults; the code of pytest. Only what has passed changes the page."""
    results = _Results()
    code = int(pytest.main(["-q", "-m", "faults", *options, str(Path(__file__).parent)], plugins=[results]))
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    rows = _old_rows(page) | {name: _row(value) for name, value in results.rows.items()}
    PAGE.write_text(f"{before}{BEGIN}\n{_tables(rows)}{END}{rest.partition(END)[2]}")
    print(f"{len(results.rows)} rows of {PAGE} are new")
    return code


def listed_names(page: str) -> list[str]:
    """The kinds that a page lists, in its order."""
    return [*_old_rows(page)]


def _old_rows(page: str) -> dict[str, str]:
    lines = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}
    return {name: row for name, row in rows.items() if row != _HEAD}


def _row(found: dict[str, Any]) -> str:
    kind = next(kind for kind in KINDS if kind.name == found["name"])
    codes = " ".join(map(str, kind.codes))
    return f"| {kind.name} | {kind.how} | {codes} | {found['seconds']:.1f} |"


def _tables(rows: dict[str, str]) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "deepspeed"))
    lines = [
        f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}, {versions}, gloo.",
        "",
    ]
    for group, kinds in GROUPS.items():
        lines += [f"**{group}**", "", _HEAD, "|---|---|---|---|"]
        lines += [rows[kind.name] for kind in kinds if kind.name in rows]
        lines.append("")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The table of faults in docs/reliability.md, made by running them: python -m tests.faults.table"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.kinds import GROUPS

PAGE = Path(__file__).parent.parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- made by python -m tests.faults.table -->", "<!-- end -->"
_MOST_CHARACTERS = 150
_HEAD = "| fault | injected by | exit codes | s | what is said |"


class _Results:
    """A plugin of pytest that keeps what `test_fault` has recorded."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.rows.update({value["name"]: value for name, value in report.user_properties if name == "fault"})


def main() -> int:
    """Runs every kind; the code of pytest. The page changes only if all of them pass."""
    results = _Results()
    code = int(pytest.main(["-q", "-m", "faults", str(Path(__file__).parent)], plugins=[results]))
    if code == 0:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{_tables(results.rows)}{END}{after}")
        print(f"written: {PAGE}")
    return code


def listed_names(page: str) -> list[str]:
    """The kinds that a page lists, in its order."""
    rows = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    names = [row.split(" | ")[0].removeprefix("| ") for row in rows if row.startswith("| ")]
    return [name for name in names if name != "fault" and not name.startswith("---")]


def _tables(rows: dict[str, dict[str, Any]]) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "deepspeed"))
    lines = [
        f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}, {versions}, gloo.",
        "",
    ]
    for group, kinds in GROUPS.items():
        lines += [
            f"**{group}**",
            "",
            "| fault | injected by | exit codes | s | what is said |",
            "|---|---|---|---|---|",
        ]
        for kind in kinds:
            row = rows[kind.name]
            codes = " ".join(map(str, kind.codes))
            lines.append(f"| {kind.name} | {kind.how} | {codes} | {row['seconds']:.1f} | {_cell(row['line'])} |")
        lines.append("")
    return "\n".join(lines) + "\n"


def _cell(line: str) -> str:
    words = " ".join(line.split()).replace("|", "\\|").replace("<", "&lt;")
    return words if len(words) <= _MOST_CHARACTERS else f"{words[:_MOST_CHARACTERS]} ..."


if __name__ == "__main__":
    sys.exit(main())

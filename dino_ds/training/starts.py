"""How a run was started, each time: environment.json keeps the command lines of all its starts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from dino_ds import distributed
from dino_ds.health.files import now

_MOST = 200
_MARKS = {"torchrun": "TORCHELASTIC_RUN_ID", "deepspeed": "CROSS_RANK"}
"""What these launchers set in the environment of a rank, and others do not."""


def describe_start() -> dict[str, Any]:
    """Of this process; `launcher` is "" for none or another one."""
    return {
        "time": now(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "launcher": next((name for name, mark in _MARKS.items() if mark in os.environ), ""),
        "ranks": distributed.world_size(),
    }


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """The earlier starts of the run in this folder, at most the newest ones; of an older version its last."""
    try:
        found = json.loads((run_dir / "environment.json").read_text())
        starts = found.get("starts") or ([found] if "command" in found else [])
        return [
            {name: start.get(name, "") for name in ("time", "command", "launcher", "ranks")}
            for start in starts[-_MOST:]
            if isinstance(start, dict)
        ]
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return []

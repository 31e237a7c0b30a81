"""Commands that start ranks: their environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent


def environment(**more: str) -> dict[str, str]:
    """The environment of a command that starts ranks: no rank itself, on the CPU, one thread each."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
    path = f"{Path(sys.executable).parent}:{kept['PATH']}"
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **more}

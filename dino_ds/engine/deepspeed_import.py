"""The first import of DeepSpeed, which prints warnings to standard output: without a CUDA toolkit, for one."""

from __future__ import annotations

import contextlib
import sys
from typing import Any


def import_deepspeed() -> Any:
    """Import DeepSpeed; what it prints goes to stderr, as standard output is for results such as a bench's JSON."""
    first = "deepspeed" not in sys.modules
    with contextlib.redirect_stdout(sys.stderr) if first else contextlib.nullcontext():
        import deepspeed
    return deepspeed

"""Imports DeepSpeed, which prints warnings to standard output, such as about a missing CUDA toolkit."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


def import_deepspeed() -> Any:
    """Import DeepSpeed, with its prints sent to stderr: standard output is for results such as a bench's JSON."""
    first = "deepspeed" not in sys.modules
    quiet = contextlib.redirect_stdout(sys.stderr) if first else contextlib.nullcontext()
    with quiet, _without_mlflow():
        import deepspeed
    return deepspeed


@contextlib.contextmanager
def _without_mlflow() -> Iterator[None]:
    """Keep DeepSpeed's autotuner, unused here, from importing MLflow, which costs 1.5 seconds and a thread."""
    hides = "mlflow" not in sys.modules and "deepspeed" not in sys.modules
    if hides:
        sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hides:
            del sys.modules["mlflow"]

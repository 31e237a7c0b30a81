"""The first import of DeepSpeed, which prints warnings to standard output: without a CUDA toolkit, for one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from dino_ds.basics.own_code import explaining_interrupted


def import_deepspeed() -> Any:
    """Import DeepSpeed; what it prints goes to stderr, as standard output is for results such as a bench's JSON.

    Raises ConfigError where an earlier import of it was interrupted.
    """
    first = "deepspeed" not in sys.modules
    quiet = contextlib.redirect_stdout(sys.stderr) if first else contextlib.nullcontext()
    with quiet, _without_mlflow(), explaining_interrupted("deepspeed"):
        import deepspeed
    return deepspeed


@contextlib.contextmanager
def _without_mlflow() -> Iterator[None]:
    """DeepSpeed's autotuner, of no use here, imports it where it is installed: a second and a half, and a thread."""
    hides = "mlflow" not in sys.modules and "deepspeed" not in sys.modules
    if hides:
        sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hides:
            del sys.modules["mlflow"]

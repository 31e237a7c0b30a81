"""Measures the peak memory of a function: of a GPU's allocator, or on a CPU in a new process, which has grown before
for nothing else."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dino_ds.basics.own_code import allow_code, allowed_code
from dino_ds.config.ds_config import CHECKOUT
from dino_ds.errors import UserError

MIB = 2**20
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ChildFailed(UserError):
    """A process ended without a result."""

    exit_code = 1


@dataclass(frozen=True)
class ChildResult:
    """Result of a function in a new process.

    value: what the function returned.
    peak_mib: peak of the resident set.
    imports_mib: resident set before the function ran, with the libraries loaded.
    """

    value: Any
    peak_mib: float
    imports_mib: float


class GpuPeak:
    """Peak GPU memory since this object was made, beyond what the allocator held then."""

    def __init__(self) -> None:
        self._held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def mib(self) -> float:
        return (torch.cuda.max_memory_allocated() - self._held) / MIB


def run_in_child(function: Callable[..., Any], threads: int, **kwargs: Any) -> ChildResult:
    """Call `function`, of a module's top level, with `kwargs` in a new process of one rank.

    Arguments and value must be plain JSON. Raises ChildFailed.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(CHECKOUT), os.environ.get("PYTHONPATH")) if p)
    with tempfile.TemporaryDirectory() as folder:
        call = json.dumps(
            {"module": function.__module__, "name": function.__name__, "kwargs": kwargs, "code": allowed_code()}
        )
        result = Path(folder, "result.json")
        command = [sys.executable, "-c", "from dino_ds.planning.measure.memory import _child; _child()", str(result)]
        done = subprocess.run(command, env=environment, input=call, capture_output=True, text=True)
        if done.returncode == -signal.SIGKILL:
            raise ChildFailed("a measuring process was killed, most likely for its memory: take a smaller --batch")
        if done.returncode or not result.exists():
            printed = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            reason = printed[-1] if printed else "it printed nothing"
            raise ChildFailed(f"a measuring process ended without a result: {reason}")
        return ChildResult(**json.loads(result.read_text()))


def _child() -> None:
    """Make the call of `run_in_child` in the new process, and write the result to the file that the command names."""
    call = json.load(sys.stdin)
    import dino_ds.planning.measure.trial as _libraries  # noqa: F401
    from dino_ds.engine.device import resident_mib
    from dino_ds.engine.process import init_distributed

    init_distributed()
    allow_code(call["code"])
    function = getattr(importlib.import_module(call["module"]), call["name"])
    imports = resident_mib()
    value = function(**call["kwargs"])
    result = {"value": value, "peak_mib": resident_mib(peak=True), "imports_mib": imports}
    Path(sys.argv[1]).write_text(json.dumps(result))
    os._exit(0)  # an orderly exit gains nothing here, and DeepSpeed's takes a second

"""Peak memory of a piece of work in a process of its own: nothing else has grown that process before.

On a GPU by its allocator, else by the resident set. `engine.memory_gib` is for a run as a whole; here the libraries'
share is told apart.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dino_ds.ds_config import CHECKOUT

MIB = 2**20


class ChildFailed(Exception):
    """The process ended without a result; `returncode` -9 is how the kernel stops one that takes too much memory."""

    def __init__(self, returncode: int, stderr: str) -> None:
        super().__init__(f"process ended with {returncode}: {stderr.strip()[-2000:]}")
        self.returncode, self.stderr = returncode, stderr


@dataclass(frozen=True)
class ChildResult:
    """value: what the function gave; peak_mib: of the device's allocator, or the resident set on a CPU;
    imports_mib: the resident set before the function ran, with the libraries loaded (0 on a GPU)."""

    value: Any
    peak_mib: float
    imports_mib: float


def run_in_child(function: str, threads: int | None = None, **kwargs: Any) -> ChildResult:
    """`function` ("module:name") with `kwargs`, in a new process of one rank. Arguments and value must be plain JSON.

    Raises ChildFailed.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(CHECKOUT), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, "-c", "from dino_ds.measure.memory import _child; _child()"],
        input=json.dumps({"function": function, "kwargs": kwargs}),
        env=environment,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise ChildFailed(done.returncode, done.stderr)
    return ChildResult(**json.loads(lines[-1]))


def resident_mib(peak: bool = False) -> float:
    """Resident set of this process, now or at its highest.

    From /proc: getrusage's maximum begins with that of the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        wanted = "VmHWM:" if peak else "VmRSS:"
        line = next(line for line in status.read_text().splitlines() if line.startswith(wanted))
        return int(line.split()[1]) / 1024
    import resource

    import psutil

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (MIB if sys.platform == "darwin" else 1024)
    return largest if peak else psutil.Process().memory_info().rss / MIB


def _child() -> None:
    """The other side of `run_in_child`. The last line of stdout is the result."""
    call = json.loads(sys.stdin.read())
    import torch

    import dino_ds.measure.trial as _libraries  # noqa: F401
    from dino_ds.engine import init_distributed

    init_distributed()
    module, _, name = call["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    cuda = torch.cuda.is_available()
    imports = 0.0 if cuda else resident_mib()
    value = function(**call["kwargs"])
    peak = torch.cuda.max_memory_allocated() / MIB if cuda else resident_mib(peak=True)
    print(json.dumps({"value": value, "peak_mib": peak, "imports_mib": imports}), flush=True)
    os._exit(0)  # nothing is worth an orderly end, and DeepSpeed's takes a second

"""Measures the peak memory of a function in a new process, whose memory nothing else has grown before.

The peak is the allocator's on a GPU, else the resident set's. `engine.device.memory_gib` is for a whole run; here the
libraries' share is separate. A GPU's allocator can reset its peak, so `GpuPeak` needs no new process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dino_ds.basics.ports import find_free_port
from dino_ds.config.ds_config import CHECKOUT
from dino_ds.engine import distributed
from dino_ds.errors import UserError

MIB = 2**20
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ChildFailed(UserError):
    """A process ended without a result. `log` is its whole output, of which the message has the last line; `returncode`
    is -SIGKILL if it took too much memory."""

    exit_code = 1

    def __init__(self, log: str, returncode: int) -> None:
        last = next((line for line in reversed(log.splitlines()) if line.strip()), "it printed nothing")
        killed = returncode == -signal.SIGKILL
        why = "it was killed, most likely by the system for its memory: take a smaller --batch" if killed else last
        super().__init__(f"a measuring process ended without a result: {why}")
        self.log, self.returncode = log, returncode


@dataclass(frozen=True)
class ChildResult:
    """value: what the function gave; peak_mib: of the device's allocator, or the resident set on a CPU;
    imports_mib: the resident set before the function ran, with the libraries loaded (0 on a GPU)."""

    value: Any
    peak_mib: float
    imports_mib: float


class GpuPeak:
    """Peak GPU memory since this object was made, beyond what the allocator held then."""

    def __init__(self) -> None:
        import torch

        self._held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def mib(self) -> float:
        import torch

        return (torch.cuda.max_memory_allocated() - self._held) / MIB


def run_in_child(function: str, threads: int | None = None, **kwargs: Any) -> ChildResult:
    """Call `function` ("module:name") with `kwargs` in a new process of one rank.

    Arguments and value must be plain JSON. Raises ChildFailed.
    """
    return run_in_children(function, 1, threads, **kwargs)[0]


def run_in_children(
    function: str,
    ranks: int,
    threads: int | None = None,
    limit_mib: float | None = None,
    **kwargs: Any,
) -> list[ChildResult]:
    """Call `function` on `ranks` new processes of one process group; the results are in rank order.

    They are killed, as the kernel would do, when their resident sets together exceed `limit_mib`.
    """
    environment = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(CHECKOUT), os.environ.get("PYTHONPATH")) if p)
    if ranks > 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "WORLD_SIZE": str(ranks)}
        environment["LOCAL_SIZE"] = str(ranks)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call.json").write_text(json.dumps({"function": function, "kwargs": kwargs}))
        children = []
        for rank in range(ranks):
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            with Path(folder, f"{rank}.log").open("w") as log:
                code = f"from dino_ds.planning.measure.memory import _child; _child({folder!r}, {rank})"
                command = [sys.executable, "-c", code]
                children.append(subprocess.Popen(command, env={**environment, **variables}, stdout=log, stderr=log))
        _wait_for_all(children, Path(folder), limit_mib)
        return [ChildResult(**json.loads(Path(folder, f"{rank}.json").read_text())) for rank in range(ranks)]


def _wait_for_all(children: list[subprocess.Popen[bytes]], folder: Path, limit_mib: float | None) -> None:
    """Wait for all children; when one fails, stop the others, which would wait for it."""
    codes: list[int] = []
    try:
        while any(child.poll() is None for child in children) and not codes:
            if limit_mib is not None and _resident_sets_mib(children) > limit_mib:
                codes = [-signal.SIGKILL]
            else:
                time.sleep(0.02)
                codes = [child.returncode for child in children if child.poll()]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
    if any(child.wait() for child in children):
        logs = [(folder / f"{rank}.log").read_text() for rank, child in enumerate(children) if child.returncode]
        # The rank that failed first closed the others' connections. Its log goes last: the last line is the message.
        logs.sort(key=lambda log: "Connection closed by peer" not in log)
        codes = codes or [child.returncode for child in children if child.returncode]
        raise ChildFailed("\n".join(logs), min(codes))


def _resident_sets_mib(children: list[subprocess.Popen[bytes]]) -> float:
    total = 0
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += psutil.Process(child.pid).memory_info().rss
    return total / MIB


def _child(folder: str, rank: int) -> None:
    """Make the call of `run_in_children` in a child process, and write the result to RANK.json in `folder`."""
    call = json.loads(Path(folder, "call.json").read_text())
    import torch

    import dino_ds.planning.measure.trial as _libraries  # noqa: F401
    from dino_ds.engine.device import resident_mib
    from dino_ds.engine.process import init_distributed

    init_distributed()
    module, _, name = call["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    cuda = torch.cuda.is_available()
    imports = 0.0 if cuda else resident_mib()
    value = function(**call["kwargs"])
    peak = torch.cuda.max_memory_allocated() / MIB if cuda else resident_mib(peak=True)
    result = {"value": value, "peak_mib": peak, "imports_mib": imports}
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    distributed.barrier()  # no rank exits while another still needs it
    os._exit(0)  # an orderly exit gains nothing here, and DeepSpeed's takes a second

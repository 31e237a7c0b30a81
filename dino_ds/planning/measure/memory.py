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
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from dino_ds.basics.durable import replacing
from dino_ds.basics.own_code import allow_code, allowed_code
from dino_ds.basics.ports import find_free_port
from dino_ds.config.ds_config import CHECKOUT
from dino_ds.errors import UserError, is_out_of_memory, one_line

MIB = 2**20
_LOOK_SECONDS = 0.03
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


class ChildOutOfMemory(ChildFailed):
    """A process was ended for the memory that it took, or its allocator had none left."""


class GpuPeak:
    """Peak GPU memory since this object was made, beyond what the allocator held then."""

    def __init__(self) -> None:
        self._held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def mib(self) -> float:
        return (torch.cuda.max_memory_allocated() - self._held) / MIB


@dataclass(frozen=True)
class ChildLimits:
    """What the processes of `run_in_child` may take: gib of memory each, a GPU's if there is one, and seconds."""

    ranks: int = 1
    gib: float | None = None
    seconds: float | None = None


def run_in_child(
    function: Callable[..., Any], threads: int, limits: ChildLimits | None = None, **kwargs: Any
) -> ChildResult:
    """Call a module's `function` with `kwargs` in new processes, one a rank; the result is rank 0's.

    Arguments and value must be plain JSON. Raises ChildFailed, and ChildOutOfMemory for lack of memory.
    """
    limits = limits or ChildLimits()
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(CHECKOUT), os.environ.get("PYTHONPATH")) if p)
    call: dict[str, Any] = {"module": function.__module__, "name": function.__name__, "kwargs": kwargs}
    call |= {"code": allowed_code(), "limit_gib": limits.gib}
    with tempfile.TemporaryDirectory() as folder:
        words, result, printed = (Path(folder, name) for name in ("call.json", "result.json", "printed.txt"))
        words.write_text(json.dumps(call))
        command = [sys.executable, "-c", "from dino_ds.planning.measure.memory import _child; _child()", str(result)]
        processes, port = list[psutil.Popen](), find_free_port()
        with printed.open("wb") as output:
            for rank in range(limits.ranks):
                variables = environment | (_rank_variables(rank, limits.ranks, port) if limits.ranks > 1 else {})
                with words.open() as given:
                    processes.append(
                        psutil.Popen(command, env=variables, stdin=given, stdout=output, stderr=subprocess.STDOUT)
                    )
        codes = _wait(processes, limits)
        if -signal.SIGKILL in codes:
            raise ChildOutOfMemory("a measuring process was killed, most likely for its memory: take a smaller --batch")
        if any(codes) or not result.exists():
            lines = [line for line in printed.read_text(errors="replace").splitlines() if line.strip()]
            reason = lines[-1] if lines else "it printed nothing"
            raise ChildFailed(f"a measuring process ended without a result: {reason}")
        answer = json.loads(result.read_text())
        if "out_of_memory" in answer:
            raise ChildOutOfMemory(f"a measuring process ran out of memory: {answer['out_of_memory']}")
        return ChildResult(**answer)


def _rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in values.items()}


def _wait(processes: list[psutil.Popen], limits: ChildLimits) -> list[int | None]:
    """Wait until all processes have ended, or one has failed; return the exit codes of those that ended by themselves.
    Those that are left, also at a limit, are killed. Raises ChildFailed at a limit."""
    end = float("inf") if limits.seconds is None else time.monotonic() + limits.seconds
    most = float("inf") if limits.gib is None or torch.cuda.is_available() else limits.gib  # a GPU's is the allocator's
    try:
        while any(process.poll() is None for process in processes):
            time.sleep(_LOOK_SECONDS)
            sizes = [_resident_gib(process) for process in processes]
            if max(sizes) > most:
                raise ChildOutOfMemory(f"a measuring process took {max(sizes):.2f} GiB, more than {most:.2f}")
            if any(process.poll() for process in processes):
                break
            if time.monotonic() > end:
                raise ChildFailed(f"a measuring process had not ended after {limits.seconds:.0f} s")
        return [process.poll() for process in processes]
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
            process.wait()


def _resident_gib(process: psutil.Popen) -> float:
    try:
        return float(process.memory_info().rss) / 2**30
    except psutil.Error:  # it has ended meanwhile
        return 0.0


def _child() -> None:
    """Make the call of `run_in_child` in a new process; rank 0 writes the result to the file that the command names."""
    with suppress(OSError):  # the kernel, if memory runs out, ends this process rather than another
        Path("/proc/self/oom_score_adj").write_text("1000")
    call = json.load(sys.stdin)
    import dino_ds.planning.measure.trial as _libraries  # noqa: F401
    from dino_ds.engine import distributed
    from dino_ds.engine.device import resident_mib
    from dino_ds.engine.process import init_distributed

    init_distributed()
    allow_code(call["code"])
    if torch.cuda.is_available() and call["limit_gib"] is not None:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, call["limit_gib"] * 2**30 / total))
    function = getattr(importlib.import_module(call["module"]), call["name"])
    imports = resident_mib()
    try:
        value = function(**call["kwargs"])
        result = {"value": value, "peak_mib": resident_mib(peak=True), "imports_mib": imports}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        result = {"out_of_memory": one_line(error, 200)}
    if distributed.rank() == 0 or "out_of_memory" in result:
        with replacing(Path(sys.argv[1])) as file:
            file.write_text(json.dumps(result))
    os._exit(0)  # an orderly exit gains nothing here, and DeepSpeed's takes a second

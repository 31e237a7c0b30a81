"""On what something was measured, and how fast its matrix products are."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dino_ds.distributed import usable_cores
from dino_ds.measure.timing import clock_of, synchronize
from dino_ds.training.environment import versions

_SIDES = {"cpu": 2048, "cuda": 8192}


def describe_host() -> dict[str, Any]:
    """Host, processor, cores this process may use, threads, GPU, load average, date, versions."""
    cuda = torch.cuda.is_available()
    return {
        "host": platform.node(),
        "cpu": _cpu_model(),
        "cores": len(usable_cores()),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
    }


def host_line(host: dict[str, Any]) -> str:
    """One line for people."""
    where = host["gpu"] or f"{host['cpu']}, {host['cores']} cores, {host['threads']} thread(s) used"
    packages = ", ".join(f"{name} {host['versions'][name]}" for name in ("torch", "deepspeed", "dino_ds"))
    return f"{where}; load average {host['load_average'][0]}; {packages}; {host['date']}"


def matmul_tflops(device: torch.device, dtype: torch.dtype, repeats: int = 7) -> float:
    """The best rate of a large square matrix product, in TFLOP/s: the ceiling that MFU is a share of."""
    side = _SIDES.get(device.type, _SIDES["cuda"])
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / _best_seconds(lambda: a @ b, device, repeats) / 1e12


def copy_bytes_per_second(device: torch.device, repeats: int = 7) -> float:
    """The best rate of a copy of 256 MiB, read and written bytes together: the ceiling of what only moves memory."""
    a = torch.ones(2**26, device=device)
    b = torch.empty_like(a)
    return 2 * a.numel() * a.element_size() / _best_seconds(lambda: b.copy_(a), device, repeats)


def _best_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    now = time.process_time if clock_of(device) == "cpu" else time.perf_counter
    times = []
    for _ in range(repeats + 2):
        synchronize(device)
        begin = now()
        run()
        synchronize(device)
        times.append(now() - begin)
    return min(times[2:])


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())

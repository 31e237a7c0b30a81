"""Describes the machine on which something is measured, and how fast its matrix products are."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

import torch

from dino_ds.config.crops import describe_crops
from dino_ds.config.recipe import Recipe
from dino_ds.engine import distributed
from dino_ds.engine.distributed import usable_cores
from dino_ds.method.specs.of_recipe import heads_of
from dino_ds.planning.measure.timing import time_interleaved
from dino_ds.run.environment import versions

_SIDES = {"cpu": 2048, "cuda": 8192}


def describe_host() -> dict[str, Any]:
    """The host, its processor and GPU, the cores this process may use, threads, load average, date and versions."""
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
    """`describe_host` as one line of text."""
    where = host["gpu"] or f"{host['cpu']}, {host['cores']} cores, {host['threads']} thread(s) used"
    packages = ", ".join(f"{name} {host['versions'][name]}" for name in ("torch", "deepspeed", "dino_ds"))
    return f"{where}; load average {host['load_average'][0]}; {packages}; {host['date']}"


def about(recipe: Recipe, batch: int) -> dict[str, Any]:
    """The part of a bench's result about network, batch and machine; "prototypes" are those of all heads."""
    return {
        "backbone": recipe.model.backbone,
        "crops": describe_crops(recipe.groups),
        "prototypes": sum(head.prototypes for head in heads_of(recipe).values()),
        "batch": batch,
        "processes": distributed.world_size(),
        "host": describe_host(),
    }


def heading(title: str, result: dict[str, Any]) -> str:
    """The lines above a table."""
    prototypes = f"{result['prototypes']} prototypes, " if result["prototypes"] else ""
    setting = (
        f"{result['backbone']}, crops {result['crops']} pixels, {prototypes}{result['batch']} images per process, "
        f"{result['processes']} process(es)"
    )
    return f"{title}: {setting}\n{host_line(result['host'])}\n"


def clock_name(clock: str) -> str:
    return "CPU time of one thread" if clock == "cpu" else "wall time"


def matmul_tflops(device: torch.device, dtype: torch.dtype, repeats: int = 7) -> float:
    """The best rate of a large square matrix product, in TFLOP/s: the ceiling that MFU is a share of."""
    side = _SIDES.get(device.type, _SIDES["cuda"])
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    timing = time_interleaved({"product": lambda: torch.mm(a, b)}, repeats, 2, device)["product"]
    return 2 * side**3 / min(timing.all_seconds) / 1e12


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())

"""Finds this machine's GPUs, and the memory that training may use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dino_ds.basics.host_memory import host_memory_gib

_FREE_PART = 0.9


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU that torch sees; `free_gib` is the memory that other processes leave."""

    name: str
    capability: str
    memory_gib: float
    free_gib: float


def find_gpus() -> list[VisibleGpu]:
    """List the GPUs that torch sees; [] without any."""
    if not torch.cuda.is_available():
        return []
    gpus = []
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        gpus.append(VisibleGpu(about.name, f"{about.major}.{about.minor}", total / 2**30, free / 2**30))
    return gpus


def usable_memory_gib() -> float:
    """Return the host memory that training on a CPU may use: 90 % of what is free."""
    return _FREE_PART * host_memory_gib()[1]

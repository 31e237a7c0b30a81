"""Finds this machine's GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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

"""What a machine has: its GPUs and their memory, its own memory, and which code runs on it."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

_CONTAINERS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", ""),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Of control groups, version 2 and 1: the folder, the files of the limit and of what is used, and what names begin with
in memory.stat."""
_CACHES = ("inactive_file", "active_file")
"""Files' contents, which the kernel gives up when somebody needs the memory."""
_FREE_PART = 0.9


@dataclass(frozen=True)
class Gpu:
    """Memory in GiB; `free_gib` is what other processes leave."""

    name: str
    capability: str
    memory_gib: float
    free_gib: float


def find_gpus() -> list[Gpu]:
    """The GPUs that torch sees; none on a machine without."""
    if not torch.cuda.is_available():
        return []
    gpus = []
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        gpus.append(Gpu(about.name, f"{about.major}.{about.minor}", total / 2**30, free / 2**30))
    return gpus


def host_memory_gib() -> tuple[float, float]:
    """(all, free) memory of the machine, or of the container where that has less."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    for folder, limit_file, used_file, prefix in _CONTAINERS:
        with suppress(OSError, ValueError):  # there is no limit: no such file, or "max"
            limit = int(Path(folder, limit_file).read_text())
            total, free = min(total, limit), min(free, limit)
            stat = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
            cached = sum(int(stat.get(prefix + cache, 0)) for cache in _CACHES)
            used = int(Path(folder, used_file).read_text()) - cached
            free = max(0, min(free, limit - used))
    return total / 2**30, free / 2**30


def usable_memory_gib() -> float:
    """What a CPU's trainings may take: 90 % of what is free."""
    return _FREE_PART * host_memory_gib()[1]


def hash_code() -> str:
    """A short SHA-256 of the package's files on this machine: equal on machines that run the same code."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".yaml", ".json"):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]

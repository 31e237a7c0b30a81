"""The doctor's look at the machine: memory, shared memory, limits of processes, disks."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from dino_ds.config.recipe import Recipe
from dino_ds.data.listing import cache_folder
from dino_ds.data.workers import check_shared_memory
from dino_ds.distributed import usable_cores
from dino_ds.errors import DataError
from dino_ds.measure.machine import host_memory_gib
from dino_ds.tools.doctor_finding import Finding, failure, fine, warning

_SHARED_MEMORY = "/dev/shm"
_FILES = 4096
_RUN_GIB, _TEMPORARY_GIB = 20, 2
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def look_at_system(recipe: Recipe, run_dir: Path) -> list[Finding]:
    """recipe: whose batches shared memory must hold; run_dir: where runs go."""
    return [*_memory(), _shared_memory(recipe), *_limits(), *_disks(run_dir)]


def _memory() -> Iterator[Finding]:
    total, free = host_memory_gib()
    limit = next((gib for path in _CGROUP_LIMITS if (gib := _read_gib(path)) is not None and gib < total), None)
    text = f"{len(usable_cores())} cores, {free:.1f} of {total:.1f} GiB memory free"
    text += f"; this container may use {limit:.1f} GiB" if limit is not None else ""
    if min(free, limit or free) < 2:
        yield warning("memory", text, "end other programs, or give the container more: a rank needs about 2 GiB")
    else:
        yield fine("memory", text)


def _read_gib(path: str) -> float | None:
    try:
        return int(Path(path).read_text()) / 2**30
    except (OSError, ValueError):  # absent, or "max"
        return None


def _shared_memory(recipe: Recipe) -> Finding:
    """For this machine alone, a rank on each GPU."""
    if not os.path.isdir(_SHARED_MEMORY):
        return fine("shm", "this system has no /dev/shm")
    room = os.statvfs(_SHARED_MEMORY)
    free = f"{room.f_bavail * room.f_frsize / 2**30:.2f} GiB of shared memory free"
    data, ranks = recipe.data, torch.cuda.device_count() or 1
    workers = max(0, len(usable_cores()) // ranks - 1) if data.workers is None else data.workers
    images = max(1, data.global_batch // ranks)
    try:
        check_shared_memory(ranks * recipe.batch_bytes(images), workers)
    except DataError as error:
        return failure("shm", free, str(error))
    return fine("shm", f"{free}, enough for {ranks} ranks with {workers} loader processes each")


def _limits() -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _FILES:
        cure = f"ulimit -n {most}" if most >= _FILES else f"raise the hard limit to {_FILES} in limits.conf"
        yield warning("limits", f"{files} open files", cure)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = locked != resource.RLIM_INFINITY
    text = f"{locked / 2**20:.0f} MiB of locked memory" if limited else "no limit of locked memory"
    if limited and os.path.isdir("/sys/class/infiniband"):
        yield warning("limits", text, "InfiniBand needs more: ulimit -l unlimited (docker run --ulimit memlock=-1)")
    else:
        yield fine("limits", f"{files if files >= 0 else 'any number of'} open files, {text}")


def _disks(run_dir: Path) -> Iterator[Finding]:
    places = {"runs": (run_dir, _RUN_GIB), "temporary files": (Path(tempfile.gettempdir()), _TEMPORARY_GIB)}
    places["lists of images"] = (cache_folder(), 1)
    for what, (path, wanted) in places.items():
        here = next(p for p in (path.absolute(), *path.absolute().parents) if p.is_dir())
        free = shutil.disk_usage(here).free / 2**30
        text = f"{what}: {free:.1f} GiB free in {here}"
        if not os.access(here, os.W_OK | os.X_OK):
            yield failure("disk", f"{what}: {here} can't be written to", "fix its rights, or name another place")
        elif free < wanted:
            yield warning("disk", text, f"{wanted} GiB are a fair start: remove old runs, or take another disk")
        else:
            yield fine("disk", text)

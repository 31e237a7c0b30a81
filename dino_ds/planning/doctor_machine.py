"""Findings of `doctor` about the machine: GPUs, memory, limits of processes, disks and network."""

from __future__ import annotations

import ipaddress
import os
import resource
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from dino_ds.basics.durable import cache_folder
from dino_ds.basics.host_memory import host_memory_gib
from dino_ds.config.ds_values import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.data.workers import automatic_workers, check_shared_memory
from dino_ds.engine.distributed import usable_cores
from dino_ds.errors import DataError, one_line
from dino_ds.planning.measure.machine import find_gpus
from dino_ds.planning.measure.tables import FAILURE, Finding, judge

_DRIVER = "/proc/driver/nvidia/version"
_SHARED_MEMORY, _INFINIBAND = "/dev/shm", Path("/sys/class/infiniband")
_FILES = 4096


def look_at_machine(config: DsConfig, recipe: Recipe, run_dir: str) -> Iterator[Finding]:
    """Yield findings about what a rank with this recipe and ds config needs of this machine."""
    yield from look_at_gpus(config)
    total, free = host_memory_gib()
    text = f"{len(usable_cores())} cores, {free:.1f} of {total:.1f} GiB memory free"
    yield judge("memory", text, "end other programs, or give the container more: a rank needs about 2 GiB", free < 2)
    yield look_at_shared_memory(recipe)
    yield look_at_limits()
    places = {"runs": (Path(run_dir), 20), "temporary files": (Path(tempfile.gettempdir()), 2)}
    for content, (path, wanted) in (places | {"lists of images": (cache_folder(), 1)}).items():
        yield _disk(content, path, wanted)
    yield from look_at_network()


def look_at_gpus(config: DsConfig) -> Iterator[Finding]:
    """Check the GPUs, and whether the device supports the ds config's precision."""
    gpus = find_gpus()
    for number, gpu in enumerate(gpus):
        text = f"{number}: {gpu.name}, capability {gpu.capability}, {gpu.free_gib:.1f} of {gpu.memory_gib:.1f} GiB free"
        taken = gpu.free_gib < 0.9 * gpu.memory_gib
        yield judge("gpu", text, "other processes hold memory: nvidia-smi lists them", taken)
    if not gpus:
        with warnings.catch_warnings(record=True) as caught:  # torch's warning about a driver that it can't use
            warnings.simplefilter("always")
            torch.cuda.is_available()
        yield no_gpu(one_line(caught[0].message, 200) if caught else "")
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if gpus else True
    fp16 = True if gpus else bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    able = {"fp32": True, "bf16": bf16, "fp16": fp16}
    cure = f"the ds config wants {config.precision}: take another --ds_config"
    text = ", ".join(name if has else f"no {name}" for name, has in able.items())
    yield judge("precision", text, cure, not able[config.precision], FAILURE)


def no_gpu(complaint: str) -> Finding:
    """Explain why torch finds no GPU; complaint: torch's warning about the driver, or ""."""
    if not os.path.exists(_DRIVER) and shutil.which("nvidia-smi") is None:
        cure = "with a GPU in this machine: install its driver; in a container: docker run --gpus all"
        return judge("gpu", "no GPU: training runs on the CPU, with gloo", cure)
    if torch.version.cuda is None and torch.version.hip is None:
        text, cure = "a driver is here, and this torch is built for CPUs", "install torch with CUDA"
    else:
        text = f"a driver is here, and torch (CUDA {torch.version.cuda}) finds no GPU{complaint and f': {complaint}'}"
        cure = "nvidia-smi must list the GPUs; a driver older than torch's CUDA must be updated"
    return judge("gpu", text, cure, level=FAILURE)


def look_at_shared_memory(recipe: Recipe) -> Finding:
    """Check the shared memory for loader processes, for a run on this machine alone with a rank on each GPU."""
    if not os.path.isdir(_SHARED_MEMORY):
        return judge("shm", "this system has no /dev/shm")
    disk = os.statvfs(_SHARED_MEMORY)
    free = f"{disk.f_bavail * disk.f_frsize / 2**30:.2f} GiB of shared memory free"
    data, ranks = recipe.data, torch.cuda.device_count() or 1
    workers = automatic_workers(ranks) if data.workers is None else data.workers
    try:
        check_shared_memory(ranks * recipe.batch_bytes(max(1, data.global_batch // ranks)), workers)
    except DataError as error:
        return judge("shm", free, str(error), level=FAILURE)
    return judge("shm", f"{free}, enough for {ranks} ranks with {workers} loader processes each")


def look_at_limits() -> Finding:
    """Check how many files a process may open and, with InfiniBand, how much memory it may lock."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if _INFINIBAND.is_dir() and locked != resource.RLIM_INFINITY:
        cure = "InfiniBand needs more: ulimit -l unlimited (docker run --ulimit memlock=-1)"
        return judge("limits", f"{locked / 2**20:.0f} MiB of locked memory", cure)
    cure = f"ulimit -n {most}" if most >= _FILES else f"raise the hard limit to {_FILES} in limits.conf"
    return judge("limits", f"{files if files >= 0 else 'any number of'} open files", cure, 0 <= files < _FILES)


def _disk(content: str, path: Path, wanted: int) -> Finding:
    here = next(p for p in (path.absolute(), *path.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(here).free / 2**30
    if not os.access(here, os.W_OK | os.X_OK):
        cure = "fix its rights, or name another place"
        return judge("disk", f"{content}: {here} can't be written to", cure, level=FAILURE)
    cure = f"{wanted} GiB are a fair start: remove old runs, or take another disk"
    return judge("disk", f"{content}: {free:.1f} GiB free in {here}", cure, free < wanted)


def look_at_network() -> Iterator[Finding]:
    """Check the libraries for collectives, and whether the machine's name has an address that others can reach."""
    nccl = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if dist.is_nccl_available() else "no NCCL"
    lacking = torch.cuda.is_available() and not dist.is_nccl_available()
    yield judge("network", f"gloo, {nccl}", "several GPUs need NCCL: install a torch built with it", lacking)
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        cure = f"add a line with {name} and this machine's address to /etc/hosts"
        yield judge("network", f"the machine's own name {name} has no address", cure)
    else:
        cure = "alone that is fine; among several machines put its real address into /etc/hosts"
        yield judge("network", f"{name} is {address} to itself", cure, ipaddress.ip_address(address).is_loopback)

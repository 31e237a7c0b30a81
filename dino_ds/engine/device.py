"""The device of this process, its abilities and its memory."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import torch

from dino_ds.basics.rehearsal import rehearsing
from dino_ds.engine import distributed
from dino_ds.engine.deepspeed_import import import_deepspeed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def device() -> torch.device:
    """The device of this process; in a rehearsal the CPU, whatever device is rehearsed."""
    if rehearsing():
        return torch.device("cpu")
    name = import_deepspeed().accelerator.get_accelerator().device_name()
    return torch.device(name) if name == "cpu" else torch.device(name, distributed.local_rank())


def fp16_supported() -> bool:
    return bool(import_deepspeed().accelerator.get_accelerator().is_fp16_supported())


def free_memory() -> str:
    """The free memory of this process's GPU and of the host, in words."""
    import psutil

    host = psutil.virtual_memory()
    text = f"{host.available / 2**30:.2f} of {host.total / 2**30:.1f} GiB are free on the host"
    if not torch.cuda.is_available():
        return text
    free, total = torch.cuda.mem_get_info()
    return f"{free / 2**30:.2f} of {total / 2**30:.1f} GiB are free on the GPU, {text}"


def release_memory() -> None:
    """Free the memory of ended trials and runs: DeepSpeed's hooks make reference cycles, which need the collector."""
    for _ in range(2):  # our engine, freed in the first pass, releases DeepSpeed's
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def use_deterministic_kernels() -> None:
    """Make kernels sum in the same order in every run; call this before anything is computed on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    torch.use_deterministic_algorithms(True)
    # Else torch fills all new memory with NaN to expose reads of it, which costs a pass over the memory each time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def set_convolutions(fastest: bool, tf32: bool) -> None:
    """Set whether cuDNN times its kernels on each new size of a convolution and takes the fastest, and whether it may
    compute FP32 convolutions in TF32, which is torch's default."""
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = fastest, tf32


def memory_gib() -> float:
    """Peak memory of this process: a GPU's if it has one, else the peak resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resident_mib(peak=True) / 1024


def resident_mib(peak: bool = False) -> float:
    """Resident set of this process, now or at its peak.

    Read from /proc if it exists: getrusage's maximum begins with that of the parent process.
    """
    status, wanted = Path("/proc/self/status"), "VmHWM:" if peak else "VmRSS:"
    for line in status.read_text().splitlines() if status.exists() else []:
        if line.startswith(wanted):
            return int(line.split()[1]) / 1024
    import resource

    import psutil

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)
    return largest if peak else psutil.Process().memory_info().rss / 2**20

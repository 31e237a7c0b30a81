"""The device of this process, and what it can do."""

from __future__ import annotations

import os

import torch

from dino_ds import distributed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def device() -> torch.device:
    """The device of this process."""
    from deepspeed.accelerator import get_accelerator

    name = get_accelerator().device_name()
    return torch.device(name) if name == "cpu" else torch.device(name, distributed.local_rank())


def fp16_supported() -> bool:
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().is_fp16_supported())


def use_deterministic_kernels() -> None:
    """From now on kernels add up in the same order in every run; to be called before anything is computed on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    torch.use_deterministic_algorithms(True)
    # It would write NaN into all new memory first, to find those who read it; a pass over the memory each time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def memory_gib() -> float:
    """Peak memory of this process: of the device where there is one, else the peak resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

"""Joins the process group of the launcher, and leaves it at the end."""

from __future__ import annotations

import ctypes
import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from dino_ds.basics.ports import find_free_port
from dino_ds.engine import distributed
from dino_ds.engine.deepspeed_import import import_deepspeed
from dino_ds.engine.products import on_amd, take_onednn
from dino_ds.engine.rank_variables import check_ranks
from dino_ds.engine.rendezvous import rendezvous
from dino_ds.errors import ConfigError

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""mallopt's numbers of these two parameters."""
_COMPILE_PROCESSES = 4
"""Inductor's compile processes per rank; its default is up to 32, but a step has only some 15 small kernels."""
_LARGEST_THRESHOLD = 32 * 2**20
"""Bytes of the largest allocation for which glibc reuses freed memory; it accepts no larger threshold."""


def init_distributed(timeout_minutes: float = 30.0) -> None:
    """Join the process group of the launcher (deepspeed, torchrun), or make one of a single process.

    Raises ConfigError if the variables of a rank are wrong, there is no GPU for this process, or another program uses
    rank 0's port.
    """
    os.environ.setdefault(
        "TORCHINDUCTOR_COMPILE_THREADS", str(min(_COMPILE_PROCESSES, len(distributed.usable_cores())))
    )
    if not dist.is_initialized():
        check_ranks(os.environ)  # for every command that joins; `train` has checked before its imports
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed finds this too, but warns on every rank

    _quiet_deepspeed()
    if dist.is_initialized():
        return
    timeout = timedelta(minutes=timeout_minutes)
    if "RANK" in os.environ:
        _join(timeout)
        return
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed's engine reads it
    # Without these DeepSpeed looks for MPI. They are removed again: jobs started from here are no ranks of this group.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    before = dict(os.environ)
    os.environ.update(alone)
    try:
        _join(timeout)
    finally:
        for name in alone.keys() - before.keys():
            del os.environ[name]


def _join(timeout: timedelta) -> None:
    deepspeed = import_deepspeed()
    accelerator = deepspeed.accelerator.get_accelerator()
    if accelerator.device_name() == "cpu":
        # DeepSpeed's shared-memory collectives compile for minutes at first use; gloo compiles nothing.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        _share_cores()
        _keep_freed_memory()
        if on_amd():
            take_onednn()
        with rendezvous(timeout) as connecting:
            deepspeed.init_distributed("gloo", verbose=False, timeout=connecting)
        distributed.set_timeouts(timeout.total_seconds())
    else:
        local, gpus = distributed.local_rank(), accelerator.device_count()
        if local >= gpus:
            raise ConfigError(
                f"process {local} of this machine (they count from 0) has no GPU, it sees {gpus}: start one a "
                "GPU, and let each process see all of them (srun --gpus-per-node, not --gpus-per-task)",
                said_by_me=local == gpus,  # the first such rank; rank 0 has no error
            )
        accelerator.set_device(local)
        if distributed.local_world_size() > 1:
            _share_cores()  # an offloaded optimizer steps on the host
        with rendezvous(timeout):
            deepspeed.init_distributed(verbose=False, timeout=timeout)


def _share_cores() -> None:
    """Give torch's operators on the host this rank's share of the cores, unless the user has set OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(distributed.usable_cores()) // distributed.local_world_size()))


def _keep_freed_memory() -> None:
    """Have the C library keep the memory that a step frees for the next step, instead of asking the kernel for new
    pages each time: 80,000 per step for a ViT-Ti/16 on a CPU.

    The peak grows by fragmentation only. The user's MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ or glibc tunables
    take precedence; other C libraries are left alone.
    """
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")):
        return
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_TRIM_THRESHOLD, -1)
        mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)


def leave() -> None:
    """Leave the process group at the end of the program (NCCL warns about ranks that do not); one may join again."""
    if dist.is_initialized():
        import deepspeed.comm

        deepspeed.comm.destroy_process_group()  # torch's own leaves DeepSpeed with groups that are gone


def _quiet_deepspeed() -> None:
    logger = import_deepspeed().utils.logger
    logger.setLevel(logging.WARNING if distributed.rank() == 0 else logging.ERROR)
    # To stderr, by logging's last resort: standard output is for results, such as a bench's JSON.
    logger.handlers.clear()
    logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())  # SGD and LARS: by DeepSpeed
    logger.propagate = True

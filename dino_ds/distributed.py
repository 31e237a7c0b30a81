"""Which process this is, and the few collectives we use: each is the identity on one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dino_ds.errors import UserError


def rank() -> int:
    """This process's number over all nodes; from the launcher's environment before the process group exists."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    """This process's number on its own node."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size() -> int:
    """How many processes share this node (LOCAL_SIZE by DeepSpeed's launcher, LOCAL_WORLD_SIZE by torchrun)."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)


def usable_cores() -> list[int]:
    """The cores that this process may use; of systems that don't say, all."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def sum_across_ranks(values: torch.Tensor) -> torch.Tensor:
    """The element-wise sum over all ranks, in place; every rank must call it."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def gather_objects(value: Any) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank. Small host objects only: it waits for all ranks."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def together() -> Iterator[None]:
    """A UserError of one rank inside becomes that error on all ranks, instead of a wait for the one that left.

    Every rank must enter it; nothing inside may be a collective.
    """
    error: UserError | None = None
    try:
        yield
    except UserError as mine:
        error = mine
    first = next((e for e in gather_objects(error) if e is not None), None)
    if first is not None:
        raise first


def concatenate_across_ranks(rows: torch.Tensor) -> torch.Tensor:
    """Rows (b_r, ...) of every rank -> (sum of b_r, ...), in rank order, on every rank; b_r may differ."""
    if world_size() == 1:
        return rows
    counts = gather_objects(rows.shape[0])
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


class LaggedScalar:
    """A device scalar that the host reads one push late, so that it never waits for the device."""

    def __init__(self) -> None:
        self._newest: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self._readable: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def push(self, value: torch.Tensor) -> None:
        self._readable = self._newest
        if not value.is_cuda:
            self._newest = (value.detach().clone(), None)
            return
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        host.copy_(value.detach(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._newest = (host, event)

    def read(self) -> float:
        """The value before the newest one; 0 until there is one."""
        if self._readable is None:
            return 0.0
        host, event = self._readable
        if event is not None:
            event.synchronize()
        return float(host)


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()

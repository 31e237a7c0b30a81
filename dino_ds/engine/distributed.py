"""Rank and world size, and the collectives of dino_ds, each of which is the identity on one process."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from dino_ds.basics.ranges import rehearsing
from dino_ds.errors import UserError

_thread = threading.local()


@contextmanager
def alone() -> Iterator[None]:
    """A context in which this thread acts as the only rank: it neither waits for other ranks nor depends on them."""
    _thread.alone = True
    try:
        yield
    finally:
        _thread.alone = False


def _is_alone() -> bool:
    return rehearsing() or getattr(_thread, "alone", False)


def rank() -> int:
    """This process's number over all nodes; from the launcher's environment before the process group exists."""
    if _is_alone():
        return 0
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    if _is_alone():
        return 1
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    """This process's number on its own node."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size() -> int:
    """Number of processes on this node (LOCAL_SIZE by DeepSpeed's launcher, LOCAL_WORLD_SIZE by torchrun)."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)


def hidden_bar(wanted: bool = True) -> bool | None:
    """The value of tqdm's `disable` with which only rank 0 shows a bar, on a terminal."""
    return None if wanted and rank() == 0 else True


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def sum_across_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum element-wise over all ranks, in place; every rank must call this."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def max_across_ranks(values: torch.Tensor) -> torch.Tensor:
    """Take the element-wise maximum over all ranks, in place; every rank must call this."""
    if world_size() > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


class GatherRows(torch.autograd.Function):
    """Gathers rows (v, n, d), n equal on all ranks, to (v, ranks * n, d) in rank order; every rank must call it. The
    gradient of a rank's rows is the sum of the gradients that all ranks have for them."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.rows = rows.shape[1]
        if world_size() == 1:
            return rows.clone()
        parts = [torch.empty_like(rows) for _ in range(world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        total = grad_outputs[0].contiguous()
        if world_size() > 1:
            dist.all_reduce(total)
        return total.narrow(1, rank() * ctx.rows, ctx.rows)


def gather_in_place(whole: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], group: Any) -> None:
    """Gather all ranks' `shards` (n,), views of `whole`, into the tensors `whole` (ranks * n,), by one collective."""
    with dist.distributed_c10d._coalescing_manager(group):  # as DeepSpeed does it
        for flat, shard in zip(whole, shards, strict=True) if dist.get_world_size(group) > 1 else ():
            dist.all_gather_into_tensor(flat, shard, group=group)


def broadcast_from_first(values: torch.Tensor) -> torch.Tensor:
    """Copy rank 0's values to all ranks, in place; every rank must call this."""
    if world_size() > 1:
        dist.broadcast(values, 0)
    return values


def gather_objects(value: Any) -> list[Any]:
    """Gather every rank's `value`, in rank order, on every rank. For small host objects: it waits for all ranks."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise a UserError of one rank in this block on all ranks, which would otherwise wait for that rank. Every rank
    must enter the block; it may not contain collectives."""
    error: UserError | None = None
    try:
        yield
    except UserError as mine:
        error = mine
    for number, first in enumerate(gather_objects(error)):
        if first is not None:
            if first.said_by_me is None:
                first.said_by_me = number == rank()
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


class RankFlags:
    """Flags that ranks share once per step, in an all-reduce that happens anyway. A flag keeps its value until it is
    changed; sums are read one step late, so that the host never waits for the device. They are FP32: values are small
    whole numbers, and value x ranks < 2^24."""

    def __init__(self, names: tuple[str, ...], where: torch.device) -> None:
        self._mine = dict.fromkeys(names, 0.0)
        self._sent = torch.zeros(len(names), device=where)
        self._changed = False
        self._sums: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque(maxlen=2)

    def set(self, name: str, value: float = 1.0) -> None:
        """Change this rank's flag; signal handlers and other threads may call it."""
        self._mine[name] = value
        self._changed = True

    def own(self, name: str) -> float:
        return self._mine[name]

    def tensor_to_sum(self) -> torch.Tensor:
        """This rank's flags (names,) on the device, to be summed over ranks."""
        if self._changed:
            self._changed = False
            for i, value in enumerate(self._mine.values()):
                self._sent[i].fill_(value)
        return self._sent

    def push(self, sums: torch.Tensor) -> None:
        """Receive the sums over ranks; called once per step on every rank."""
        host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=sums.is_cuda)
        host.copy_(sums.detach(), non_blocking=True)
        event = torch.cuda.Event() if sums.is_cuda else None
        if event is not None:
            event.record()
        self._sums.append((host, event))

    def count(self, name: str) -> float:
        """A flag's sum over ranks in the step before the last, the same on every rank; 0 in the first steps."""
        if len(self._sums) < 2:
            return 0.0
        host, event = self._sums[0]
        if event is not None:
            event.synchronize()
        return float(host[list(self._mine).index(name)])


def set_store_flag(word: str) -> None:
    """Set a flag in the process group's store, for `store_flag_is_set` on any rank; not a collective."""
    if world_size() > 1:
        dist.distributed_c10d._get_default_store().set(word, "1")


def store_flag_is_set(word: str) -> bool:
    """Whether any rank has set the flag `word`; asks rank 0's store."""
    return world_size() > 1 and bool(dist.distributed_c10d._get_default_store().check([word]))


def set_timeouts(seconds: float) -> None:
    """Set the timeout of every process group; those that DeepSpeed makes do not inherit the first one's."""
    set_one = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in list(dist.distributed_c10d._world.pg_map):
        set_one(timedelta(seconds=seconds), group)


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()

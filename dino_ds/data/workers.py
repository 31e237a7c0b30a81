"""Loader processes: their number, start and end."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from typing import Any

import torch
from torch.utils.data import DataLoader

from dino_ds.basics.ports import shorten_socket_names
from dino_ds.config.fields import MAX_WORKERS, PREFETCHED_BATCHES
from dino_ds.data.base import Source
from dino_ds.engine.distributed import local_world_size, usable_cores
from dino_ds.errors import STOP_SIGNALS, DataError

_SHARED_MEMORY = "/dev/shm"
_REPORT_SECONDS = 5
"""Time within which the exit of a process is known after its pipe broke."""
_HINTS = {
    "SIGKILL": ". Most often memory has run out: lower data.workers or the micro-batch",
    "SIGBUS": ". Shared memory has run out: start the container with a larger --shm-size",
    "SIGSEGV": ". A decoder crashed on a damaged image",
}


def automatic_workers(ranks: int | None = None) -> int:
    """Number of workers of each of a node's `ranks`: its share of the cores, less one for its training; at most 16.

    The default is the number of ranks that run on this node.
    """
    return max(0, min(len(usable_cores()) // (ranks or local_world_size()) - 1, MAX_WORKERS))


def worker_options(workers: int | None) -> dict[str, Any]:
    """Arguments of torch's DataLoader for `workers` processes per rank; 0 = in this process, None = automatic."""
    workers = automatic_workers() if workers is None else workers
    return {
        "num_workers": workers,
        "prefetch_factor": PREFETCHED_BATCHES if workers else None,
        "worker_init_fn": _start_worker if workers else None,
        "multiprocessing_context": _process_context() if workers else None,
        "pin_memory": torch.cuda.is_available(),
        # Otherwise the iterator's own seed is drawn from torch's global generator.
        "generator": torch.Generator().manual_seed(0),
    }


def check_shared_memory(batch_bytes: int, workers: int | None) -> None:
    """Raises DataError if the batches of this node's ranks exceed shared memory: a writer past its end is killed."""
    workers = automatic_workers() if workers is None else workers
    if workers == 0 or not os.path.isdir(_SHARED_MEMORY):
        return
    # The batches that wait for the training process, and the one that it is reading.
    needed = (workers * PREFETCHED_BATCHES + 1) * batch_bytes * local_world_size()
    room = os.statvfs(_SHARED_MEMORY)
    free = room.f_bavail * room.f_frsize
    if needed > free:
        gib = math.ceil(needed / 2**30 * 1.1)
        raise DataError(
            f"{workers} loader processes a rank need {needed / 2**30:.2f} GiB of shared memory for batches of "
            f"{batch_bytes / 2**20:.0f} MiB, and {_SHARED_MEMORY} has {free / 2**30:.2f} GiB free: start the container "
            f"with --shm-size {gib}g or --ipc=host, lower data.workers or the micro-batch, or use data.augment device "
            "(a quarter of data.augment worker)"
        )


def handle_worker_crash(batches: object) -> str | None:
    """If a process of a torch DataLoader's iterator has died, kill all; returns which one died and why, or None."""
    workers = list(getattr(batches, "_workers", []))
    wait([worker.sentinel for worker in workers], _REPORT_SECONDS)
    dead = next((worker for worker in workers if worker.exitcode is not None), None)
    if dead is None:
        return None
    kill_workers(batches)
    name = {-number: number.name for number in signal.Signals}.get(dead.exitcode, "")
    how = f"was killed by {name}" if name else f"ended with code {dead.exitcode}"
    return f"loader process {dead.pid} {how}{_HINTS.get(name, '')}"


def handle_worker_hang(batches: object, seconds: float) -> str:
    """Kill all processes of a torch DataLoader's iterator, which returned no batch for `seconds`; returns a message."""
    pids = ", ".join(str(worker.pid) for worker in getattr(batches, "_workers", []))
    kill_workers(batches)
    return f"loader processes {pids} gave no batch for {seconds:.0f} s. Most often a disk or network does not answer"


def kill_workers(batches: object) -> None:
    """Kill loader processes without asking them, unlike `stop_workers`: they may wait for a dead one's lock."""
    for worker in getattr(batches, "_workers", []):
        worker.kill()


def stop_workers(batches: object) -> None:
    """End the processes of a torch DataLoader's iterator, even if a traceback still refers to it."""
    if stop := getattr(batches, "_shutdown_workers", None):  # an iterator without processes lacks it
        stop()


@contextmanager
def started(loader: DataLoader[Any], source: Source) -> Iterator[Iterator[Any]]:
    """Iterator over a torch DataLoader of this source's images, whose processes end with the block."""
    with main_module_left_out(unless_defines=source):
        batches = iter(loader)
    try:
        yield batches
    finally:
        stop_workers(batches)


@contextmanager
def main_module_left_out(unless_defines: Source) -> Iterator[None]:
    """Keep new processes from importing the parent's main script, and with it DeepSpeed, unless the source is defined
    there."""
    main = sys.modules["__main__"]
    spec, file = main.__spec__, getattr(main, "__file__", None)
    defined = getattr(unless_defines, "whole", unless_defines)  # the whole source of a `Part`
    if type(defined).__module__ == "__main__" or file is None:
        yield
        return
    try:
        main.__spec__, main.__file__ = None, None
        yield
    finally:
        main.__spec__, main.__file__ = spec, file


def _process_context() -> ForkServerContext:
    """Context that forks workers from a small server process, which has imported the loader once.

    A plain fork would copy a process in which gloo, NCCL, CUDA and OpenMP threads hold locks; spawning would import
    torch in each worker, 5 seconds of a core apiece.
    """
    shorten_socket_names()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "dino_ds.data.loader"])
    # The server inherits the mask, and so does a worker until `_start_worker`: a signal to all processes ends neither.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # this unblocks some of them here
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _start_worker(worker: int) -> None:
    # One image at a time on one core: the cores are shared out over the workers already.
    torch.set_num_threads(1)
    # Stop signals reach all processes; only the parent knows when the last batch is consumed.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End this worker with the training process: torch only watches the server, which waits for its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

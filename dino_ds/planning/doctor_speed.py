"""Measurements of `doctor`: the speed of reading images, and of a sum over two processes."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from dino_ds.config.recipe import Recipe
from dino_ds.data.base import UnreadableImage
from dino_ds.data.decode import EncodedImage
from dino_ds.data.find_range import with_value_range
from dino_ds.data.sources import training_source
from dino_ds.engine import distributed
from dino_ds.errors import UserError
from dino_ds.planning.doctor_software import FAILURE, Finding, judge
from dino_ds.planning.measure.memory import ChildFailed, run_in_children
from dino_ds.planning.measure.timing import synchronize

_SAMPLE = 200
_SECONDS = 4.0
"""The longest time for reading, and again for decoding."""
_REPEATS = 7
_SMALL_BYTES, _LARGE_BYTES = 4 * 2**10, 64 * 2**20
_LIMIT_SECONDS = 120.0


def measure_data(recipe: Recipe) -> Iterator[Finding]:
    """The rates at which one process reads and decodes a random sample of the images."""
    data = recipe.data
    if data.source == "folder" and not data.root and not data.mixture:
        yield judge("data", "not looked at: give --data.root")
        return
    try:
        source = training_source(data)
        with_value_range(recipe, source)
    except UserError as error:
        yield judge("data", f"data.source {data.source}", str(error), level=FAILURE)
        return
    sample = random.sample(range(len(source)), min(_SAMPLE, len(source)))
    text, cure, encoded = f"{len(source)} images", "", list[bytes]()
    if hasattr(source, "read"):
        done, seconds, bad = _timed(lambda index: encoded.append(source.read(index)), sample)
        most, channels = data.max_pixels, recipe.model.in_chans
        decoded, decode_seconds, more = _timed(
            lambda file: EncodedImage(file, "", most, channels=channels).values(), encoded
        )
        bad, reads, decodes = bad + more, done / seconds, decoded / decode_seconds
        text += f"; {reads:.0f} files/s, {sum(map(len, encoded)) / seconds / 1e6:.0f} MB/s read by one process"
        text += f" (cached ones are faster); {decodes:.0f} images/s decoded by a core"
        if reads < decodes:
            cure = "the disk is what waits: `dino-ds shard` makes large files of them, a local disk is faster"
    else:
        done, seconds, bad = _timed(source.load, sample)
        text += f"; {done / seconds:.0f} images/s a core"
    yield judge("data", text, cure)
    if bad:
        cure = "`dino-ds look-data` names them; data.max_bad_fraction is how many a run takes"
        yield judge("data", f"{bad} of {done} images can't be read", cure)


def _timed(act: Callable[[Any], object], things: list[Any]) -> tuple[int, float, int]:
    """Things done in the time allowed, the seconds that it took, and the number of unreadable images."""
    done = bad = 0
    begin = time.perf_counter()
    for thing in things:
        done += 1
        try:
            act(thing)
        except UnreadableImage:
            bad += 1
        if time.perf_counter() - begin > _SECONDS:
            break
    return done, max(time.perf_counter() - begin, 1e-9), bad


def measure_sums() -> Iterator[Finding]:
    """An all-reduce of two processes: NCCL on two GPUs, gloo without a GPU."""
    if torch.cuda.device_count() == 1:
        yield judge("all-reduce", "one GPU: there is nothing to sum")
        return
    try:
        found = run_in_children("dino_ds.planning.doctor_speed:sum_tensors", 2, bare=True)[0].value
    except ChildFailed as error:
        cure = "name an interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO says more"
        yield judge("all-reduce", str(error)[:300], cure, level=FAILURE)
        return
    text = (
        f"2 processes, {found['backend']}: {found['small_seconds'] * 1e6:.0f} us for {_SMALL_BYTES // 1024} KiB, "
        f"{_LARGE_BYTES / found['large_seconds'] / 1e9:.2f} GB/s for {_LARGE_BYTES // 2**20} MiB"
    )
    wrong = not found["right"]
    text = f"the sum is wrong; {text}" if wrong else text
    yield judge("all-reduce", text, "test the memory of this machine", wrong, FAILURE)


def sum_tensors() -> dict[str, Any]:
    """Median seconds of a small and a large all-reduce, and whether the sum is right; each rank calls it.

    A process that has not joined a process group joins that of the environment, by torch alone.
    """
    watch = threading.Timer(_LIMIT_SECONDS, _give_up)
    watch.daemon = True
    watch.start()
    on_gpu = torch.cuda.is_available()
    if not dist.is_initialized():
        if on_gpu:
            torch.cuda.set_device(distributed.local_rank())
        dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", distributed.local_rank()) if on_gpu else torch.device("cpu")
    small, large = (_time_sum(torch.zeros(size // 4, device=device)) for size in (_SMALL_BYTES, _LARGE_BYTES))
    ones = torch.ones(1000, device=device)
    dist.all_reduce(ones)
    watch.cancel()
    right = bool((ones == dist.get_world_size()).all())
    return {"backend": dist.get_backend(), "small_seconds": small, "large_seconds": large, "right": right}


def _time_sum(values: torch.Tensor) -> float:
    seconds = []
    for _ in range(_REPEATS):
        dist.barrier()
        synchronize(values.device)
        begin = time.perf_counter()
        dist.all_reduce(values)
        synchronize(values.device)
        seconds.append(time.perf_counter() - begin)
    return median(seconds[2:])


def _give_up() -> None:
    print(f"two processes have not summed a tensor within {_LIMIT_SECONDS:.0f} s", file=sys.stderr, flush=True)
    os._exit(1)

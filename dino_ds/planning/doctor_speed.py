"""What `doctor` measures: how fast the images can be read, and how fast two processes sum a tensor."""

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
from dino_ds.data.decode import MAX_PIXELS, EncodedImage
from dino_ds.data.find_range import with_value_range
from dino_ds.data.sources import build_source
from dino_ds.engine import distributed
from dino_ds.errors import UserError
from dino_ds.planning.doctor_software import Finding, failure, fine, warning
from dino_ds.planning.measure.memory import ChildFailed, run_in_children
from dino_ds.planning.measure.timing import synchronize

_SAMPLE = 200
_SECONDS = 4.0
"""At most for reading, and again for decoding."""
_REPEATS = 7
_SMALL_BYTES, _LARGE_BYTES = 4 * 2**10, 64 * 2**20
_LIMIT_SECONDS = 120.0


def measure_data(recipe: Recipe) -> list[Finding]:
    """A random sample of the images, read and decoded on one core."""
    data = recipe.data
    if data.source == "folder" and not data.root:
        return [fine("data", "not looked at: give --data.root")]
    try:
        source = build_source(data.source, data.root, "train", data.download)
        with_value_range(recipe, source)
    except UserError as error:
        return [failure("data", f"data.source {data.source}", str(error))]
    sample = random.sample(range(len(source)), min(_SAMPLE, len(source)))
    if not hasattr(source, "read"):
        done, seconds, bad = _timed(source.load, sample)
        return [fine("data", f"{len(source)} images; {done / seconds:.0f} images/s a core"), *_bad(bad, done)]
    encoded: list[bytes] = []
    read, read_seconds, bad = _timed(lambda index: encoded.append(source.read(index)), sample)
    decoded, decode_seconds, more = _timed(
        lambda data: EncodedImage(data, "", MAX_PIXELS, channels=recipe.model.in_chans).values(), encoded
    )
    reads, decodes = read / read_seconds, decoded / decode_seconds
    rate = sum(map(len, encoded)) / read_seconds / 1e6
    text = f"{len(source)} images; {reads:.0f} files/s, {rate:.0f} MB/s read by one process"
    text += f" (cached ones are faster); {decodes:.0f} images/s decoded by a core"
    if reads < decodes:
        remedy = "the disk is what waits: `dino-ds shard` makes large files of them, a local disk is faster"
        return [warning("data", text, remedy), *_bad(bad + more, read)]
    return [fine("data", text), *_bad(bad + more, read)]


def _timed(act: Callable[[Any], object], things: list[Any]) -> tuple[int, float, int]:
    """(how many, seconds, how many could not be read), for as many as the time allows."""
    done = bad = 0
    begin = time.perf_counter()
    for thing in things:
        try:
            act(thing)
        except UnreadableImage:
            bad += 1
        done += 1
        if time.perf_counter() - begin > _SECONDS:
            break
    return done, max(time.perf_counter() - begin, 1e-9), bad


def _bad(count: int, of: int) -> Iterator[Finding]:
    if count:
        remedy = "`dino-ds look-data` names them; data.max_bad_fraction is how many a run takes"
        yield warning("data", f"{count} of {of} images can't be read", remedy)


def measure_sums() -> list[Finding]:
    """An all-reduce of two processes: NCCL on two GPUs, gloo without a GPU."""
    if torch.cuda.device_count() == 1:
        return [fine("all-reduce", "one GPU: there is nothing to sum")]
    try:
        found = run_in_children("dino_ds.planning.doctor_speed:sum_tensors", 2, bare=True)[0].value
    except ChildFailed as error:
        remedy = "name an interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO says more"
        return [failure("all-reduce", str(error)[:300], remedy)]
    text = (
        f"2 processes, {found['backend']}: {found['small_seconds'] * 1e6:.0f} us for {_SMALL_BYTES // 1024} KiB, "
        f"{_LARGE_BYTES / found['large_seconds'] / 1e9:.2f} GB/s for {_LARGE_BYTES // 2**20} MiB"
    )
    if not found["right"]:
        return [failure("all-reduce", f"the sum is wrong; {text}", "test the memory of this machine")]
    return [fine("all-reduce", text)]


def sum_tensors() -> dict[str, Any]:
    """On each rank: seconds of a small and a large all-reduce, medians, and whether the sum is right.

    A process that has not joined a process group joins that of the environment, by torch alone.
    """
    watch = threading.Timer(_LIMIT_SECONDS, _give_up)
    watch.daemon = True
    watch.start()
    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(distributed.local_rank())
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    small = _seconds_of_sum(_SMALL_BYTES)
    large = _seconds_of_sum(_LARGE_BYTES)
    ones = torch.ones(1000, device=_device())
    dist.all_reduce(ones)
    watch.cancel()
    return {
        "backend": dist.get_backend(),
        "small_seconds": small,
        "large_seconds": large,
        "right": bool((ones == dist.get_world_size()).all()),
    }


def _device() -> torch.device:
    return torch.device("cuda", distributed.local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def _seconds_of_sum(size: int) -> float:
    values = torch.zeros(size // 4, device=_device())
    seconds = []
    for _ in range(_REPEATS):
        dist.barrier()
        synchronize(_device())
        begin = time.perf_counter()
        dist.all_reduce(values)
        synchronize(_device())
        seconds.append(time.perf_counter() - begin)
    return median(seconds[2:])


def _give_up() -> None:
    print(f"two processes have not summed a tensor within {_LIMIT_SECONDS:.0f} s", file=sys.stderr, flush=True)
    os._exit(1)

"""Restores what a run changes in a Python program: environment, random generators, torch's settings, process group."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from dino_ds.cli.preflight import adopt_ranks
from dino_ds.errors import ConfigError


@contextmanager
def as_it_was() -> Iterator[None]:
    """Make this process train alone, and restore its environment and sys.path afterwards. Raises ConfigError in one of
    several processes that a launcher has started."""
    before, path = dict(os.environ), sys.path[:]
    try:
        adopt_ranks(os.environ)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigError(
                "this process is one of several that a launcher has started: call this in one process, or give the "
                "launcher the command in place of this program"
            )
        yield
    finally:
        sys.path[:] = path
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def torch_as_it_was() -> Iterator[None]:
    """Also restore torch's settings and all random generators, and leave a process group that was joined meanwhile.

    Inside, gradients, autocast and the default dtype are as in the process of a command.
    """
    import torch
    import torch.distributed as dist

    from dino_ds.engine.device import release_memory
    from dino_ds.engine.process import leave
    from dino_ds.evals.features import keep_generators

    cuda, joined, threads = torch.cuda.is_initialized(), dist.is_initialized(), torch.get_num_threads()
    dtype, tf32 = torch.get_default_dtype(), torch.backends.cudnn.allow_tf32
    exact = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if cuda:
        torch.cuda.reset_peak_memory_stats()  # a run's peak begins at the memory in use, not the last peak
    with (
        as_it_was(),
        keep_generators(*(torch.device("cuda", i) for i in range(torch.cuda.device_count() if cuda else 0))),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        try:
            torch.set_default_dtype(torch.float32)
            yield
        except BaseException as error:
            _clear_frames(error)
            raise
        finally:
            torch.set_default_dtype(dtype)
            if not joined:
                leave()
            release_memory()
            torch.set_num_threads(threads)
            torch.backends.cudnn.allow_tf32 = tf32
            torch.use_deterministic_algorithms(exact[0], warn_only=exact[1])


def _clear_frames(error: BaseException | None) -> None:
    """Free the variables in an error's frames: a notebook keeps the last error, and the next cell needs the memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

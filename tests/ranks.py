"""Run a function on real gloo ranks, cheaply: worker processes are forked once and serve many tests.

    results = run_on_ranks(function, *args, world=2)     # function(*args) on each rank -> [its value of rank 0, 1, ...]

`function` must be importable (defined at the top of a test module).
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

from dino_ds.basics.machine import find_free_port
from tests.fork_server import fork_server

_pools: dict[int, _Pool] = {}
_LIMIT_SECONDS = 600


def run_on_ranks(function: Callable[..., Any], *args: Any, world: int = 2, **kwargs: Any) -> list[Any]:
    if world not in _pools:
        _pools[world] = _Pool(world)
    try:
        return _pools[world].run(function, args, kwargs)
    except BaseException:
        _pools.pop(world).close()
        raise


class _Pool:
    def __init__(self, world: int) -> None:
        port = find_free_port()
        self._pipes, self._processes = [], []
        for rank in range(world):
            ours, theirs = multiprocessing.Pipe()
            self._processes.append(fork_server().fork(_serve, theirs, rank, world, port))
            theirs.close()
            self._pipes.append(ours)
        atexit.register(self.close)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_LIMIT_SECONDS):
                raise TimeoutError(f"rank {rank} gave no answer in {_LIMIT_SECONDS} s")
            good, value = pipe.recv()
            if not good:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results.append(value)
        return results

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _serve(pipe: Any, rank: int, world: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
    )
    from dino_ds.engine.process import init_distributed

    init_distributed()
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            pipe.send((True, function(*args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))

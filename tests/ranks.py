"""Run a function on real gloo ranks, cheaply: worker processes are started once and serve many tests.

    results = run_on_ranks(function, *args, world=2)     # function(*args) on each rank -> [its value of rank 0, 1, ...]

`function` must be importable (defined at the top of a test module).
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

_pools: dict[int, _Pool] = {}
_LIMIT_SECONDS = 300


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
        context = multiprocessing.get_context("spawn")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self._pipes, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world, port), daemon=False)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
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
            process.terminate()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


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
    import torch

    torch.set_num_threads(1)
    from dino_ds.engine.process import init_distributed

    pretend_fp16()
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


def pretend_fp16() -> None:
    """DeepSpeed refuses fp16 on CPUs without fp16 units; torch computes it all the same, overflow included."""
    import torch
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]

"""Run a function on real gloo ranks, cheaply: worker processes are forked once and serve many tests.

    results = run_on_ranks(function, *args, world=2)     # function(*args) on each rank -> [its value of rank 0, 1, ...]

`function` must be importable (defined at the top of a test module).

The fork server imports torch and DeepSpeed once and forks processes that train, at work after a tenth of a second. It
never computes and never joins a process group, so that it has one thread and no lock is held when it forks. It adopts
the children of a process that dies (PR_SET_CHILD_SUBREAPER): nothing that a job starts can hide.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
import unittest.mock
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dino_ds.basics.machine import find_free_port

_pools: dict[int, _Pool] = {}
_LIMIT_SECONDS = 600
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
_POLL_SECONDS = 0.02
_server: ForkServer | None = None


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
            self._processes.append(fork_server().fork(_serve_rank, theirs, rank, world, port))
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


def _serve_rank(pipe: Any, rank: int, world: int, port: int) -> None:
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


@dataclass(frozen=True)
class Work:
    """A call of an importable function in a process of its own; its output goes to the file `output` if given."""

    function: Callable[..., int | None]
    args: tuple[Any, ...]
    output: Path | None = None


def fork_server() -> ForkServer:
    """This process's fork server, started at the first call."""
    global _server
    if _server is None or not _server.is_alive():
        _server = ForkServer()
    return _server


class ForkServer:
    """The driver's end of the pipe to `_serve`. `launchers`: processes whose children are their own affair."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=False)
        # In time for whatever the main module imports: NumPy's threads would hold locks in the forked ranks.
        with unittest.mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
            self._process.start()
        theirs.close()
        self.launchers: set[int] = set()
        self.process = int(self._receive(600))
        atexit.register(self.close)

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def fork(self, function: Callable[..., int | None], *args: Any, output: Path | None = None) -> int:
        """Call `function(*args)` in a new process, with its value as exit code; return the process's id."""
        self._pipe.send(Work(function, args, output))
        process = int(self._receive(120))
        self.launchers.add(process)
        return process

    def ended(self) -> dict[int, tuple[int, float]]:
        """Processes that have ended since the last call: {process id: (exit code, time)}."""
        self._pipe.send(None)
        found: dict[int, tuple[int, float]] = self._receive(120)
        return found

    def _receive(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"the fork server gave no answer in {seconds} s")
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def _serve(pipe: Any) -> None:
    """Answer Work with a process id, and None with {process id: (exit code, time)} of ended processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in pytest reaches the whole terminal; the pipe says the end
    _import_all()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
        assert len(os.listdir("/proc/self/task")) == 1, "a thread would hold locks in the forked ranks"
    ended: dict[int, tuple[int, float]] = {}
    pipe.send(os.getpid())
    while True:
        if pipe.poll(_POLL_SECONDS):
            try:
                work = pipe.recv()
            except EOFError:
                return
            pipe.send(dict(ended) if work is None else fork(work))
            del work  # its pipes are the new process's alone: they end with it
        ended.update(_reap())


def _import_all() -> None:
    """Import what a training run imports (found by comparing sys.modules), which takes seconds, once for all ranks."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from dino_ds.engine.process import import_deepspeed

    import_deepspeed()
    import fire  # noqa: F401
    import PIL.Image
    import torch
    import torch._inductor.compile_fx
    import torch.utils.tensorboard
    import torchvision  # noqa: F401

    import dino_ds.cli.main
    import dino_ds.method.dino
    import dino_ds.method.ema
    import dino_ds.models.vit
    import dino_ds.train  # noqa: F401

    PIL.Image.init()
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # against the death of a machine, which no test brings about
    pretend_fp16()
    gc.collect()
    gc.freeze()  # a pass over a million objects of imports takes 0.4 s, and copies their pages into every rank


def pretend_fp16() -> None:
    """Let DeepSpeed use fp16 on CPUs without fp16 units: torch computes it all the same, overflow included."""
    import torch
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]


def _reap() -> dict[int, tuple[int, float]]:
    found = {}
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if process == 0:
            return found
        found[process] = (os.waitstatus_to_exitcode(status), time.monotonic())


def fork(work: Work) -> int:
    """Fork and return the id of the new process."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        _become_a_script(work.output)
        code = work.function(*work.args) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _become_a_script(output: Path | None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    atexit._clear()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if output:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for target in (1, 2):
            os.dup2(descriptor, target)

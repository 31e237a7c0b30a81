"""Faults, and when they happen: hooks that a test has run in each rank before it starts; the product knows of none.

A fault is a picklable function of the rank: `at_step(8, (1,), kill)` kills rank 1 before it computes step 8. What
happens at a fault is an act: `kill`, `sleep`, `send(SIGTERM)`, ...
"""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Act = Callable[[], None]
Fault = Callable[[int], None]


@dataclass(frozen=True)
class Planned:
    """A call of a function of this module, which can be pickled: of a fault with the rank, of an act with nothing."""

    name: str
    args: tuple[Any, ...]
    more: dict[str, Any]

    def __call__(self, *rank: int) -> None:
        globals()[self.name].__wrapped__(*rank, *self.args, **self.more)


def planned(function: Callable[..., None]) -> Callable[..., Planned]:
    """Make a call without the rank a plan of a call."""

    @functools.wraps(function)
    def plan(*args: Any, **more: Any) -> Planned:
        return Planned(function.__name__, args, more)

    return plan


def _before(owner: Any, name: str, happens: Callable[..., bool], do: Act, times: int = 10**9) -> None:
    """`do` before those calls of a function for which `happens` is true of the arguments, at most so many `times`."""
    original, done = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(done) < times and happens(*args):
            done.append(True)
            do()
        return original(*args, **kwargs)

    setattr(owner, name, call)


# Faults: place and time.


@planned
def at_step(rank: int, step: int, on: tuple[int, ...], do: Act, times: int = 1) -> None:
    """`do` before the first micro-batch of the optimizer steps from `step` (the first is 1), `times` of them."""
    from dino_ds.method.step import TrainingStep

    if rank in on:
        _before(TrainingStep, "micro_batch", lambda self, *_: self.applied_steps + 1 >= step, do, times)


@planned
def at_once(rank: int, on: tuple[int, ...], do: Act) -> None:
    if rank in on:
        do()


@planned
def in_save(rank: int, step: int, on: tuple[int, ...], do: Act, written: float = 0.5, times: int = 1) -> None:
    """`do` when a part of a checkpoint file is written; the steps from `step`, `times` of them."""
    from dino_ds.checkpoint import manifest as checkpoint_writing

    original, done = checkpoint_writing.write_tensors, []

    def write_tensors(path: Path, *args: Any) -> Any:
        record = original(path, *args)
        if int(path.parent.name.rpartition("_")[2]) >= step and len(done) < times:
            done.append(True)
            os.truncate(path, int(record.bytes * written))
            do()
        return record

    if rank in on:
        checkpoint_writing.write_tensors = write_tensors


@planned
def before_latest(rank: int, step: int, do: Act) -> None:
    """`do` on rank 0 when a checkpoint is in place and `latest` does not name it yet."""
    from dino_ds.checkpoint import folder

    if rank == 0:
        _before(folder, "replace_file", lambda path, text: path.name == "latest" and str(step) in str(text), do)


@planned
def loss_times(rank: int, factor: float, step: int, on: tuple[int, ...], times: int = 10**9) -> None:
    """The loss of `times` micro-batches from optimizer step `step` on, multiplied."""
    from dino_ds.method.dino import DinoTerm
    from dino_ds.method.step import TrainingStep

    original, steps, seen, done = DinoTerm.loss, TrainingStep.micro_batch, [0], []

    def micro_batch(self: TrainingStep, *args: Any) -> Any:
        seen[0] = self.applied_steps + 1
        return steps(self, *args)

    def call(self: DinoTerm, *args: Any) -> Any:
        out = original(self, *args)
        if seen[0] < step or len(done) >= times:
            return out
        done.append(True)
        return out._replace(loss=out.loss * factor)

    if rank in on:
        TrainingStep.micro_batch, DinoTerm.loss = micro_batch, call


@planned
def at_call(rank: int, method: str, number: int, on: tuple[int, ...], do: Act) -> None:
    """`do` before call `number` of a method ("module:Class.name"; the first is 1) and those that follow."""
    module, _, name = method.partition(":")
    calls = itertools.count(1)
    if rank in on:
        owner = getattr(importlib.import_module(module), name.split(".")[0])
        _before(owner, name.split(".")[1], lambda *_: next(calls) >= number, do)


@planned
def held(rank: int, step: int, on: tuple[int, ...]) -> None:
    """Step `step` is not computed before the run is asked to stop, or the test says `Job.go_on`: whatever happens to
    it from outside happens in mid-run, however slow the machine is."""
    from dino_ds.run.guards import StopRequests

    install, asked = StopRequests.install, []

    def note(self: StopRequests, *args: Any) -> None:
        asked[:] = [self.requested_anywhere]
        install(self, *args)

    def hold() -> None:
        end = time.monotonic() + 200
        while not asked[0]() and not Path("go_on").exists() and time.monotonic() < end:
            time.sleep(0.02)

    StopRequests.install = note
    at_step(step, on, hold)(rank)


@planned
def forwarded_within(rank: int, seconds: float) -> None:
    """A second signal is the first one, forwarded, for so long."""
    importlib.import_module("dino_ds.run.guards").FORWARDED_SECONDS = seconds


@planned
def both(rank: int, *faults: Fault) -> None:
    for fault in faults:
        fault(rank)


def slow_start(rank: int) -> None:
    """Says when the ranks have joined, and then waits."""

    def wait() -> None:
        print("early", flush=True)
        time.sleep(1)

    _before(importlib.import_module("dino_ds.train"), "build_step", lambda *_: True, wait)


def other_images(rank: int) -> None:
    train = importlib.import_module("dino_ds.train")
    original = train.training_images

    def training_images(data: Any, *args: Any) -> Any:
        return original(data.model_copy(update={"root": f"{data.root}_of_rank_1"}), *args)

    if rank == 1:
        train.training_images = training_images


# Acts.


def act(function: Callable[..., None], *args: Any) -> Act:
    return functools.partial(function, *args)


@planned
def send(number: int, times: int = 1, pause: float = 0.0) -> None:
    """A signal to this process, perhaps a second one after a pause."""
    for i in range(times):
        time.sleep(pause if i else 0)
        os.kill(os.getpid(), number)


kill = send(signal.SIGKILL)
freeze = send(signal.SIGSTOP)
crash = send(signal.SIGSEGV)


def fail() -> None:
    raise RuntimeError("planted by a test")


def interrupt() -> None:
    raise KeyboardInterrupt


def allocate() -> None:
    import torch

    torch.empty(2**60, dtype=torch.uint8)


def allocate_in_python() -> None:
    bytearray(2**62)


@planned
def told(**variables: str) -> None:
    """The launcher has told this rank something else."""
    os.environ.update(variables)


def shift_clock(folder: str, seconds: float) -> None:
    """The clock of this process and of every Python that it starts is off; `folder` gets a file for these."""
    now = time.time
    time.time = lambda: now() + seconds
    shift = f"import time; now = time.time; time.time = lambda: now() + {seconds}"
    Path(folder, "sitecustomize.py").write_text(shift)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))


def leave(code: int = 0) -> None:
    sys.stdout.flush()
    os._exit(code)


def sleep(seconds: float = 3600) -> None:
    time.sleep(seconds)


def hold_gil() -> None:
    """A call into C that never gives the interpreter back: no thread and no signal handler of Python runs again."""
    c, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_lock(mutex)  # by the same thread: for ever, and no signal ends it


def wait_alone() -> None:
    """A collective that the other ranks do not take part in."""
    import torch.distributed

    torch.distributed.barrier()


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "planted")


def no_disk() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), "planted")


def kill_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def kill_loader() -> None:
    """One process that loads images for this rank: a child of a fork server, which is a child of this process."""
    import psutil

    servers = [p for p in psutil.Process().children() if any("forkserver" in word for word in p.cmdline())]
    next(worker for server in servers for worker in server.children()).kill()


def kill_monitor() -> None:
    import psutil

    for process in psutil.Process().children():
        if any("dino_ds.health.monitor" in word for word in process.cmdline()):
            process.kill()


SLOW = both(at_step(1, (0, 1), act(sleep, 0.4), times=1000), held(9, (0, 1)))
"""Steps of 0.4 s, and whatever a test does comes before the last."""
LAUNCHER_KILLED = both(held(8, (0,)), at_step(8, (0,), kill_parent))
"""Before step 8, which waits until that is noticed."""

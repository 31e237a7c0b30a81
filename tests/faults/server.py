"""The fork server: imports torch and DeepSpeed once and forks training processes, at work after a tenth of a second.

It never computes and never joins a process group, so that it has one thread and no lock is held when it forks. Every
job has a process of its own between the server and its ranks, as a launcher would be. Where that one dies, the server
adopts what it leaves (PR_SET_CHILD_SUBREAPER): nothing that a job starts can hide.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Order:
    """A job: `dino-ds` with `words` on `world` ranks, output and exit codes in `folder`; `prepare` runs in each rank
    first, its number as the argument."""

    folder: Path
    words: list[str]
    world: int
    port: int
    prepare: Callable[[int], None] | None
    environment: dict[str, str]


def serve(pipe: Any) -> None:
    """Answers an Order with the process id of its launcher, None with {process id: (exit code, time)} of what ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in pytest reaches the whole terminal; the pipe says the end
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
    _import_all()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would hold locks in the forked ranks"
    ended: dict[int, tuple[int, float]] = {}
    pipe.send(os.getpid())
    while True:
        if pipe.poll(_POLL_SECONDS):
            try:
                order = pipe.recv()
            except EOFError:
                return
            pipe.send(dict(ended) if order is None else _fork(partial(_launch, order), order.folder / "launcher.txt"))
        ended.update(_reap())


def _import_all() -> None:
    """Whatever a training run imports, found by comparing sys.modules: half a second that no rank spends again."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from dino_ds.engine.deepspeed_import import import_deepspeed

    import_deepspeed()
    import fire  # noqa: F401
    import torch
    import torch._inductor.compile_fx
    import torch.utils.tensorboard
    import torchvision  # noqa: F401

    import dino_ds.cli
    import dino_ds.train  # noqa: F401
    from tests.ranks import pretend_fp16

    torch.set_num_threads(1)
    pretend_fp16()


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


def _fork(work: Callable[[], int], output: Path) -> int:
    """`work` in a new process, its output in a file and its value the exit code; the process's id."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        _become_a_script(output)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _become_a_script(output: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    atexit._clear()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, descriptor), (2, descriptor)):
        os.dup2(source, target)


def _launch(order: Order) -> int:
    """As a launcher: starts the ranks, waits for all, writes how each ended. In a session of its own."""
    os.setsid()
    names = {}
    for rank in range(order.world):
        process = _fork(partial(_rank, order, rank), order.folder / f"rank_{rank}.txt")
        names[process] = rank
        _note(order.folder, {"rank": rank, "process": process})
    while names:
        process, status = os.wait()
        if process in names:
            code = os.waitstatus_to_exitcode(status)
            _note(order.folder, {"rank": names.pop(process), "process": process, "code": code, "at": time.monotonic()})
    return 0


def _note(folder: Path, event: dict[str, Any]) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def _rank(order: Order, rank: int) -> int:
    """What `python dino_ds/train.py` does, to the handlers that run at the end of Python."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(order.world),
        LOCAL_SIZE=str(order.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(order.port),
        **order.environment,
    )
    os.chdir(order.folder)
    from dino_ds.cli import main

    code = 0
    try:
        if order.prepare:
            order.prepare(rank)
        main(order.words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code

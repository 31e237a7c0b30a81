"""A training job among the fork server's processes: a launcher of its own, as `deepspeed` would be, and its ranks."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fork_server import Work, fork


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


def launch(order: Order) -> int:
    """Start the ranks as a launcher would, wait for all, write how each ended. In a session of its own."""
    os.setsid()
    names = {}
    for rank in range(order.world):
        process = fork(Work(_rank, (order, rank), order.folder / f"rank_{rank}.txt"))
        names[process] = rank
        _note(order.folder, {"rank": rank, "process": process})
    while names:
        process, status = os.wait()
        if process in names:
            code = os.waitstatus_to_exitcode(status)
            _note(order.folder, {"rank": names.pop(process), "process": process, "code": code})
    return 0


def _note(folder: Path, event: dict[str, Any]) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def _rank(order: Order, rank: int) -> int:
    """Do what `python dino_ds/train.py` does, to the handlers that run at the end of Python."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(order.world),
        LOCAL_SIZE=str(order.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(order.port),
    )
    os.environ.update(order.environment)
    os.chdir(order.folder)
    from dino_ds.cli.main import main

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

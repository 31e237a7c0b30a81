"""Two-rank training jobs that a test starts, breaks and looks at: about a second each. A launcher of their own, as
`deepspeed` would be, starts their ranks among the fork server's processes.

job = start(run_dir, images, fault=inject.at_step(3, on=1, do=inject.kill))
outcome = job.wait(seconds=60)          # exit codes, output, orphans
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dino_ds.basics.machine import find_free_port
from tests.ranks import ForkServer, Work, fork, fork_server
from tests.run.harness import REPOSITORY, TINY

ORPHANS_MAY_LIVE = 60.0
"""Seconds after the end of a job within which all it has started must be gone; on a quiet machine it is one or two."""


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


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `codes` and `output`: one a rank; `orphans`: what still ran long after that."""

    codes: list[int | None]
    output: list[str]
    orphans: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.output)

    @property
    def errors(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith("dino_ds: ") and "error: " in line]


def start(
    run_dir: Path,
    images: Path,
    *,
    fault: Callable[[int], None] | None = None,
    world: int = 2,
    ds: str = "zero1_fp32.json",
    resume: bool = False,
    changes: Mapping[str, str] | None = None,
    flags: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Job:
    """`dino-ds train` on `world` ranks; `changes` to the tiny recipe, taken `without` some keys. `fault` runs in every
    rank before it starts."""
    words = ["train", "--ds_config", str(REPOSITORY / "ds_configs" / ds), "--run_dir", str(run_dir), *flags]
    values = {**TINY, "data.root": str(images), **(changes or {})}
    words += [part for name, value in values.items() if name not in without for part in (f"--{name}", value)]
    if resume:
        words.append("--resume")
    there = next(path for path in run_dir.parents if path.is_dir())
    folder = there / f"{run_dir.name}.job{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    order = Order(folder, words, world, port or find_free_port(), fault, dict(environment or {}))
    server = fork_server()
    return Job(server, order, server.fork(launch, order, output=folder / "launcher.txt"))


class Job:
    """A job at work."""

    def __init__(self, server: ForkServer, order: Order, launcher: int) -> None:
        self._server, self._order, self.launcher = server, order, launcher

    @property
    def folder(self) -> Path:
        """The ranks' current folder; what they print lies here."""
        return self._order.folder

    def process(self, rank: int) -> int:
        self.wait_for(lambda: rank in self._processes(), 120)
        return self._processes()[rank]

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.process(rank), number)

    def go_on(self) -> None:
        (self.folder / "go_on").touch()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        """Raises AssertionError, with what was printed, if `condition` does not come true."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited {seconds} s in vain:\n{self._output()}"
            time.sleep(0.02)

    def wait_for_steps(self, run_dir: Path, steps: int, seconds: float = 120) -> None:
        metrics = run_dir / "metrics.jsonl"
        self.wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= steps, seconds)

    def wait(self, seconds: float = 180) -> Outcome:
        """Until every rank has ended. Raises AssertionError after so many seconds, and kills the job."""
        end = time.monotonic() + seconds
        while len(codes := self._codes()) < self._order.world and time.monotonic() < end:
            time.sleep(0.05)
        orphans = self._left_over()
        end = time.monotonic() + ORPHANS_MAY_LIVE
        while len(codes) == self._order.world and orphans and time.monotonic() < end:
            time.sleep(0.05)
            orphans = self._left_over()
        for process, _ in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._server.launchers.discard(self.launcher)
        names, output = [name for _, name in orphans], [self.text(rank) for rank in range(self._order.world)]
        assert len(codes) == self._order.world, f"no end after {seconds} s, codes {codes}, running {names}: {output}"
        return Outcome([codes[rank] for rank in range(self._order.world)], output, names)

    def finish(self) -> None:
        """Raises AssertionError, with what was printed, unless every rank ends with 0."""
        outcome = self.wait()
        assert set(outcome.codes) == {0}, f"codes {outcome.codes}:\n{outcome.text}"

    def _events(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _processes(self) -> dict[int, int]:
        return {event["rank"]: event["process"] for event in self._events()}

    def _codes(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended: from their launcher, or from the server if it is dead."""
        found = {event["rank"]: event["code"] for event in self._events() if "code" in event}
        ended = self._server.ended()
        found |= {rank: ended[process][0] for rank, process in self._processes().items() if process in ended}
        return found

    def _left_over(self) -> list[tuple[int, str]]:
        """Processes that this job has started and that are not gone: all below its launcher, or adopted."""
        found = []
        others = self._server.launchers - {self.launcher}
        for child in psutil.Process(self._server.process).children():
            with contextlib.suppress(psutil.Error):
                for process in [] if child.pid in others else [child, *child.children(recursive=True)]:
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append((process.pid, " ".join(process.cmdline())[:100]))
        return found

    def text(self, rank: int) -> str:
        path = self.folder / f"rank_{rank}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def _output(self) -> str:
        return "\n".join(self.text(rank)[-3000:] for rank in range(self._order.world))


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

"""Supervises a launcher: waits for all its processes, and restarts the run after a failure.

Signals reach every rank at once, no process is left behind, and the exit code is the training's, not that of
DeepSpeed's launcher.
"""

from __future__ import annotations

import ctypes
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dino_ds.errors import ConfigError, UserError
from dino_ds.health.files import Disk, now
from dino_ds.health.lock import RunLock
from dino_ds.launching.attempt import LOST, STOPPED, LaunchAttempt, Outcome, StopSignals
from dino_ds.launching.guard import Guard
from dino_ds.launching.records import append_record, last_checkpoint_step
from dino_ds.ports import find_free_port, port_is_free

_CHILD_SUBREAPER = 36
_LOCK_SECONDS = 120.0
"""For the lock of a run folder whose holder, on another machine, has gone."""
_NAMING_SECONDS = 600.0
"""For listing the images again."""


def supervise(argv: Sequence[str], run_dir: Path, max_restarts: int) -> int:
    """Run `argv` (DeepSpeed's launcher, torchrun, or train.py itself) and up to `max_restarts` times again.

    Returns the exit code (dino_ds.errors): 0 only if every rank has finished. SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and
    SIGHUP make all ranks save and stop; a second signal ends everything at once. To be called by the main thread.

    Started again, with `--resume auto`: after hangs and deaths (6), bugs (1) and a full disk (5). Not after 0, 75, what
    a person must fix (2, 3), bad numbers (4) and too little memory (7): the same images, weights and arithmetic would
    give them again.
    """
    with StopSignals() as signals, Guard() as guard, _adopted_orphans():
        words, restarts, failed_at = list(argv), 0, 0.0
        back_off, deaths = BackOff(last_checkpoint_step(run_dir)), Deaths()
        while True:
            on_first_step = partial(_record_start, run_dir, restarts, failed_at)
            outcome = LaunchAttempt(words, run_dir, signals, guard, on_first_step).run()
            failed_at = outcome.failed_at
            if outcome.message and not outcome.reported:
                _print(f"error: {outcome.message}")
            if signals.count or outcome.code in FINAL or max_restarts == 0:
                return outcome.code
            place = outcome.place
            if deaths.add(place.step if place and place.working else None):
                _print(f"error: {_suspect_step(run_dir, place.step if place else 0)}")
                return LOST
            if restarts == max_restarts:
                _print(f"error: code {outcome.code} after {restarts} restarts, which is all that --max_restarts allows")
                return outcome.code
            restarts += 1
            wait = back_off.wait(outcome.code, last_checkpoint_step(run_dir))
            _report_restart(run_dir, restarts, max_restarts, outcome, wait)
            if not _wait(wait, run_dir, signals):
                return STOPPED
            words = resumed(argv)


def _report_restart(run_dir: Path, restarts: int, max_restarts: int, outcome: Outcome, wait: float) -> None:
    """One line on the console, one in RUN/restarts.jsonl."""
    checkpoint, place = last_checkpoint_step(run_dir), outcome.place
    begin = "the beginning" if checkpoint is None else f"step {checkpoint}"
    _print(f"restart {restarts} of {max_restarts} in {wait:.1f} s, from {begin}")
    record = {
        "time": now(),
        "restart": restarts,
        "code": outcome.code,
        "rank": outcome.rank,
        "step": place.step if place else None,
        "checkpoint": checkpoint,
        "seconds_to_end": round(outcome.seconds, 2),
        "wait": round(wait, 2),
        "message": outcome.message,
    }
    append_record(run_dir / "restarts.jsonl", record)


def _record_start(run_dir: Path, restart: int, failed_at: float) -> None:
    """The first new step after a restart: how long training has stood still."""
    if restart:
        seconds = round(time.monotonic() - failed_at, 1)
        append_record(run_dir / "restarts.jsonl", {"restart": restart, "restart_seconds": seconds})


def _suspect_step(run_dir: Path, done: int) -> str:
    """The message about a step that has ended the run again and again; writes its images to a file."""
    what = f"step {done + 1} has ended the run {DEADLY} times in a row"

    def name() -> str:
        # The data need torch, which takes seconds to load.
        from dino_ds.launching.suspect_images import write_step_images

        try:
            return f"{what}; its images are named in {write_step_images(run_dir, done)}: look at them, then start again"
        except (UserError, OSError) as error:
            return f"{what}; its images are not known ({error})"

    return Disk(_NAMING_SECONDS).run(name, f"{what}; its images are not known: the disk does not answer")


def _wait(seconds: float, run_dir: Path, signals: StopSignals) -> bool:
    """Until `seconds` have passed and the folder is free, which takes a while after another machine has failed.

    False where a signal came.
    """
    begin, announced = time.monotonic(), False
    while not signals.count:
        waited = time.monotonic() - begin
        if waited >= seconds:
            in_use = _in_use(run_dir)
            if not in_use or waited > _LOCK_SECONDS:
                return True
            if not announced:
                _print(f"waiting: {in_use}")
                announced = True
        time.sleep(0.1 if waited < seconds else 1.0)
    return False


def _in_use(run_dir: Path) -> str:
    """By whom; "" where the folder is free, or the disk does not answer: the run itself will say so."""

    def look() -> str:
        try:
            RunLock(run_dir).check_free(0)
        except ConfigError as error:
            return str(error)
        return ""

    return Disk().run(look, "")


@contextmanager
def _adopted_orphans() -> Iterator[None]:
    """What loses its parent becomes a child of this process (Linux), where it can be waited for."""
    c = ctypes.CDLL(None, use_errno=True)
    c.prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        c.prctl(_CHILD_SUBREAPER, 0, 0, 0, 0)


def _print(text: str) -> None:
    print(f"dino_ds: {text}", file=sys.stderr, flush=True)


RESUME = ("--resume", "auto")
DEADLY = 3
"""Deaths in a row at one step after which the step is to blame."""
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 300.0
_FIRST_WAIT_STORAGE = 30.0
STORAGE = 5
FINAL = (0, 2, 3, 4, 7, 75)
"""Exit codes that a restart would only repeat or that need none: done, usage, checkpoint, numbers, memory, stopped."""


def resumed(argv: Sequence[str]) -> list[str]:
    """The same command with `--resume auto`, and a free master port where its own is taken."""
    words = list(argv)
    script = script_index(words)
    given = iter(range(script + 1, len(words)))
    kept = words[: script + 1]
    for i in given:
        if words[i] == RESUME[0]:
            if i + 1 < len(words) and not words[i + 1].startswith("-"):
                next(given)
        elif not words[i].startswith(f"{RESUME[0]}="):
            kept.append(words[i])
    return with_free_port([*kept, *RESUME])


def script_index(words: Sequence[str]) -> int:
    """Where the launcher's own words end: the place of train.py, or of `train` of `dino-ds train`."""
    return next((i for i, word in enumerate(words) if Path(word).name in ("train.py", "train")), 0)


def with_free_port(words: list[str]) -> list[str]:
    """Another --master_port if the one given is taken; where other machines must know it, it stays."""
    end = script_index(words)
    elsewhere = ("--hostfile", "-H", "--nnodes", "--rdzv_endpoint", "--rdzv-endpoint")
    if any(word.partition("=")[0] in elsewhere for word in words[:end]):
        return words
    changed = list(words)
    for i, word in enumerate(words[:end]):
        name, equals, port = word.partition("=")
        if name not in ("--master_port", "--master-port"):
            continue
        place = i if equals else i + 1
        port = port if equals else words[place]
        if port.isdigit() and not port_is_free(int(port)):
            changed[place] = f"{name}={find_free_port()}" if equals else str(find_free_port())
    return changed


class BackOff:
    """Seconds to wait before a restart: doubling from 1 s (30 s for a full disk) to 5 min, times a random 0.5 to 1.

    It begins anew once the run has saved a later step.
    """

    def __init__(self, checkpoint: int | None) -> None:
        self._checkpoint, self._in_vain = checkpoint, 0

    def wait(self, code: int, checkpoint: int | None) -> float:
        if (checkpoint or 0) > (self._checkpoint or 0):
            self._in_vain = 0
        self._checkpoint = checkpoint
        first = _FIRST_WAIT_STORAGE if code == STORAGE else _FIRST_WAIT
        longest = min(_LONGEST_WAIT, first * 2**self._in_vain)
        self._in_vain += 1
        return longest * random.uniform(0.5, 1.0)


class Deaths:
    """The steps at which a run has died."""

    def __init__(self) -> None:
        self._steps: list[int | None] = []

    def add(self, step: int | None) -> bool:
        """Whether this is the third in a row at one step; None: not while working on a step."""
        self._steps.append(step)
        last = self._steps[-DEADLY:]
        return step is not None and last == [step] * DEADLY

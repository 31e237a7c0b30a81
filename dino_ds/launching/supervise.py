"""Supervises a launcher: waits for all its processes, and restarts the run after a failure.

Signals reach every rank at once, no process is left behind, and the exit code is the training's, not that of
DeepSpeed's launcher.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dino_ds.basics.ports import find_free_port, port_is_free
from dino_ds.errors import ConfigError, StorageError, UserError
from dino_ds.health.files import Disk, now
from dino_ds.health.lock import RunLock
from dino_ds.health.records import append_record, last_checkpoint_step
from dino_ds.launching.attempt import LOST, STOPPED, LaunchAttempt, Outcome, stop_signals
from dino_ds.launching.guard import guard

_DEADLY = 3
"""Number of deaths in a row at one step after which the step is to blame."""
_FINAL = (0, 2, 3, 4, 7, 75)
"""Exit codes that a restart would only repeat or that need none: done, usage, checkpoint, numbers, memory, stopped."""
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 300.0
_FIRST_WAIT_STORAGE = 30.0
_LOCK_SECONDS = 120.0
"""Time to wait for the lock of a run folder whose holder, on another machine, has gone."""
_NAMING_SECONDS = 600.0
"""Time for listing the images again."""


def supervise(argv: Sequence[str], run_dir: Path, max_restarts: int) -> int:
    """Run `argv` (DeepSpeed's launcher or torchrun, by `build_command`) and up to `max_restarts` times again.

    Returns the exit code (dino_ds.errors): 0 only if every rank has finished. SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and
    SIGHUP make all ranks save and stop; a second signal ends everything at once. To be called by the main thread.

    Started again, with `--resume auto`: after hangs and deaths (6), bugs (1) and a full disk (5). Not after 0, 75, what
    a person must fix (2, 3), bad numbers (4) and too little memory (7): the same images, weights and arithmetic would
    give them again.
    """
    with stop_signals() as signals, guard() as mark:
        words, restarts, in_vain, failed_at, deaths = list(argv), 0, 0, 0.0, list[int | None]()
        saved = last_checkpoint_step(run_dir) or 0
        while True:
            first_step = partial(_record_first_step, run_dir, restarts, failed_at)
            outcome = LaunchAttempt(words, run_dir, signals, mark, first_step).run()
            failed_at = outcome.failed_at
            if outcome.message and not outcome.reported:
                _print(f"error: {outcome.message}")
            if signals or outcome.code in _FINAL or max_restarts == 0:
                return outcome.code
            beat = outcome.beat
            step = beat.step if beat and beat.phase in ("data", "step") else None  # not while it starts or saves
            deaths.append(step)
            if step is not None and deaths[-_DEADLY:] == [step] * _DEADLY:
                _print(f"error: {_suspect_step(run_dir, step)}")
                return LOST
            if restarts == max_restarts:
                _print(f"error: code {outcome.code} after {restarts} restarts, which is all that --max_restarts allows")
                return outcome.code
            before, saved = saved, last_checkpoint_step(run_dir) or 0
            in_vain = 0 if saved > before else in_vain
            wait = _back_off(outcome.code, in_vain)
            in_vain, restarts = in_vain + 1, restarts + 1
            _report_restart(run_dir, restarts, max_restarts, outcome, wait)
            if not _wait(wait, run_dir, signals):
                return STOPPED
            words = _resumed(argv)


def _back_off(code: int, in_vain: int) -> float:
    """Seconds before a restart: doubling from 1 s (30 s for a full disk) to 5 min, times a random 0.5 to 1; `in_vain`:
    restarts since the run has saved a later step."""
    first = _FIRST_WAIT_STORAGE if code == StorageError.exit_code else _FIRST_WAIT
    return min(_LONGEST_WAIT, first * 2 ** min(in_vain, 20)) * random.uniform(0.5, 1.0)


def _report_restart(run_dir: Path, restarts: int, max_restarts: int, outcome: Outcome, wait: float) -> None:
    """Write a line to the console and one to RUN/restarts.jsonl."""
    checkpoint = last_checkpoint_step(run_dir) or None
    begin = f"step {checkpoint}" if checkpoint else "the beginning"
    _print(f"restart {restarts} of {max_restarts} in {wait:.1f} s, from {begin}")
    step = outcome.beat.step if outcome.beat else None
    record = {"time": now(), "restart": restarts, "code": outcome.code, "rank": outcome.rank, "step": step}
    record |= {"checkpoint": checkpoint, "seconds_to_end": round(outcome.seconds, 2), "wait": round(wait, 2)}
    append_record(run_dir / "restarts.jsonl", record | {"message": outcome.message})


def _record_first_step(run_dir: Path, restart: int, failed_at: float) -> None:
    """Write down how long training has stood still until the first new step after a restart."""
    if restart:
        seconds = round(time.monotonic() - failed_at, 1)
        append_record(run_dir / "restarts.jsonl", {"restart": restart, "restart_seconds": seconds})


def _suspect_step(run_dir: Path, done: int) -> str:
    """The message about a step that has ended the run again and again; writes its images to a file."""
    what = f"step {done + 1} has ended the run {_DEADLY} times in a row"

    def name() -> str:
        # The data need torch, which takes seconds to load.
        from dino_ds.launching.suspect_images import write_step_images

        try:
            return f"{what}; its images are named in {write_step_images(run_dir, done)}: look at them, then start again"
        except (UserError, OSError) as error:
            return f"{what}; its images are not known ({error})"

    return Disk(_NAMING_SECONDS).run(name, f"{what}; its images are not known: the disk does not answer")


def _wait(seconds: float, run_dir: Path, signals: list[int]) -> bool:
    """Wait until `seconds` have passed and the folder is free, which takes a while after another machine has failed.

    False if a signal came.
    """
    begin, announced = time.monotonic(), False
    while not signals and (waited := time.monotonic() - begin) < seconds:
        time.sleep(min(0.1, seconds - waited))
    while not signals:
        in_use = Disk().run(partial(_why_in_use, run_dir), "")  # a disk that does not answer: the run will say so
        if not in_use or time.monotonic() - begin > _LOCK_SECONDS:
            return True
        if not announced:
            _print(f"waiting: {in_use}")
        announced = True
        time.sleep(1.0)
    return False


def _why_in_use(run_dir: Path) -> str:
    """Who uses the folder, or "" if it is free."""
    try:
        RunLock(run_dir).check_free(0)
    except ConfigError as error:
        return str(error)
    return ""


def _print(text: str) -> None:
    print(f"dino_ds: {text}", file=sys.stderr, flush=True)


def _resumed(argv: Sequence[str]) -> list[str]:
    """The same command with `--resume auto`, and another --master_port if its own is taken; one that other machines
    must know stays."""
    script = next(i for i, word in enumerate(argv) if Path(word).name == "train.py")
    launcher, given = list(argv[: script + 1]), list(argv[script + 1 :])
    if not any(word.startswith("--hostfile=") for word in launcher):
        launcher = [_with_free_port(word) for word in launcher]
    return [*launcher, *without(given, "--resume"), "--resume", "auto"]


def without(words: Sequence[str], *names: str) -> list[str]:
    """The words of a command line but for these options and their values."""
    kept, dropped = list[str](), False
    for word in words:
        value, dropped = dropped and not word.startswith("-"), word in names
        if not value and word.partition("=")[0] not in names:
            kept.append(word)
    return kept


def _with_free_port(word: str) -> str:
    name, _, port = word.partition("=")
    taken = name == "--master_port" and not port_is_free(int(port))
    return f"{name}={find_free_port()}" if taken else word

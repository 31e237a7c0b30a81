"""Supervises a launcher: asks its ranks to stop, finds out how they ended, and starts the run again.

DeepSpeed's launcher starts the ranks and ends the others after a failure; each rank's monitor process writes down how
it ended (dino_ds.health), and ends its rank when the supervisor is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import psutil

from dino_ds.errors import EXIT_CODES, FORWARDED_SECONDS, STOP_SIGNALS, STOPPED, ConfigError, PeerError, StorageError
from dino_ds.health.files import Disk, Event, log_event
from dino_ds.health.lock import RunLock
from dino_ds.health.processes import SUPERVISOR, death_by, own_mark, send_signal
from dino_ds.health.records import (
    Heartbeats,
    describe_death,
    last_checkpoint,
    last_checkpoint_step,
)

LOST = PeerError.exit_code
_FINAL = (0, 2, 3, 4, 7, STOPPED)
"""Exit codes that a restart would only repeat or that need none: done, usage, checkpoint, numbers, memory, stopped."""
_FIRST_WAIT, _FIRST_WAIT_STORAGE, _LONGEST_WAIT = 1.0, 30.0, 300.0
"""Seconds before a restart, doubled by each; the second after a full disk."""
_LOCK_SECONDS = 120.0
"""Time to wait for the lock of a run folder whose holder, on another machine, has gone."""
_TICK_SECONDS = 0.2
_WITHOUT_LAUNCHER_SECONDS = 60.0
"""Time to save for ranks whose launcher was killed."""
_LAST_WORDS_SECONDS = 5.0
"""Time for monitors and loader processes after the last rank."""
_KERNEL_SECONDS = 30.0
"""Time for a killed process that waits in the kernel for a dead disk."""
_OTHER_MACHINES_SECONDS = 15.0
"""Time for the last heartbeat of a rank that ends elsewhere at about the same time."""


@dataclass(frozen=True)
class Outcome:
    """How a start ended. message: one line, or ""; reported: whether a rank has already printed the reason."""

    code: int
    message: str = ""
    reported: bool = False


def supervise(command: Callable[[bool], list[str]], run_dir: Path, max_restarts: int) -> int:
    """Run a launcher's command, `command(False)`, and then up to `max_restarts` times `command(True)`, which resumes.

    Returns the exit code (dino_ds.errors): 0 only if every rank has finished. The first signal of STOP_SIGNALS makes
    all ranks save and stop; a second one ends everything at once. Call it from the main thread.

    It restarts after hangs and deaths (6), bugs (1) and a full disk (5); not after 0, 75, errors that a person must fix
    (2, 3), bad numbers (4) and too little memory (7): the same images and weights would lead to these again.
    """
    with stop_signals() as signals:
        restarts = 0
        while True:
            outcome = run_once(command(restarts > 0), run_dir, signals)
            if outcome.message and not outcome.reported:
                _print(f"error: {outcome.message}")
            if signals or outcome.code in _FINAL or max_restarts == 0:
                return outcome.code
            if restarts == max_restarts:
                _print(f"error: code {outcome.code} after {restarts} restarts, which is all that --max_restarts allows")
                return outcome.code
            saved = last_checkpoint_step(run_dir) or 0
            first = _FIRST_WAIT_STORAGE if outcome.code == StorageError.exit_code else _FIRST_WAIT
            wait = min(_LONGEST_WAIT, first * 2 ** min(restarts, 9))
            restarts += 1
            begin = f"step {saved}" if saved else "the beginning"
            line = f"{restarts} of {max_restarts} in {wait:.0f} s, from {begin}"
            _print(f"restart {line}")
            event = Event(f"restart  {line}", code=outcome.code, checkpoint=saved)
            Disk().run(partial(log_event, run_dir, event), None)
            if not _wait(wait, run_dir, signals):
                return STOPPED


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect the signals in STOP_SIGNALS that arrive while the `with` block runs, in order of time.

    A signal within FORWARDED_SECONDS of the first one counts as the first, sent twice, and is left out.
    """
    received: list[int] = []
    first_at = 0.0

    def note(number: int, _: FrameType | None) -> None:
        nonlocal first_at
        if not received:
            first_at = time.monotonic()
        elif time.monotonic() - first_at <= FORWARDED_SECONDS:
            return
        received.append(number)

    wanted = [n for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, note) for number in wanted}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_once(argv: list[str], run_dir: Path, signals: list[int]) -> Outcome:
    """Run `argv` in a session of its own until none of its processes is left on this machine."""
    heartbeats = Heartbeats(run_dir, of_next_start=True)
    environment = {**os.environ, SUPERVISOR: own_mark()}
    launcher = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    while len(signals) < 2:
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(_TICK_SECONDS)
            break
        if signals:
            _ask_to_stop(launcher, heartbeats)
    _end_all(signals, launcher, heartbeats)
    code = launcher.wait()
    until = time.monotonic() + _OTHER_MACHINES_SECONDS * (len(signals) < 2)
    while any(not beat.ended for beat in heartbeats.read()) and time.monotonic() < until:
        time.sleep(_TICK_SECONDS)
    # The next start must not find the file of this one.
    Disk().run(partial((run_dir / "stop").unlink, missing_ok=True), None)
    return _outcome(code, heartbeats, run_dir, signals)


def _ask_to_stop(launcher: subprocess.Popen[bytes], heartbeats: Heartbeats) -> None:
    """Ask all ranks, by RUN/stop, to save and stop at their next step; before they are there, end their launcher.

    DeepSpeed's launcher would signal its ranks one after the other, and kill them while they save.
    """
    if heartbeats.read():
        Disk().run((heartbeats.folder.parent / "stop").touch, None)
    else:
        launcher.terminate()


def _processes() -> list[int]:
    """Ids of the running processes that this process's launcher has started, orphans too; later ones first."""
    processes, mark = list[int](), own_mark()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's, or gone
            if process.environ().get(SUPERVISOR) == mark and process.pid != os.getpid():
                processes.append(process.pid)
    return sorted(processes, reverse=True)


def _end_all(signals: list[int], launcher: subprocess.Popen[bytes], heartbeats: Heartbeats) -> None:
    """Ask the processes that the launcher has left to stop; kill them after a while, or at a second signal."""
    begin = time.monotonic()
    while remaining := _processes():
        at_work = any(not beat.ended for beat in heartbeats.read())
        if at_work:
            _ask_to_stop(launcher, heartbeats)
        end = begin + (_WITHOUT_LAUNCHER_SECONDS if at_work else _LAST_WORDS_SECONDS)
        if len(signals) > 1 or time.monotonic() > end:
            for pid in remaining:  # monitors before the ranks whose death they would report
                send_signal(pid, signal.SIGKILL)
            if time.monotonic() > end + _KERNEL_SECONDS:
                return
        time.sleep(0.05)


def _outcome(code: int, heartbeats: Heartbeats, run_dir: Path, signals: list[int]) -> Outcome:
    """How the run ended, by the records of its ranks, and only without records by the launcher's exit code."""
    beats, failure = heartbeats.read(), heartbeats.first_failure()
    unfinished = next((beat for beat in beats if beat.ended not in ("done", "stopped")), None)
    checkpoint = last_checkpoint(run_dir)
    if len(signals) > 1:
        return Outcome(128 + signals[0], f"ended by a second signal; {checkpoint}")
    if failure is not None and failure.kind != "stopped":
        return Outcome(failure.code or LOST, failure.message, True)
    if {beat.ended for beat in beats} == {"done"}:
        return Outcome(0)
    if signals or code == STOPPED:
        return Outcome(STOPPED)
    if code in EXIT_CODES and code and (unfinished or not beats):
        # A rank has printed why, before there was a file to write it to.
        return Outcome(code, f"the ranks ended with code {code}: {EXIT_CODES[code]}", True)
    step, where = (unfinished.step, unfinished.where) if unfinished else (0, "start")
    if 128 < code < 256:
        message = describe_death("a rank", death_by(256 - code), step, where)
    elif unfinished is not None:
        message = f"rank {unfinished.rank} has ended without having finished"
    else:
        how = death_by(-code) if code < 0 else f"with code {code}"
        message = f"the launcher ended {how}" + ("; its ranks have stopped" if beats else ", and no rank was seen")
    return Outcome(LOST, f"{message}; {checkpoint}")


def _wait(seconds: float, run_dir: Path, signals: list[int]) -> bool:
    """Wait until `seconds` have passed and the folder is free, which takes a while after another machine has failed.

    Returns False if a signal came.
    """
    earliest = time.monotonic() + seconds
    while not signals:
        late = time.monotonic() - earliest
        # A disk that does not answer counts as free: the run will say so.
        if late >= 0 and (late > _LOCK_SECONDS or Disk().run(partial(_is_free, run_dir), True)):
            return True
        time.sleep(1.0 if late >= 0 else min(0.1, -late))
    return False


def _is_free(run_dir: Path) -> bool:
    try:
        RunLock(run_dir).check_free(0)
    except ConfigError:
        return False
    return True


def _print(text: str) -> None:
    print(f"dino_ds: {text}", file=sys.stderr, flush=True)

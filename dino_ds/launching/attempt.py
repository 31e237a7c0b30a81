"""Runs a launcher once, from its first process to the end of its last one, and finds out how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from dino_ds.errors import FORWARDED_SECONDS, STOP_SIGNALS, STOPPED, PeerError
from dino_ds.health.files import Disk
from dino_ds.health.processes import death_by
from dino_ds.health.records import Heartbeat, Heartbeats, describe_death, last_checkpoint, last_checkpoint_step
from dino_ds.launching.guard import end_all
from dino_ds.launching.ranks import End, LocalRanks

LOST = PeerError.exit_code
_TICK_SECONDS = 0.2
_AFTER_A_FAILURE_SECONDS = 10.0
"""Time for the other ranks to notice it, say so and end; with the launcher alone some wait for ever."""
_AFTER_AN_END_SECONDS = 600.0
"""Time for the others after one rank has ended well: rank 0 may still be writing."""
_WITHOUT_LAUNCHER_SECONDS = 60.0
_LAUNCHER_SECONDS = 1.0
"""Time for a launcher after its last rank: Python takes seconds to take torch apart."""
_LAST_WORDS_SECONDS = 5.0
"""Time for monitors and loader processes after the last rank."""
_OTHER_MACHINES_SECONDS = 15.0
"""Time for the last heartbeat of a rank that ends elsewhere at about the same time."""


@dataclass(frozen=True)
class Outcome:
    """The end of a start. `message`: one line, "" if all is well; `reported`: a rank has printed it already.

    beat: the last heartbeat of `rank`, or of the rank that is furthest, or None if there was none; failed_at:
    time.monotonic() of the first failure; seconds: from there until no process was left.
    """

    code: int
    message: str = ""
    reported: bool = False
    rank: int | None = None
    beat: Heartbeat | None = None
    failed_at: float = 0.0
    seconds: float = 0.0


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The signals in STOP_SIGNALS that come while the `with` block runs, in order of time.

    What comes within FORWARDED_SECONDS of the first one is that one, sent twice, and left out.
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


class LaunchAttempt:
    """Runs `argv` in a session of its own; `run` returns when none of its processes is left on this machine.

    signals: see `stop_signals`; mark: see `guard`. on_first_step is called when the run has taken a step that no
    checkpoint held before.
    """

    def __init__(
        self, argv: Sequence[str], run_dir: Path, signals: list[int], mark: str, on_first_step: Callable[[], None]
    ) -> None:
        self._run_dir, self._signals, self._mark = run_dir, signals, mark
        self._on_first_step: Callable[[], None] | None = on_first_step
        self._heartbeats = Heartbeats(run_dir, of_next_start=True)
        name, _, value = mark.partition("=")
        self._root = subprocess.Popen(
            list(argv), env={**os.environ, name: value}, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self._ranks = LocalRanks(self._root, mark)
        self._start_step = last_checkpoint_step(run_dir) or 0
        self._signalled: set[int] = set()
        self._killed = self._launcher_lost = False
        self._deadline: float | None = None
        self._failed_at: float | None = None

    def run(self) -> Outcome:
        looked = over = 0.0
        while (self._ranks.alive or self._ranks.launcher_alive) and not self._killed:
            for end in self._ranks.poll(_TICK_SECONDS):
                self._handle_end(end)
            self._forward_signals()
            if self._ranks.over:
                over = over or time.monotonic()
                if time.monotonic() - over > _LAUNCHER_SECONDS:
                    self._ranks.end_launchers()
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._kill()
            if self._on_first_step and time.monotonic() - looked > 1.0:
                looked = time.monotonic()
                if any(beat.step > self._start_step for beat in self._heartbeats.read()):
                    self._on_first_step()
                    self._on_first_step = None
        end_all(self._mark, 0.0 if self._killed else _LAST_WORDS_SECONDS)
        self._ranks.close()
        until = time.monotonic() + _OTHER_MACHINES_SECONDS
        here = {end.rank for end in self._ranks.ends}
        while None in self._codes().values() and self._beats().keys() - here and time.monotonic() < until:
            time.sleep(_TICK_SECONDS)
        return self._outcome()

    def _handle_end(self, end: End) -> None:
        bad = end.killed_by != 0 or end.code not in (0, STOPPED)
        if bad and self._failed_at is None:
            self._failed_at = time.monotonic()
        if end.rank is not None:
            self._set_deadline(_AFTER_A_FAILURE_SECONDS if bad else _AFTER_AN_END_SECONDS)
        elif (end.killed_by or not self._ranks.launcher_alive) and self._ranks.alive and not self._launcher_lost:
            self._launcher_lost = True
            self._ask_to_stop(signal.SIGTERM)
            self._set_deadline(_WITHOUT_LAUNCHER_SECONDS)

    def _set_deadline(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._deadline = end if self._deadline is None else min(self._deadline, end)

    def _forward_signals(self) -> None:
        """Ask all ranks to save and stop after the first signal, end everything after a second one."""
        if len(self._signals) > 1:
            self._kill()
        elif self._signals:
            self._ask_to_stop(_for_ranks(self._signals[0]))

    def _ask_to_stop(self, number: int) -> None:
        """Signal every rank of this machine once; DeepSpeed's launcher would do it one by one, and kill them."""
        if self._ranks.alive:
            for rank in self._ranks.alive.keys() - self._signalled:
                self._signalled.add(rank)
                self._ranks.send(rank, number)
        elif not self._signalled and self._root.poll() is None:
            self._signalled.add(-1)
            if self._beats():
                Disk().run((self._run_dir / "stop").touch, None)  # for the ranks on other machines
            else:
                self._root.terminate()  # nothing to save yet
                self._set_deadline(_LAST_WORDS_SECONDS)

    def _kill(self) -> None:
        self._killed = True
        end_all(self._mark, 0.0)

    def _outcome(self) -> Outcome:
        """The run's own end: from the records and exit codes of its ranks, whatever the launcher's exit code is."""
        codes, now = self._codes(), time.monotonic()
        failed_at = self._failed_at or now

        def outcome(code: int, message: str = "", reported: bool = False, rank: int | None = None) -> Outcome:
            return Outcome(code, message, reported, rank, self._beat(rank), failed_at, now - failed_at)

        if len(self._signals) > 1:
            return outcome(128 + self._signals[0], f"ended by a second signal; {self._checkpoint}")
        if codes and set(codes.values()) == {0}:
            return outcome(0)
        # Ranks save together; a launcher that sees the first one go may end the others on their way out.
        good = {0, STOPPED, -signal.SIGTERM, *(-_for_ranks(number) for number in self._signals)}
        if (self._signals or STOPPED in codes.values()) and set(codes.values()) <= good:
            if self._launcher_lost and not self._signals:
                return outcome(LOST, f"the launcher was ended; its ranks have stopped; {self._checkpoint}")
            return outcome(STOPPED)
        if failure := self._heartbeats.first_failure():
            # A hang is recorded by the rank that has noticed it; the message names those that are behind.
            rank = None if failure.kind == "hang" else failure.rank
            return outcome(failure.code or LOST, failure.message, True, rank)
        code, message, rank = self._unrecorded_failure(codes)
        return outcome(code, f"{message}; {self._checkpoint}", rank=rank)

    def _beats(self) -> dict[int, Heartbeat]:
        return {beat.rank: beat for beat in self._heartbeats.read()}

    def _beat(self, rank: int | None) -> Heartbeat | None:
        """The last heartbeat of this rank, else of the rank that is furthest, or None before the first."""
        beats = self._beats()
        furthest = max(beats.values(), key=lambda beat: beat.step, default=None)
        return furthest if rank is None else beats.get(rank, furthest)

    def _codes(self) -> dict[int, int | None]:
        """Exit codes by rank: minus the signal's number, or None for a rank that has not finished as far as is known.

        A rank of another machine counts if it has a heartbeat here: else that machine has a supervisor of its own.
        """
        beats, ends = self._beats(), {end.rank: end for end in self._ranks.ends if end.rank is not None}
        codes: dict[int, int | None] = {}
        for rank in sorted(ends.keys() | beats.keys()):
            end, beat = ends.get(rank), beats.get(rank)
            if end is not None and end.status is not None:
                codes[rank] = -end.killed_by if end.killed_by else end.code
                if end.code == 0 and beat is not None and beat.ended != "done":
                    codes[rank] = None
            else:
                codes[rank] = beat.code if beat is not None and beat.ended else None
        return codes

    def _unrecorded_failure(self, codes: dict[int, int | None]) -> tuple[int, str, int | None]:
        """Code, message and rank of a failure that no rank has recorded."""
        for end in self._ranks.ends:
            who, beat = "the launcher" if end.rank is None else f"rank {end.rank}", self._beat(end.rank)
            step, where = (beat.step, beat.where) if beat else (0, "start")
            if end.killed_by:
                return LOST, describe_death(who, death_by(end.killed_by), step, where), end.rank
            if end.rank is not None and end.code:
                return end.code, f"{who} ended with code {end.code} at step {step} ({where})", end.rank
        if not codes:
            code = self._root.returncode or 0
            return code if code > 0 else LOST, f"the launcher ended with code {code}, and no rank was seen", None
        # Ranks that nobody has seen end, too quick or elsewhere: by their last heartbeats.
        for rank, code in codes.items():
            if code is not None and code > 0:
                return code, f"rank {rank} ended with code {code}", rank
        rank = next(rank for rank, code in codes.items() if code != 0)
        return LOST, f"rank {rank} has ended without having finished", rank

    @property
    def _checkpoint(self) -> str:
        return last_checkpoint(self._run_dir)


def _for_ranks(number: int) -> int:
    """The signal to send to ranks for one that has come: a terminal's end is a stop like any other."""
    return signal.SIGTERM if number == signal.SIGHUP else number

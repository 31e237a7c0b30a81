"""The monitor: a process beside each rank that notices hangs, deaths and stop requests while the rank is busy.

python -m dino_ds.health.monitor, started by dino_ds.health.watchdog; the standard library only. It reads its rank's
progress from shared memory, publishes it every `PUBLISH_SECONDS`, and ends with its rank: its standard input breaks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dino_ds.errors import STOP_SIGNALS
from dino_ds.health.beat import Beat
from dino_ds.health.files import Disk, append_line
from dino_ds.health.lock import RunLock
from dino_ds.health.processes import alive, death_of, find_process, launchers_above
from dino_ds.health.records import Failure, Heartbeat, Heartbeats, describe_death, describe_hang, last_checkpoint

PUBLISH_SECONDS = 2.0
_TICK_SECONDS = 0.5
PATIENCE = 3
"""Times `hang_seconds`: the limit for start-up, the first step, saves and evaluations."""
_GRACE_SECONDS = 4.0
"""For a rank to end by itself after another rank has failed."""
_LONE_SECONDS = 5.0
"""Without its launcher a rank may make no progress for this long and twice its longest wait so far."""
_STACKS_SECONDS = 2.0
STACKS_SIGNAL = signal.SIGQUIT
END_SIGNAL = signal.SIGABRT
PEER_LOST = 6


@dataclass(frozen=True)
class MonitorArguments:
    """A monitor's command line, as JSON. beat, stacks: file descriptors of the shared page and the file for stacks.

    ends_hangs: whether a rank that hangs is ended; else it is reported, once until it moves again.
    """

    rank: int
    world_size: int
    pid: int
    run_dir: str
    hang_seconds: float
    ends_hangs: bool
    started: float
    beat: int
    stacks: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def limit_of(beat: Beat, hang_seconds: float) -> float:
    """Seconds without progress after which the rank counts as hanging in its phase."""
    patient = not beat.warm or beat.phase in ("start", "save", "evaluate")
    return hang_seconds * (PATIENCE if patient else 1)


class MonitorProcess:
    """Monitors one rank; `run` returns when the rank has ended."""

    def __init__(self, arguments: MonitorArguments) -> None:
        self._arguments, self._run_dir = arguments, Path(arguments.run_dir)
        self._beat = Beat.shared(arguments.beat)
        self._heartbeats = Heartbeats(self._run_dir)
        self._lock = RunLock(self._run_dir, arguments.pid)
        self._process = find_process(arguments.pid)
        self._ends: list[Any] = [sys.stdin]
        with contextlib.suppress(OSError, AttributeError):  # old kernels
            # Noticed at once, how it ended can still be read: not once its launcher has waited for it.
            self._ends.append(os.pidfd_open(arguments.pid))
        self._launchers = launchers_above(arguments.pid, "RANK" in os.environ)
        self._disk, self._terminal = Disk(), Disk()  # apart: the output may be a file on another disk
        self._moves, self._idle, self._slowest = (-1, 0), 0.0, 0.0
        self._reported = (-1, 0)
        self._end_at: float | None = None
        self._failure: Failure | None = None
        self._taken_over = ""
        self._guarded = False

    def run(self) -> None:
        last = published = time.monotonic() - PUBLISH_SECONDS
        while not self._rank_is_gone(_TICK_SECONDS):
            now = time.monotonic()
            # A frozen machine freezes the monitor too: the time that it was frozen does not count.
            self._count(min(now - last, 4 * _TICK_SECONDS))
            last = now
            if self._beat.ended:
                continue
            if now - published >= PUBLISH_SECONDS:
                published = now
                self._disk.run(self._publish_and_read, None)
            if self._taken_over:
                self._end_rank(self._taken_over)
                self._say(self._taken_over)
                continue
            self._look_at_launchers(now)
            if self._failure is not None or self._end_at is not None:
                self._follow(now)
            elif self._hangs():
                self._report_hang()
        self._after_the_end()

    def _rank_is_gone(self, seconds: float) -> bool:
        """Whether it ends within `seconds`. A forked child of the rank may hold the pipe open, which is not enough."""
        if select.select(self._ends, [], [], seconds)[0] or self._beat.left:
            return True
        process = self._process
        return process is not None and not alive(process.pid, process.ticks)

    def _count(self, seconds: float) -> None:
        beat = self._beat
        moves = beat.moves, beat.ticks
        if moves != self._moves:
            if beat.warm and beat.phase in ("data", "step"):
                self._slowest = max(self._slowest, self._idle)
            self._moves, self._idle = moves, 0.0
        else:
            self._idle += seconds

    def _hangs(self) -> bool:
        seconds = self._arguments.hang_seconds
        return bool(seconds) and self._idle > limit_of(self._beat, seconds) and self._reported != self._moves

    def _publish_and_read(self) -> None:
        if not self._beat.listed:
            return
        self._heartbeats.publish(self._heartbeat())
        self._failure = self._failure or self._heartbeats.first_failure()
        guarded, self._guarded = self._guarded, self._lock.guards_a_run
        if guarded and not self._guarded:
            self._beat.request_stop("the loss of the run folder")
        if (self._run_dir / "stop").exists():
            self._beat.request_stop("the stop file")
        if self._arguments.rank == 0 and not self._lock.refresh():
            other = self._lock.holder()
            whom = f"pid {other.pid} on {other.host}" if other else "another run"
            self._taken_over = f"{self._run_dir} was taken over by {whom} while this one was frozen: it ends unsaved"

    def _heartbeat(self) -> Heartbeat:
        arguments, beat = self._arguments, self._beat
        process = find_process(arguments.pid)
        code, message = beat.last_words
        return Heartbeat(
            arguments.rank,
            socket.gethostname(),
            arguments.pid,
            arguments.started,
            time.time(),
            beat.step,
            beat.phase,
            beat.where,
            beat.moves,
            round(self._idle, 1),
            process is not None and process.state in "Tt",
            beat.ended,
            code,
            message,
        )

    def _look_at_launchers(self, now: float) -> None:
        """A rank that has lost its launcher is asked to save and end, and is ended if it makes no progress."""
        if self._end_at is not None or all(alive(p.pid, p.ticks) for p in self._launchers):
            return
        self._beat.request_stop("the end of the launcher")
        if self._beat.phase != "save" and self._idle > _LONE_SECONDS + 2 * self._slowest:
            self._end_at = now
            message = f"the launcher is gone, and no step came to its end; {last_checkpoint(self._run_dir)}"
            self._end_rank(message, "launcher")

    def _follow(self, now: float) -> None:
        """Another rank has failed: give this one time to end by itself, then end it."""
        if self._end_at is None:
            self._end_at = now + _GRACE_SECONDS
        if now < self._end_at:
            return
        if self._failure is not None and self._failure.kind == "hang":
            self._write_stacks()
        self._end_rank(self._failure.message if self._failure else "the launcher is gone")

    def _report_hang(self) -> None:
        seconds, arguments = self._idle, self._arguments
        stacks = self._write_stacks()
        own = self._heartbeat()
        behind: list[Heartbeat | int] = []
        if self._beat.listed:
            # Other monitors get here at about the same time: their newest heartbeats are needed.
            self._disk.run(lambda: self._heartbeats.publish(own), None)
            time.sleep(PUBLISH_SECONDS + 2 * _TICK_SECONDS)
            behind = self._disk.run(lambda: self._heartbeats.behind(arguments.world_size), behind)
        message = f"{describe_hang(behind, own, seconds, stacks)}; {last_checkpoint(self._run_dir)}"
        if (self._beat.moves, self._beat.ticks) != self._moves:  # it has made progress meanwhile
            return
        if arguments.ends_hangs:
            self._end_rank(message, "hang")
        else:
            self._reported = self._moves
            self._say(message, "warning")

    def _write_stacks(self) -> Path:
        """Append the rank's stacks to RUN/hang-STEP.txt, or the process state where it does not give any."""
        arguments = self._arguments
        place = self._run_dir / f"hang-{self._beat.step}.txt"
        before = os.fstat(arguments.stacks).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(arguments.pid, STACKS_SIGNAL)
        end = time.monotonic() + (0.0 if self._heartbeat().stopped else _STACKS_SECONDS)
        size = before
        while time.monotonic() < end:
            time.sleep(0.1)
            previous, size = size, os.fstat(arguments.stacks).st_size
            if before < size == previous:
                break
        text = os.pread(arguments.stacks, size - before, before).decode(errors="replace")
        process = find_process(arguments.pid)
        state = f"it gave no stacks; its state is {process.state if process else 'gone'} (T: stopped, D: in the kernel)"
        where = f"step {self._beat.step}, {self._beat.phase}, {self._beat.where}"
        head = f"rank {arguments.rank}, {socket.gethostname()}, pid {arguments.pid}: {where}"
        self._disk.run(lambda: append_line(place, f"== {head}\n{text or state}\n"), None)
        return place

    def _end_rank(self, message: str, kind: str = "") -> None:
        """End the rank with exit code 6 (see `dino_ds.health.watchdog`), or else by SIGKILL.

        Only then report a failure of this `kind` ("" where another rank has reported it): that needs the disk.
        """
        self._beat.end("error", PEER_LOST, message)
        for number in (END_SIGNAL, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._arguments.pid, number)
        if kind:
            self._report(kind, message)
        if not self._rank_is_gone(3.0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._arguments.pid, signal.SIGKILL)
            self._rank_is_gone(3.0)

    def _report(self, kind: str, message: str) -> None:
        """Report a failure, unless another rank or its monitor has reported one before.

        Where the disk does not answer, monitors can't agree which of them reports: each does.
        """
        arguments, listed = self._arguments, self._beat.listed
        failure = Failure(arguments.rank, socket.gethostname(), self._beat.step, kind, PEER_LOST, message)
        if not listed or self._disk.run(lambda: self._heartbeats.claim(failure), True):
            self._say(message)

    def _say(self, message: str, kind: str = "error") -> None:
        self._terminal.run(lambda: print(f"dino_ds: {kind}: {message}", file=sys.stderr, flush=True), None)

    def _after_the_end(self) -> None:
        beat, arguments = self._beat, self._arguments
        if not beat.ended:
            message = describe_death(f"rank {arguments.rank}", death_of(arguments.pid), beat.step, beat.where)
            message = f"{message}; {last_checkpoint(self._run_dir)}"
            if beat.listed:
                self._report("died", message)
            beat.end("error", PEER_LOST, message)
        if beat.listed:
            self._disk.run(lambda: self._heartbeats.publish(self._heartbeat()), None)
        if arguments.rank == 0:
            if self._disk.run(lambda: not self._lock.guards_a_run and self._heartbeats.folder.exists(), False):
                time.sleep(_GRACE_SECONDS)  # the other ranks look there for the reason
                self._disk.run(self._heartbeats.remove, None)
            self._disk.run(self._lock.release, None)


def main() -> None:
    # Signals are for the rank to handle; the monitor ends with it.
    for number in (*STOP_SIGNALS, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    MonitorProcess(MonitorArguments(**json.loads(sys.argv[1]))).run()
    os._exit(0)  # a thread may still be waiting for a dead disk


if __name__ == "__main__":
    main()

"""The monitor: a process next to each rank that notices hangs, deaths and stop requests while the rank is busy.

python -m dino_ds.health.monitor, started by dino_ds.health.watchdog; the standard library only. It reads its rank's
progress from shared memory, publishes it every `PUBLISH_SECONDS`, and ends with its rank, whose end closes its stdin.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dino_ds.errors import STOP_SIGNALS
from dino_ds.health.beat import Beat
from dino_ds.health.files import Disk, append_line
from dino_ds.health.lock import RunLock
from dino_ds.health.processes import Process, RankProcess, Standstill, death_of, send_signal
from dino_ds.health.records import (
    Failure,
    Heartbeat,
    Heartbeats,
    describe_death,
    describe_hang,
    last_checkpoint,
)

PUBLISH_SECONDS = 2.0
_TICK_SECONDS = 0.5
_GRACE_SECONDS = 4.0
"""Time for a rank to end by itself after another rank has failed."""
_CONNECT_SECONDS = 2.0
PEER_LOST = 6


class MonitorArguments(NamedTuple):
    """A monitor's command line, as JSON. beat, stacks: file descriptors of the shared page and the file for stacks.
    starters: pid and ticks of the processes that the rank must not outlive."""

    rank: int
    world_size: int
    pid: int
    run_dir: str
    hang_seconds: float
    started: float
    beat: int
    stacks: int
    starters: list[list[int]]


class SharedFolder:
    """The run folder, through which monitors tell each other about their ranks; its disk may not answer.

    failure: the first failure of any rank, or None; taken_over: a message once another run holds the folder.
    """

    def __init__(self, arguments: MonitorArguments, beat: Beat) -> None:
        self._path, self._is_first, self._beat = Path(arguments.run_dir), arguments.rank == 0, beat
        self.heartbeats, self.lock = Heartbeats(self._path), RunLock(self._path, arguments.pid)
        self.failure: Failure | None = None
        self.taken_over, self._held_a_run = "", False

    def exchange(self, heartbeat: Heartbeat) -> None:
        """Publish the rank's heartbeat, and read what concerns the rank."""
        self.heartbeats.publish(heartbeat)
        self.failure = self.heartbeats.first_failure()
        self.heartbeats.disk.run(self._look, None)

    def _look(self) -> None:
        held_a_run, self._held_a_run = self._held_a_run, self.lock.guards_a_run
        if held_a_run and not self._held_a_run:
            self._beat.request_stop("the loss of the run folder")
        if (self._path / "stop").exists():
            self._beat.request_stop("the stop file")
        if self._is_first and not self.lock.refresh():
            other = self.lock.holder()
            whom = f"pid {other.pid} on {other.host}" if other else "another run"
            self.taken_over = f"{self._path} was taken over by {whom} while this one was frozen: it ends unsaved"

    def append_stacks(self, text: str) -> Path:
        """Append to RUN/hang-STEP.txt."""
        path = self._path / f"hang-{self._beat.step}.txt"
        self.heartbeats.disk.run(lambda: append_line(path, text), None)
        return path


class MonitorProcess:
    """Monitors one rank; `run` returns when the rank has ended."""

    def __init__(self, arguments: MonitorArguments) -> None:
        self._arguments = arguments
        self._beat = Beat.shared(arguments.beat)
        self._standstill = Standstill(self._beat)
        self._rank = RankProcess(arguments.pid, self._beat, arguments.stacks)
        self._starters = [Process(*starter) for starter in arguments.starters]
        self._folder = SharedFolder(arguments, self._beat)
        self._terminal = Disk()  # the output may be a file on a disk that does not answer

    def run(self) -> None:
        last = published = time.monotonic() - PUBLISH_SECONDS
        while not self._rank.is_gone(_TICK_SECONDS):
            now = time.monotonic()
            # A frozen machine freezes the monitor too: the time that it was frozen does not count.
            self._standstill.add(min(now - last, 4 * _TICK_SECONDS))
            last = now
            if self._beat.ended:
                continue
            if self._beat.listed and now - published >= PUBLISH_SECONDS:
                published = now
                self._folder.exchange(self._heartbeat())
            if not all(starter.alive for starter in self._starters):
                self._follow_launcher()
            if self._folder.taken_over:
                self._end_rank()
                self._say(self._folder.taken_over)
            elif self._folder.failure is not None:
                self._follow(self._folder.failure)
            elif self._hangs():
                self._handle_hang()
        self._after_the_end()

    def _follow_launcher(self) -> None:
        """Ask the rank to stop; by a signal if it is not at work yet, and would read the request after its start."""
        self._starters = []
        self._beat.request_stop("the end of the launcher")
        if self._beat.phase == "start":
            send_signal(self._rank.pid, signal.SIGTERM)

    def _follow(self, failure: Failure) -> None:
        """End the rank after the failure of another one, unless it ends in time by itself."""
        if not self._rank.is_gone(_GRACE_SECONDS) and not self._beat.ended:
            if failure.kind == "hang":
                self._write_stacks()
            self._end_rank()

    def _hangs(self) -> bool:
        seconds, still = self._arguments.hang_seconds, self._standstill
        return bool(seconds) and still.seconds > still.limit(seconds)

    def _handle_hang(self) -> None:
        """Write the stacks, say who is behind, and end the rank unless it has moved meanwhile."""
        seconds, behind = self._standstill.seconds, list[Heartbeat | int]()
        heartbeat = replace(self._heartbeat(), cut_off=_unreachable_first())
        stacks = self._write_stacks()
        if self._beat.listed:
            # Other monitors get here at about the same time: their newest heartbeats are needed.
            self._folder.heartbeats.publish(heartbeat)
            time.sleep(PUBLISH_SECONDS + _CONNECT_SECONDS + 2 * _TICK_SECONDS)
            behind = self._folder.heartbeats.behind(self._arguments.world_size)
        message = describe_hang(behind, heartbeat, seconds, stacks)
        if not self._standstill.moved():
            self._end_rank()
            self._report("hang", message)

    def _write_stacks(self) -> Path:
        where = f"step {self._beat.step}, {self._beat.phase}, {self._beat.where}"
        head = f"== rank {self._arguments.rank}, {socket.gethostname()}, pid {self._rank.pid}: {where}"
        return self._folder.append_stacks(f"{head}\n{self._rank.read_stacks()}\n")

    def _heartbeat(self) -> Heartbeat:
        about, beat = self._arguments, self._beat
        who = (about.rank, socket.gethostname(), about.pid, about.started, time.time())
        progress = (beat.step, beat.phase, beat.where, beat.moves, round(self._standstill.seconds, 1))
        return Heartbeat(*who, *progress, self._rank.stopped, beat.ended)

    def _end_rank(self) -> None:
        """End the rank; only then is its failure reported, which needs the disk."""
        self._beat.end("error")
        self._rank.end()

    def _report(self, kind: str, message: str) -> None:
        """Report a failure, unless another rank or its monitor has reported one before.

        If the disk does not answer, monitors can't agree which of them reports: each does.
        """
        message = f"{message}; {last_checkpoint(Path(self._arguments.run_dir))}"
        failure = Failure(self._arguments.rank, socket.gethostname(), self._beat.step, kind, PEER_LOST, message)
        if not self._beat.listed or self._folder.heartbeats.claim(failure) is not False:
            self._say(message)

    def _say(self, message: str) -> None:
        self._terminal.run(lambda: print(f"dino_ds: error: {message}", file=sys.stderr, flush=True), None)

    def _after_the_end(self) -> None:
        """Publish how the rank has ended; the monitor of rank 0 gives the run folder back."""
        beat, arguments = self._beat, self._arguments
        if not beat.ended:
            how = death_of(arguments.pid)
            if beat.listed:
                self._report("died", describe_death(f"rank {arguments.rank}", how, beat.step, beat.where))
            beat.end("error")
        if beat.listed:
            self._folder.heartbeats.publish(self._heartbeat())
        if arguments.rank == 0:
            self._folder.heartbeats.disk.run(self._folder.lock.release, None)


def _unreachable_first() -> str:
    """The address of rank 0's store if it does not answer, else ""."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if os.environ.get("WORLD_SIZE", "1") == "1" or not address or not port.isdecimal():
        return ""
    try:
        socket.create_connection((address, int(port)), _CONNECT_SECONDS).close()
    except OSError:
        return f"{address}:{port}"
    return ""


def main() -> None:
    # Signals are for the rank to handle; the monitor ends with it.
    for number in (*STOP_SIGNALS, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    MonitorProcess(MonitorArguments(*json.loads(sys.argv[1]))).run()
    os._exit(0)  # a thread may still be waiting for a dead disk


if __name__ == "__main__":
    main()

"""The monitor, a process next to each rank that notices hangs, deaths and stop requests while the rank is busy; and the
rank's side, which starts it and reports the first failure.

The monitor process needs no torch. It reads its rank's progress from shared memory, publishes it every
`PUBLISH_SECONDS`, and ends when its rank ends, which closes the monitor's stdin.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil

from dino_ds.basics.ranges import tell
from dino_ds.errors import STOP_SIGNALS, STOPPED, PeerError, UserError
from dino_ds.health import processes
from dino_ds.health.beat import Beat, Disk, Failure, Heartbeat, Heartbeats, append_line, describe_hang, last_checkpoint

_CAUSE_SECONDS = 3.0  # for the first rank to fail, or its monitor, to say why; peers notice within milliseconds
_CONNECTION = "connection (closed|reset|refused)|broken pipe|timed out waiting|application timeout|gloo|nccl|socket"
_CONNECTION += "|process group|store"


def longest_wait(hang_seconds: float) -> float:
    """Timeout in seconds for collectives of a process group: longer than monitors wait, since they know more."""
    return processes.PATIENCE * hang_seconds + 60 if hang_seconds else 1800.0


@contextmanager
def watchdog(run_dir: Path, rank: int, world_size: int, hang_seconds: float) -> Iterator[Beat]:
    """Let a monitor watch this rank while the block runs; yields the page of its progress. hang_seconds 0: no limit."""
    beat = Beat.shared()
    stacks = os.fdopen(os.memfd_create("dino_ds_stacks"), "r+b")  # no disk can hold it up
    job = (rank, world_size, os.getpid(), str(run_dir.absolute()), hang_seconds, time.time())
    arguments = (*job, beat.descriptor, stacks.fileno(), processes.starters())
    # Both handlers are C, so they run while another thread holds the GIL. That of signal 6 is libc's _exit: it is
    # called with the number of the signal, which is the exit code of a rank that hangs.
    faulthandler.register(processes.STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
    c = ctypes.CDLL(None)
    c.signal.restype, c.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    previous_handler = c.signal(processes.END_SIGNAL, ctypes.cast(c._exit, ctypes.c_void_p))
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    packages = str(Path(psutil.__file__).parents[1])
    code = f"import sys; sys.path.append({packages!r}); from dino_ds.health.monitor import main; main()"
    monitor = subprocess.Popen(
        [sys.executable, "-S", "-c", code, json.dumps(arguments)],  # -S: looking for packages takes time
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=(beat.descriptor, stacks.fileno()),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,  # a signal to the group of the rank leaves it time for the last heartbeat
    )
    assert monitor.stdin is not None
    try:
        with tell(beat.enter_part):
            yield beat
    finally:
        beat.left = True
        monitor.stdin.close()
        try:
            monitor.wait(10.0)  # for the last heartbeat
        except subprocess.TimeoutExpired:
            monitor.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                monitor.wait(1.0)  # waiting in the kernel for a dead disk, it ends once that answers
        faulthandler.unregister(processes.STACKS_SIGNAL)
        c.signal(processes.END_SIGNAL, previous_handler)
        stacks.close()
        os.close(beat.descriptor)


class Failures:
    """Reports how a rank ends, to its monitor and, once `beat.listed`, to all ranks; one prints the first failure."""

    def __init__(self, run_dir: Path, rank: int, world_size: int, beat: Beat) -> None:
        self._run_dir, self._rank, self._world_size, self._beat = run_dir, rank, world_size, beat
        self._heartbeats = Heartbeats(run_dir)

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Report how the block ends. Raises PeerError instead of an error of the connection, with another rank's report
        if there is one; RuntimeError for a SystemExit before the end: an unfinished run must not exit with 0."""
        try:
            yield
        except SystemExit as stop:
            if stop.code == STOPPED:
                self._beat.end("stopped")
                raise
            error = RuntimeError(f"sys.exit({stop.code!r}) was called at step {self._beat.step}, before the end")
            self._claim(1, f"RuntimeError: {error}")
            raise error from stop
        except UserError as error:
            if error.said_by_me is None:
                self.settle(error)
            raise
        except Exception as error:
            if self._world_size > 1 and is_connection_error(error):
                raise self._peer_error(error) from error
            self._claim(1, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
            raise
        except BaseException as error:  # such as a KeyboardInterrupt; Ctrl-C raises none here, it requests a stop
            self._claim(1, f"{type(error).__name__} at step {self._beat.step} ({self._beat.where})")
            if self._world_size > 1:
                raise RuntimeError(f"{type(error).__name__} was raised at step {self._beat.step}") from error
            raise
        else:
            self._beat.end("done")

    def settle(self, error: UserError) -> None:
        """Decide which rank reports `error`; call it before the heartbeats are removed."""
        claimed = self._claim(error.exit_code, str(error))
        # The first to fail reports, even if rank 0 has removed the folder by now. Without a folder, rank 0 does.
        known = claimed or (claimed is False and self._heartbeats.first_failure() is not None)
        if known and self._world_size > 1 and error.said_by_me is None:
            error.said_by_me = claimed

    def stopped_early(self, why: str) -> None:
        """Tell the other ranks that this rank ends at a signal before the first step."""
        self._claim(STOPPED, f"stopped by {why} before the first step", "stopped")
        if self._rank == 0:
            print(f"dino_ds: stopped by {why} before the first step: there is nothing to save", file=sys.stderr)

    def ended_at_once(self, code: int, message: str) -> None:
        """Report that this rank is about to end with `code`, and print why."""
        if self._claim(code, message) is not False:
            print(f"dino_ds: error: {message}", file=sys.stderr, flush=True)

    def _claim(self, code: int, message: str, kind: str = "error") -> bool | None:
        """Report this rank's end; returns whether it was the first, or None if ranks can't tell each other."""
        self._beat.end(kind)
        if not self._beat.listed:
            return None
        return self._heartbeats.claim(Failure(self._rank, socket.gethostname(), self._beat.step, kind, code, message))

    def _peer_error(self, error: Exception) -> PeerError:
        failure, end = None, time.monotonic() + _CAUSE_SECONDS
        if not self._beat.listed:
            time.sleep(1.0)  # the rank that failed may be about to report why
        while self._beat.listed and failure is None and time.monotonic() < end:
            time.sleep(0.05)
            failure = self._heartbeats.first_failure()
        if failure is not None and failure.rank != self._rank:
            peer = PeerError(failure.message)
            peer.exit_code, peer.said_by_me = failure.code, False
            self._beat.end("stopped" if failure.code == STOPPED else "error")
            return peer
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        where = f"at step {self._beat.step} ({self._beat.where})"
        lost = f"the connection to another rank was lost {where}: {reason[:200]}"
        peer = PeerError(f"{lost}; {last_checkpoint(self._run_dir)}")
        claimed = self._claim(peer.exit_code, str(peer))
        peer.said_by_me = claimed is not False or self._heartbeats.first_failure() is None
        return peer


def is_connection_error(error: BaseException) -> bool:
    """Whether an error says that gloo, NCCL or the store has lost a rank, not that this rank has failed."""
    names = {base.__name__ for base in type(error).__mro__}
    if names & {"DistBackendError", "DistNetworkError", "DistStoreError"}:
        return True
    return isinstance(error, RuntimeError) and re.search(_CONNECTION, str(error), re.IGNORECASE) is not None


PUBLISH_SECONDS = 2.0
_TICK_SECONDS = 0.5
_CONNECT_SECONDS = 2.0


class MonitorArguments(NamedTuple):
    """A monitor's command line, as JSON. beat, stacks: file descriptors; starters: the rank must not outlive them."""

    rank: int
    world_size: int
    pid: int
    run_dir: str
    hang_seconds: float
    started: float
    beat: int
    stacks: int
    starters: list[list[int]]


class MonitorProcess:
    """Monitors one rank until it has ended. Monitors tell each other about their ranks by files in the run folder."""

    def __init__(self, arguments: MonitorArguments) -> None:
        self._arguments, self._run_dir = arguments, Path(arguments.run_dir)
        self._beat = Beat.shared(arguments.beat)
        self._standstill = processes.Standstill(self._beat)
        self._rank = processes.RankProcess(arguments.pid, self._beat, arguments.stacks)
        self._starters = [processes.Process(*starter) for starter in arguments.starters]
        self._heartbeats = Heartbeats(self._run_dir)
        self._lock, self._held_a_run = processes.RunLock(self._run_dir, arguments.pid), False
        self._failure: Failure | None = None  # the first of any rank
        self._taken_over = ""  # a message once another run holds the folder
        self._terminal = Disk()  # the output may be a file on a disk that does not answer

    def run(self) -> None:
        last = published = time.monotonic() - PUBLISH_SECONDS
        while not self._rank.is_gone(_TICK_SECONDS):
            now, limit = time.monotonic(), self._arguments.hang_seconds
            # A frozen machine freezes the monitor too: the time that it was frozen does not count.
            self._standstill.add(min(now - last, 4 * _TICK_SECONDS))
            last = now
            if self._beat.ended:
                continue
            if self._beat.listed and now - published >= PUBLISH_SECONDS:
                published = now
                self._heartbeats.publish(self._heartbeat())
                self._failure = self._heartbeats.first_failure()
                self._heartbeats.disk.run(self._look, None)
            if not all(starter.alive for starter in self._starters):
                self._starters = []
                self._beat.request_stop("the end of the launcher")
                if self._beat.phase == "start":  # a rank that still starts up would read the request only later
                    processes.send_signal(self._rank.pid, signal.SIGTERM)
            if self._taken_over:
                self._end_rank()
                self._say(self._taken_over)
            elif self._failure is not None:  # another rank's: this one may end in time by itself
                if not self._rank.is_gone(4.0) and not self._beat.ended:
                    if self._failure.kind == "hang":
                        self._write_stacks()
                    self._end_rank()
            elif limit and self._standstill.seconds > self._standstill.limit(limit):
                self._handle_hang()
        self._after_the_end()

    def _look(self) -> None:
        held_a_run, self._held_a_run = self._held_a_run, self._lock.guards_a_run
        if held_a_run and not self._held_a_run:
            self._beat.request_stop("the loss of the run folder")
        if (self._run_dir / "stop").exists():
            self._beat.request_stop("the stop file")
        if self._arguments.rank == 0 and not self._lock.refresh():
            other = self._lock.holder()
            whom = f"pid {other.pid} on {other.host}" if other else "another run"
            self._taken_over = f"{self._run_dir} was taken over by {whom} while this one was frozen: it ends unsaved"

    def _handle_hang(self) -> None:
        seconds, behind = self._standstill.seconds, list[Heartbeat | int]()
        heartbeat, address = self._heartbeat(), os.environ.get("MASTER_ADDR")
        port = os.environ.get("MASTER_PORT", "")
        if os.environ.get("WORLD_SIZE", "1") != "1" and address and port.isdecimal():
            try:  # does the store of rank 0 answer?
                socket.create_connection((address, int(port)), _CONNECT_SECONDS).close()
            except OSError:
                heartbeat = replace(heartbeat, cut_off=f"{address}:{port}")
        stacks = self._write_stacks()
        if self._beat.listed:
            # Other monitors get here at about the same time: their newest heartbeats are needed.
            self._heartbeats.publish(heartbeat)
            time.sleep(PUBLISH_SECONDS + _CONNECT_SECONDS + 2 * _TICK_SECONDS)
            behind = self._heartbeats.behind(self._arguments.world_size)
        message = describe_hang(behind, heartbeat, seconds, stacks)
        if not self._standstill.moved():
            self._end_rank()
            self._report("hang", message)

    def _write_stacks(self) -> Path:
        path = self._run_dir / f"hang-{self._beat.step}.txt"
        where = f"step {self._beat.step}, {self._beat.phase}, {self._beat.where}"
        head = f"== rank {self._arguments.rank}, {socket.gethostname()}, pid {self._rank.pid}: {where}"
        text = f"{head}\n{self._rank.read_stacks()}\n"
        self._heartbeats.disk.run(lambda: append_line(path, text), None)
        return path

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
        """Report a failure, unless another rank or its monitor has; each does if the disk does not answer."""
        message = f"{message}; {last_checkpoint(self._run_dir)}"
        who = self._arguments.rank, socket.gethostname(), self._beat.step
        failure = Failure(*who, kind, PeerError.exit_code, message)
        if not self._beat.listed or self._heartbeats.claim(failure) is not False:
            self._say(message)

    def _say(self, message: str) -> None:
        self._terminal.run(lambda: print(f"dino_ds: error: {message}", file=sys.stderr, flush=True), None)

    def _after_the_end(self) -> None:
        beat, arguments = self._beat, self._arguments
        if not beat.ended:
            how, memory = processes.death_of(arguments.pid), "most often because memory has run out"
            unseen = f"; how was not seen: killed, {memory}, or ended by code of its own"
            by_code = ": code of its own, or of a library, has ended the process" if how.startswith("with ") else ""
            why = {"": unseen, "by SIGKILL": f", {memory}"}.get(how, by_code)
            if beat.listed:
                died = f"rank {arguments.rank} died{' ' if how else ''}{how} at step {beat.step} ({beat.where})"
                self._report("died", died + why)
            beat.end("error")
        if beat.listed:
            self._heartbeats.publish(self._heartbeat())
        if arguments.rank == 0:
            self._heartbeats.disk.run(self._lock.release, None)


def main() -> None:
    for number in (*STOP_SIGNALS, signal.SIGQUIT):  # signals are for the rank to handle; the monitor ends with it
        signal.signal(number, signal.SIG_IGN)
    MonitorProcess(MonitorArguments(*json.loads(sys.argv[1]))).run()
    os._exit(0)  # a thread may still be waiting for a dead disk


if __name__ == "__main__":
    main()

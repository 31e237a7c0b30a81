"""The part of health checks inside a rank: starts its monitor process, which may end it; reports the first failure."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import psutil

from dino_ds.basics.ranges import tell
from dino_ds.errors import STOPPED, PeerError, UserError
from dino_ds.health.beat import Beat
from dino_ds.health.monitor import MonitorArguments
from dino_ds.health.processes import END_SIGNAL, PATIENCE, STACKS_SIGNAL, starters
from dino_ds.health.records import Failure, Heartbeats, last_checkpoint

_EXIT_SECONDS = 10.0
"""Time for a monitor to write the last heartbeat."""
_CAUSE_SECONDS = 3.0
"""Time for the rank that failed first, or its monitor, to write down why. Peers notice within milliseconds."""
_CONNECTION = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out waiting|application timeout|gloo|nccl|socket|"
    r"process group|store",
    re.IGNORECASE,
)


def longest_wait(hang_seconds: float) -> float:
    """Timeout in seconds for collectives of a process group: longer than monitors wait, since they know more."""
    return PATIENCE * hang_seconds + 60 if hang_seconds else 1800.0


class Watchdog:
    """Lets a monitor process watch this rank while the `with` block runs; `beat` holds its progress.

    hang_seconds: see the recipe; 0: hangs are ignored.
    """

    def __init__(self, run_dir: Path, rank: int, world_size: int, hang_seconds: float) -> None:
        self.beat = Beat.shared()
        self._stacks = os.fdopen(os.memfd_create("dino_ds_stacks"), "r+b")  # no disk can hold it up
        job = (rank, world_size, os.getpid(), str(run_dir.absolute()), hang_seconds, time.time())
        fds = self.beat.descriptor, self._stacks.fileno()
        self._arguments = MonitorArguments(*job, *fds, starters=[[*starter] for starter in starters()])
        self._c = ctypes.CDLL(None)
        self._c.signal.restype, self._c.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)

    def __enter__(self) -> Watchdog:
        # Both handlers are C, so they run while another thread holds the GIL. That of signal 6 is libc's _exit: it
        # is called with the number of the signal, which is the exit code of a rank that hangs.
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True, chain=False)
        leave = ctypes.cast(self._c._exit, ctypes.c_void_p)
        self._previous_handler = self._c.signal(END_SIGNAL, leave)
        self._telling = contextlib.ExitStack()
        self._telling.enter_context(tell(self.beat.enter_part))
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        packages = str(Path(psutil.__file__).parents[1])
        code = f"import sys; sys.path.append({packages!r}); from dino_ds.health.monitor import main; main()"
        self._monitor = subprocess.Popen(
            [sys.executable, "-S", "-c", code, json.dumps(self._arguments)],  # -S: looking for packages takes time
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(self.beat.descriptor, self._stacks.fileno()),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # a signal to the group of the rank leaves it time for the last heartbeat
        )
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        assert self._monitor.stdin is not None
        self._telling.close()
        self.beat.left = True
        self._monitor.stdin.close()
        try:
            self._monitor.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._monitor.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._monitor.wait(1.0)  # waiting in the kernel for a dead disk, it ends once that answers
        faulthandler.unregister(STACKS_SIGNAL)
        self._c.signal(END_SIGNAL, self._previous_handler)
        self._stacks.close()
        os.close(self.beat.descriptor)


class Failures:
    """Reports how one rank of a run ends: to its monitor and, once `beat.listed`, to the other ranks.

    Exactly one rank prints the first failure; the others end with its exit code, silently.
    """

    def __init__(self, run_dir: Path, rank: int, world_size: int, beat: Beat) -> None:
        self._run_dir, self._rank, self._world_size, self._beat = run_dir, rank, world_size, beat
        self._heartbeats = Heartbeats(run_dir)

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Report how the block ends.

        Raises PeerError, with the message and exit code of the cause, instead of an error of the connection; and
        RuntimeError for a SystemExit that is not a stop on request: an unfinished run must not exit with 0.
        """
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
            self._claim(1, f"{type(error).__name__}: {_first_line(error)}")
            raise
        except BaseException as error:  # KeyboardInterrupt: not by Ctrl-C, which is a request to stop by then
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
        failure = self._wait_for_cause()
        if failure is not None and failure.rank != self._rank:
            peer = PeerError(failure.message)
            peer.exit_code, peer.said_by_me = failure.code, False
            self._beat.end("stopped" if failure.code == STOPPED else "error")
            return peer
        reason = _first_line(error) or type(error).__name__
        where = f"at step {self._beat.step} ({self._beat.where})"
        lost = f"the connection to another rank was lost {where}: {reason[:200]}"
        peer = PeerError(f"{lost}; {last_checkpoint(self._run_dir)}")
        claimed = self._claim(peer.exit_code, str(peer))
        peer.said_by_me = claimed is not False or self._heartbeats.first_failure() is None
        return peer

    def _wait_for_cause(self) -> Failure | None:
        """Wait for the record of the first failure, None if it is late: its rank may be slower than its peers."""
        if not self._beat.listed:
            time.sleep(1.0)  # the rank that failed may be about to report why
            return None
        end = time.monotonic() + _CAUSE_SECONDS
        while (failure := self._heartbeats.first_failure()) is None and time.monotonic() < end:
            time.sleep(0.05)
        return failure


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def is_connection_error(error: BaseException) -> bool:
    """Whether an error says that gloo, NCCL or the store has lost a rank, not that this rank has failed."""
    names = {base.__name__ for base in type(error).__mro__}
    if names & {"DistBackendError", "DistNetworkError", "DistStoreError"}:
        return True
    return isinstance(error, RuntimeError) and _CONNECTION.search(str(error)) is not None

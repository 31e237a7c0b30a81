"""Finds the first failure of a run and has exactly one rank report it; the others end with its exit code, silently."""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dino_ds.errors import STOPPED, PeerError, UserError
from dino_ds.health.beat import Beat
from dino_ds.health.records import Failure, Heartbeats, last_checkpoint

_CAUSE_SECONDS = 3.0
"""Time for the rank that failed first, or its monitor, to write down why. Peers notice within milliseconds."""
_CONNECTION = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out waiting|application timeout|gloo|nccl|socket|"
    r"process group|store",
    re.IGNORECASE,
)


class Failures:
    """Reports how one rank of a run ends: to its monitor and, once `beat.listed`, to the other ranks."""

    def __init__(self, run_dir: Path, rank: int, world_size: int, beat: Beat) -> None:
        self._run_dir, self._rank, self._world_size, self._beat = run_dir, rank, world_size, beat
        self._heartbeats = Heartbeats(run_dir)

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Report what ends the block.

        Raises PeerError, with the message and exit code of the cause, instead of an error of the connection; and
        RuntimeError for a SystemExit that is not a stop on request: an unfinished run must not exit with 0.
        """
        try:
            yield
        except SystemExit as stop:
            if stop.code == STOPPED:
                self._beat.end("stopped", STOPPED, "")
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
            self._beat.end("done", 0, "")

    def settle(self, error: UserError) -> None:
        """Decide which rank reports `error`; to be called before the heartbeats are removed, if they are."""
        claimed = self._claim(error.exit_code, str(error))
        # Who was first reports it, even if rank 0 has removed the place by now. Without one, rank 0 does.
        known = claimed or (claimed is False and self._heartbeats.first_failure() is not None)
        if known and self._world_size > 1:
            error.said_by_me = claimed

    def stopped_early(self, why: str) -> None:
        """Tell the other ranks that this one ends at a signal before the first step."""
        self._claim(STOPPED, f"stopped by {why} before the first step", "stopped")
        if self._rank == 0:
            print(f"dino_ds: stopped by {why} before the first step: there is nothing to save", file=sys.stderr)

    def ended_at_once(self, code: int, message: str) -> None:
        """Report that this rank is about to end with `code`, and print why."""
        if self._claim(code, message) is not False:
            print(f"dino_ds: error: {message}", file=sys.stderr, flush=True)

    def _claim(self, code: int, message: str, kind: str = "error") -> bool | None:
        """Report this rank's end; whether it was the first, or None if ranks can't reach each other."""
        self._beat.end(kind, code, message)
        if not self._beat.listed:
            return None
        return self._heartbeats.claim(Failure(self._rank, socket.gethostname(), self._beat.step, kind, code, message))

    def _peer_error(self, error: Exception) -> PeerError:
        failure = self._wait_for_cause()
        if failure is not None and failure.rank != self._rank:
            peer = PeerError(failure.message)
            peer.exit_code, peer.said_by_me = failure.code, False
            self._beat.end("stopped" if failure.code == STOPPED else "error", failure.code, failure.message)
            return peer
        reason = _first_line(error) or type(error).__name__
        beats = self._heartbeats.read()
        gone = [str(beat.rank) for beat in beats if beat.ended == "error" and beat.rank != self._rank]
        who = f"rank {', '.join(gone)} is gone" if gone else "the connection to another rank was lost"
        step, where = self._beat.step, self._beat.where
        peer = PeerError(f"{who} at step {step} ({where}): {reason[:200]}; {last_checkpoint(self._run_dir)}")
        claimed = self._claim(peer.exit_code, str(peer))
        peer.said_by_me = claimed is not False or self._heartbeats.first_failure() is None
        return peer

    def _wait_for_cause(self) -> Failure | None:
        """The first failure, if it is recorded in time: its rank may be slower than its peers."""
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

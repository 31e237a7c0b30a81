"""Saving while training goes on: a copy in host memory, a thread that writes it, a commit when all ranks have written.

That a rank has written, or could not, travels with the votes of each step: no collective of its own. The commit is
decided on all ranks after the same step; then two small host gathers make it one.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_ds import distributed
from dino_ds.checkpoint import Checkpoints
from dino_ds.checkpoint_files import FileRecord, file_bytes, write_tensors
from dino_ds.checkpoint_manifest import Manifest, rank_file, whole_file
from dino_ds.distributed import Votes
from dino_ds.errors import StorageError

FAILED_SAVES_IN_A_ROW = 3
_NUMBERS = 255  # saves are told apart by a vote of 1 to 255: times 65,000 ranks it is exact in FP32
_WAIT_SECONDS = 1.0
# On top of the tensors: manifest, folders, and what a file system keeps for itself.
_SPARE_FRACTION, _SPARE_BYTES = 0.02, 2**20


@dataclass(frozen=True)
class SaveCost:
    """Of the last checkpoint: training stood still for `stall_seconds`, all was done after `seconds`; its bytes."""

    stall_seconds: float
    seconds: float
    bytes: int


@dataclass
class _Flight:
    """The save that is being written. `manifest` lacks what is known only when all is written."""

    number: int
    manifest: dict[str, Any]
    layout: dict[str, Any]
    bytes: int
    begun: float
    stalled: float = 0.0
    thread: threading.Thread | None = None
    records: dict[str, FileRecord] = field(default_factory=dict)
    error: OSError | None = None

    @property
    def step(self) -> int:
        return int(self.manifest["step"])


class Saving:
    """Every rank has one and calls the same methods after the same steps.

    Args: `votes` with "saved" and "save_failed"; `background` False writes from the tensors themselves, while training
    waits: no second copy in host memory. `finish(folder)` is run by rank 0 with each new checkpoint.
    """

    def __init__(
        self, checkpoints: Checkpoints, votes: Votes, background: bool, finish: Callable[[Path], None]
    ) -> None:
        self._checkpoints, self._votes, self._background, self._finish_one = checkpoints, votes, background, finish
        self._flight: _Flight | None = None
        self._last: dict[str, Any] | None = None
        self._number = self._failures = 0
        self._host: dict[str, Tensor] = {}
        self._chores: threading.Thread | None = None
        self._chore_error: OSError | None = None
        self.cost: SaveCost | None = None

    def save(
        self,
        tensors: Mapping[str, Tensor],
        layout: dict[str, Any],
        whole: Mapping[str, Tensor],
        manifest: dict[str, Any],
        wait: bool,
    ) -> list[str]:
        """A checkpoint of this rank's `tensors` and of its share of `whole`, which all ranks hold; lines to say.

        `manifest`: fields of Manifest but for layouts and files. With `wait` it is committed on return. Raises
        StorageError on all ranks if that fails, or if it was the third save in a row that failed.
        """
        lines: list[str] = []
        if self._flight is not None and self._flight.manifest != manifest:
            waited = time.perf_counter()
            behind = self._flight.step
            lines += self.land(must=False)
            waited = time.perf_counter() - waited
            lines.append(f"save     step {manifest['step']} waited {waited:.1f} s for the save of step {behind}")
        if self._flight is None and self._last != manifest:
            lines += self._take_off(tensors, layout, whole, manifest, wait)
        if wait or not self._background:
            lines += self.land(must=wait)
        return lines

    def look(self) -> list[str]:
        """After each applied step: commits a save that all ranks have written; lines to say."""
        lines = self._chores_done()
        flight = self._flight
        if flight is not None:
            done = self._votes.count("saved") + self._votes.count("save_failed")
            if done == flight.number * distributed.world_size():
                lines += self._commit(flight, must=False)
        return lines

    def _take_off(
        self,
        tensors: Mapping[str, Tensor],
        layout: dict[str, Any],
        whole: Mapping[str, Tensor],
        manifest: dict[str, Any],
        wait: bool,
    ) -> list[str]:
        begun = time.perf_counter()
        mine = {
            rank_file(distributed.rank()): dict(tensors),
            whole_file(distributed.rank()): _my_share(whole),
        }
        mine = {name: file for name, file in mine.items() if file or name.startswith("rank_")}
        size = sum(file_bytes(file) for file in mine.values())
        step = int(manifest["step"])
        lines = self._join_chores()
        total, problem = self._make_room(step, size)
        if problem:
            return lines + self._failed(step, problem, must=wait)
        if self._background and not wait:
            mine = {name: self._copy(name, file) for name, file in mine.items()}
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        self._number = self._number % _NUMBERS + 1
        flight = self._flight = _Flight(self._number, manifest, layout, total, begun)
        flight.thread = threading.Thread(target=self._write, args=(flight, mine), name="save", daemon=True)
        flight.thread.start()
        flight.stalled = time.perf_counter() - begun
        return lines

    def _make_room(self, step: int, size: int) -> tuple[int, str]:
        """Rank 0 makes the folder; the bytes of all ranks' files, and why they can't be written, agreed by all."""
        error = ""
        free = 0
        try:
            if distributed.rank() == 0:
                folder = self._checkpoints.begin(step)
                found = os.statvfs(folder)
                free = found.f_bavail * found.f_frsize
        except OSError as problem:
            error = f"cannot save step {step}: {problem.strerror}: {problem.filename}"
        answers = distributed.gather_objects((size, free, error))
        total, (_, free, error) = sum(answer[0] for answer in answers), answers[0]
        needed = int(total * (1 + _SPARE_FRACTION)) + _SPARE_BYTES
        return total, error or (self._no_space(step, needed, free) if needed > free else "")

    def _no_space(self, step: int, needed: int, free: int) -> str:
        where = self._checkpoints.folder
        return f"cannot save step {step}: {needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free in {where}"

    def _copy(self, file: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In host memory that is kept for the next save: page-locked where they come from a GPU."""
        copies = {}
        for name, tensor in tensors.items():
            key = f"{file}/{name}"
            host = self._host.get(key)
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._host[key] = host
            copies[name] = host.copy_(tensor.detach(), non_blocking=True)
        return copies

    def _write(self, flight: _Flight, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The thread: writes and verifies this rank's files, then votes."""
        folder = self._checkpoints.writing_folder(flight.step)
        about = {"format": "pt", "run_id": flight.manifest["run_id"], "step": str(flight.step)}
        vote = "save_failed"
        try:
            for name, tensors in files.items():
                flight.records[name] = write_tensors(folder / name, tensors, about)
            vote = "saved"
        except OSError as error:
            flight.error = error
        except BaseException as error:  # a defect of ours costs this save, not the run
            flight.error = OSError(errno.EIO, f"{type(error).__name__}: {error}", str(folder))
        finally:
            self._votes.cast(vote, flight.number)

    def land(self, must: bool) -> list[str]:
        """Wait until all ranks have written, and commit. In slices, so that no collective waits for a slow disk."""
        flight = self._flight
        if flight is None:
            return self._join_chores(together=must)
        assert flight.thread is not None
        begun = time.perf_counter()
        while True:
            flight.thread.join(_WAIT_SECONDS)
            if not any(distributed.gather_objects(flight.thread.is_alive())):
                break
        flight.stalled += time.perf_counter() - begun
        return self._commit(flight, must) + self._join_chores(together=must)

    def _commit(self, flight: _Flight, must: bool) -> list[str]:
        begun = time.perf_counter()
        self._flight = None
        self._votes.cast("saved", 0)
        self._votes.cast("save_failed", 0)
        reason = self._reason(flight) if flight.error else ""
        answers = distributed.gather_objects((flight.records, flight.layout, reason))
        reason = next((f"{why} (rank {rank})" for rank, (*_, why) in enumerate(answers) if why), "")
        folder: Path | None = None
        if not reason and distributed.rank() == 0:
            files = {name: record for records, *_ in answers for name, record in records.items()}
            manifest = Manifest(**flight.manifest, layouts=[layout for _, layout, _ in answers], files=files)
            try:
                folder = self._checkpoints.commit(manifest)
            except OSError as error:
                flight.error = error
                reason = self._reason(flight)
        reason = distributed.gather_objects(reason)[0]
        if reason:
            return self._failed(flight.step, reason, must)
        self._failures, self._last = 0, flight.manifest
        if folder is not None:
            self._chores = threading.Thread(target=self._do_chores, args=(folder, flight.step), daemon=True)
            self._chores.start()
        now = time.perf_counter()
        self.cost = SaveCost(flight.stalled + now - begun, now - flight.begun, flight.bytes)
        return [f"save     step {flight.step}: {_described(self.cost)}"]

    def _reason(self, flight: _Flight) -> str:
        error = flight.error
        assert error is not None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            found = os.statvfs(self._checkpoints.folder)
            return self._no_space(flight.step, flight.bytes, found.f_bavail * found.f_frsize)
        return f"cannot save step {flight.step}: {error.strerror}: {error.filename or self._checkpoints.folder}"

    def _failed(self, step: int, reason: str, must: bool) -> list[str]:
        """Nothing of the save stays; on all ranks the same line or error."""
        if distributed.rank() == 0:
            self._checkpoints.give_up(step)
        self._failures += 1
        if must:
            raise StorageError(reason)
        if self._failures >= FAILED_SAVES_IN_A_ROW:
            raise StorageError(f"{reason}; {self._failures} saves in a row have failed")
        limit = FAILED_SAVES_IN_A_ROW
        return [f"warning  {reason}; training goes on ({self._failures} failed in a row, {limit} stop the run)"]

    def _do_chores(self, folder: Path, step: int) -> None:
        try:
            self._checkpoints.rotate(step)
            self._finish_one(folder)
        except OSError as error:
            self._chore_error = error

    def _join_chores(self, together: bool = False) -> list[str]:
        """Wait for rank 0's work after a commit; `together` makes its failure an error of all ranks."""
        if self._chores is not None:
            self._chores.join()
        lines = self._chores_done()
        if together:
            with distributed.together():
                if lines:
                    raise StorageError(lines[0].removeprefix("warning  "))
        return lines

    def _chores_done(self) -> list[str]:
        if self._chores is None or self._chores.is_alive():
            return []
        error, self._chores, self._chore_error = self._chore_error, None, None
        return [] if error is None else [f"warning  after a save: {error.strerror}: {error.filename}"]


def _my_share(whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor goes to one rank, large ones first, so that all ranks write about as much."""
    loads = [0] * distributed.world_size()
    mine = {}
    for name in sorted(whole, key=lambda name: (-whole[name].numel(), name)):
        to = loads.index(min(loads))
        loads[to] += whole[name].numel()
        if to == distributed.rank():
            mine[name] = whole[name]
    return mine


def _described(cost: SaveCost) -> str:
    return f"{cost.bytes / 2**30:.3g} GiB in {cost.seconds:.1f} s, training stood still for {cost.stall_seconds:.2f} s"

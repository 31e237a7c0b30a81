"""This rank's side of a save: which tensors it writes, their copies in host memory, and the thread that writes them."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_ds import distributed
from dino_ds.checkpoint.files import FileRecord, file_bytes, write_tensors
from dino_ds.checkpoint.manifest import rank_file, whole_file

Files = dict[str, dict[str, Tensor]]
"""Name of a file -> its tensors."""


def files_of_this_rank(tensors: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> Files:
    """Its own part, and its share of what all ranks hold: each of those goes to one rank, large ones first."""
    rank = distributed.rank()
    loads = [0] * distributed.world_size()
    share = {}
    for name in sorted(whole, key=lambda name: (-whole[name].numel(), name)):
        to = loads.index(min(loads))
        loads[to] += whole[name].numel()
        if to == rank:
            share[name] = whole[name]
    return {rank_file(rank): dict(tensors), **({whole_file(rank): share} if share else {})}


def bytes_of(files: Files) -> int:
    return sum(file_bytes(tensors) for tensors in files.values())


class HostCopies:
    """Memory for one copy of this rank's files, kept from save to save; page-locked where tensors are on a GPU."""

    def __init__(self) -> None:
        self._host: dict[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._host.values())

    def reserve(self, files: Files) -> float:
        """Take the memory that is not there yet; returns the seconds, which only the first save pays."""
        begun = time.perf_counter()
        for name, file in files.items():
            for key, tensor in file.items():
                place, host = f"{name}/{key}", self._host.get(f"{name}/{key}")
                if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                    self._host[place] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return time.perf_counter() - begun

    def take(self, files: Files) -> Files:
        """The tensors as they are now, whatever training does to them afterwards; after `reserve`."""
        copies = {
            name: {key: self._host[f"{name}/{key}"].copy_(t.detach(), non_blocking=True) for key, t in file.items()}
            for name, file in files.items()
        }
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies


@dataclass
class PendingSave:
    """A save that is being written. `number` tells it from others; `manifest` and `layout` as for Saving.save.

    bytes: of all ranks; begun, stalled: seconds, when it began and how long training has waited for it, `reserved` of
    them for host memory that the next saves find there; then what the thread has found: `records` of its files, or the
    `error`.
    """

    number: int
    manifest: dict[str, Any]
    layout: dict[str, Any]
    bytes: int
    begun: float
    reserved: float = 0.0
    stalled: float = 0.0
    records: dict[str, FileRecord] = field(default_factory=dict)
    error: OSError | None = None
    _thread: threading.Thread | None = None

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    def start(self, folder: Path, files: Files, vote: Callable[[bool], None]) -> None:
        """The thread writes and verifies `files`, then votes whether it could."""
        self._thread = threading.Thread(target=self._write, args=(folder, files, vote), name="save", daemon=True)
        self._thread.start()
        self.stalled = time.perf_counter() - self.begun

    def _write(self, folder: Path, files: Files, vote: Callable[[bool], None]) -> None:
        about = {"format": "pt", "run_id": self.manifest["run_id"], "step": str(self.step)}
        try:
            for name, tensors in files.items():
                self.records[name] = write_tensors(folder / name, tensors, about)
        except Exception as error:
            self.error = as_os_error(error, folder)
        finally:
            vote(self.error is None)

    def is_written(self, seconds: float) -> bool:
        """Whether this rank's thread has ended; waits for it so long at most."""
        assert self._thread is not None
        self._thread.join(seconds)
        return not self._thread.is_alive()


def as_os_error(error: Exception, where: Path) -> OSError:
    """A defect of ours costs a save, not the run, and is told as a full disk is."""
    if isinstance(error, OSError):
        return error
    return OSError(errno.EIO, f"{type(error).__name__}: {' '.join(str(error).split())}", str(where))

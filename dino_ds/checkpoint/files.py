"""Writes tensors to disk so that damage is noticed: with a checksum, synced, read back; one rank's side of a save.

The files are safetensors (8 bytes with the header's length, a JSON header, raw data): any reader of that format opens
them, and nothing in them can run. They are written here and not by the library's `save_file`, which copies all tensors
first and holds Python's lock while it writes: training would stand still for as long as the disk takes. Here the bytes
go from the tensors' own memory to the file, piece by piece; writing, syncing and checksums all let other threads run.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_ds.engine import distributed
from dino_ds.errors import is_out_of_memory, one_line

_PIECE_BYTES = 16 * 2**20
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.uint8: "U8"}
_DTYPES |= {torch.float64: "F64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL"}


@dataclass(frozen=True)
class FileRecord:
    """Length and CRC32 of a file."""

    bytes: int
    crc32: int


def file_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Approximate length of the file that `write_tensors` makes of these tensors."""
    return sum(t.numel() * t.element_size() + 256 for t in tensors.values()) + 1024


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: dict[str, str]) -> FileRecord:
    """Write a safetensors file of tensors on any device, with `about` in its header, and verify it by reading it back.

    Raises OSError if the disk is full, can't be written to, or returns other bytes than were written.
    """
    size = crc = 0
    with path.open("wb", buffering=0) as file:
        for piece in _content(tensors, about):
            crc = zlib.crc32(piece, crc)
            written = 0
            while written < len(piece):  # a disk that fills up takes only a part
                written += os.write(file.fileno(), piece[written:])
            size += len(piece)
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # read back what the disk has, not what memory still holds
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    record = FileRecord(size, crc)
    if checksum(path) != record:
        raise OSError(errno.EIO, "gives other bytes back than were written", str(path))
    return record


def checksum(path: Path, progress: Callable[[int], object] = lambda _bytes: None) -> FileRecord:
    """Length and CRC32 of a file; `progress` is called with the length of every piece. Raises OSError."""
    size = crc = 0
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            size += count
            progress(count)
    return FileRecord(size, crc)


def is_plain_file(path: Path) -> bool:
    """Whether the path is a regular file itself, not a link or a pipe."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _content(tensors: Mapping[str, Tensor], about: dict[str, str]) -> Iterator[memoryview]:
    # Wider elements first, so that each tensor begins at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": about}
    offset = 0
    for name in names:
        dtype, shape = tensors[name].dtype, tensors[name].shape
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        flat = tensors[name].detach().reshape(-1).cpu().view(torch.uint8)
        data = memoryview(flat.numpy().data)
        for begin in range(0, len(data), _PIECE_BYTES):
            yield data[begin : begin + _PIECE_BYTES]


Files = dict[str, dict[str, Tensor]]
"""File name -> the tensors in the file by name."""


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def whole_file(rank: int) -> str:
    return f"whole_{rank:05d}.safetensors"


def files_of_this_rank(tensors: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> Files:
    """The files that this rank writes: its own `tensors`, and its share of `whole`, which all ranks hold. Each tensor
    of `whole` is assigned to one rank, large ones first."""
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
    """Host memory for one copy of this rank's files, reused by all saves; page-locked for tensors on a GPU."""

    def __init__(self) -> None:
        self._host: dict[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._host.values())

    def take(self, files: Files) -> Files:
        """Copy the tensors as they are now."""
        copies = {
            name: {key: self._place(f"{name}/{key}", t).copy_(t.detach(), non_blocking=True) for key, t in file.items()}
            for name, file in files.items()
        }
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies

    def _place(self, key: str, tensor: Tensor) -> Tensor:
        host = self._host.get(key)
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            host = self._host[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return host


@dataclass
class PendingSave:
    """A save that a thread is writing. `number` is its flag in a step; `manifest`, `layout`: see Saving.save.

    bytes: size on all ranks; begun: start by the performance counter; stalled: seconds that training waited; records:
    the written files; error: why writing failed.
    """

    number: int
    manifest: dict[str, Any]
    layout: dict[str, Any]
    bytes: int
    begun: float
    stalled: float = 0.0
    records: dict[str, FileRecord] = field(default_factory=dict)
    error: OSError | None = None
    _thread: threading.Thread | None = None

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    def start(self, folder: Path, files: Files, on_end: Callable[[bool], None]) -> None:
        """Start a thread that writes and verifies `files`, then calls `on_end` with whether that succeeded."""
        self._thread = threading.Thread(target=self._write, args=(folder, files, on_end), name="save", daemon=True)
        self._thread.start()
        self.stalled = time.perf_counter() - self.begun

    def _write(self, folder: Path, files: Files, on_end: Callable[[bool], None]) -> None:
        about = {"format": "pt", "run_id": self.manifest["run_id"], "step": str(self.step)}
        try:
            for name, tensors in files.items():
                self.records[name] = write_tensors(folder / name, tensors, about)
        except Exception as error:
            self.error = as_os_error(error, folder)
        finally:
            on_end(self.error is None)

    def is_written(self, seconds: float) -> bool:
        """Whether this rank's thread has ended; waits at most `seconds`."""
        assert self._thread is not None
        self._thread.join(seconds)
        return not self._thread.is_alive()


def as_os_error(error: Exception, where: Path) -> OSError:
    """Any error as an OSError, ENOMEM if memory ran out: a bug of ours costs a save, not the run."""
    if isinstance(error, OSError):
        return error
    if is_out_of_memory(error):
        return OSError(errno.ENOMEM, f"out of memory ({one_line(error)})", str(where))
    return OSError(errno.EIO, f"{type(error).__name__}: {one_line(error, 1000)}", str(where))

"""Writes and reads a checkpoint's files so that damage is noticed: with checksums in a manifest, synced, read back.
step_00000500/ has manifest.json, rank_00000.safetensors (each rank's part of student and optimizer) and
whole_00000.safetensors (teacher and center, each tensor in one rank's file). Bytes go from the tensors' own memory to
the file; safetensors' `save_file` would first copy all of them, and hold Python's lock while it writes."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors
import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from torch import Tensor

from dino_ds.basics.files import FORMAT, append_whole, check_format
from dino_ds.basics.names import step_name
from dino_ds.engine import distributed
from dino_ds.errors import CheckpointError, is_out_of_memory, one_line

_PIECE_BYTES = 16 * 2**20
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.uint8: "U8"}
_DTYPES |= {torch.float64: "F64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL"}


@dataclass(frozen=True)
class FileRecord:
    bytes: int
    crc32: int


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: dict[str, str]) -> FileRecord:
    """Write a safetensors file of tensors on any device, with `about` in its header, and verify it by reading it back.
    Raises OSError if the disk is full, can't be written to, or returns other bytes than were written."""
    size = crc = 0
    with path.open("wb", buffering=0) as file:
        for piece in _content(tensors, about):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
            append_whole(file.fileno(), piece)
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
    return os.path.isfile(path) and not os.path.islink(path)


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


Files = dict[str, dict[str, Tensor]]  # file name -> the tensors in the file by name


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def files_of_this_rank(tensors: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> Files:
    """The files of this rank: its own `tensors`, and its share of `whole`, which all ranks hold, divided evenly."""
    rank, loads = distributed.rank(), [0] * distributed.world_size()
    share = {}
    for name in sorted(whole, key=lambda name: (-whole[name].numel(), name)):
        to = loads.index(min(loads))
        loads[to] += whole[name].numel()
        if to == rank:
            share[name] = whole[name]
    return {rank_file(rank): dict(tensors), **({f"whole_{rank:05d}.safetensors": share} if share else {})}


def bytes_of(files: Files) -> int:
    """Approximate length of the files that `write_tensors` makes of these tensors."""
    tensors = [tensor for file in files.values() for tensor in file.values()]
    return sum(t.numel() * t.element_size() + 256 for t in tensors) + 1024 * len(files)


@dataclass
class PendingSave:
    """A save that a thread is writing. number: its flag in a step; manifest, layout: see Saving.save; bytes: size on
    all ranks; begun: by the performance counter; stalled: seconds that training waited; error: why writing failed."""

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
        about = {"format": "pt", "run_id": self.manifest["run_id"], "step": str(self.step)}

        def write() -> None:
            try:
                for name, tensors in files.items():
                    self.records[name] = write_tensors(folder / name, tensors, about)
            except Exception as error:
                self.error = as_os_error(error, folder)
            finally:
                on_end(self.error is None)

        self._thread = threading.Thread(target=write, name="save", daemon=True)
        self._thread.start()
        self.stalled = time.perf_counter() - self.begun

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


MANIFEST = "manifest.json"
WHOLE = "whole_"  # beginning of the names of the files that hold the teacher, its heads and the centers
STEP_NAME = re.compile(r"step_(\d{8,12})")
KEPT = "kept"  # key of Manifest.state: the step of an older checkpoint that is kept, as its teacher is the best
_MOST_BYTES = 2**28
Whole = Annotated[int, Field(ge=0)]


class Manifest(BaseModel):
    """Everything about a checkpoint but its tensors. images: the training images (see `dino_ds.data.sources`);
    frozen_teacher: source and digest of the teacher that is distilled, or None; state: position and counters of the
    run; layouts: one per rank, of its tensors (see `dino_ds.engine.state`); files: lengths and checksums by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    run_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{1,64}$")]
    step: Whole
    stage: Annotated[int, Field(ge=0, le=3)]
    world_size: Annotated[int, Field(ge=1)]
    precision: Literal["fp32", "bf16", "fp16"]
    offload: bool
    micro_batch: Annotated[int, Field(ge=1)]
    accumulation: Annotated[int, Field(ge=1)]
    gradient_clipping: float
    recipe: dict[str, Any]
    images: dict[str, Any]
    frozen_teacher: dict[str, Any] | None = None
    versions: dict[str, str]
    state: dict[str, Any]
    layouts: list[dict[str, Any]]
    files: dict[Annotated[str, StringConstraints(pattern=r"^(rank|whole)_\d{5,7}\.safetensors$")], FileRecord]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError, saying what is wrong with it."""
    path, this = folder / MANIFEST, _this(folder)
    if not is_plain_file(path):
        raise CheckpointError(f"{this} is incomplete: it has no {MANIFEST}")
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("it is too long")
        content = path.read_bytes()
        body = json.loads(content)
        if not isinstance(body, dict) or sealed({k: v for k, v in body.items() if k != "crc32"}) != content:
            raise ValueError("its own checksum differs")
        del body["crc32"]
        check_format(body.get("format"), f"the {MANIFEST} of {this}", "resume its run with the dino_ds that wrote it")
        manifest = Manifest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{this} has a {MANIFEST} that can't be used ({where}: {first['msg']})") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{this} has a damaged {MANIFEST} ({one_line(error, 80)})") from None
    if STEP_NAME.fullmatch(folder.name) and folder.name != step_name(manifest.step):
        raise CheckpointError(f"{this} is that of step {manifest.step} under another name")
    return manifest


def check_present(folder: Path, manifest: Manifest) -> None:
    """Check that every file is there and as long as it should be. Raises CheckpointError."""
    expected = {rank_file(rank) for rank in range(manifest.world_size)}
    if not expected <= manifest.files.keys() or len(manifest.layouts) != manifest.world_size:
        raise CheckpointError(f"{_this(folder)} has a {MANIFEST} that can't be used (not a file for every rank)")
    there = [name for name in manifest.files if is_plain_file(folder / name)]
    if len(there) < len(manifest.files):
        raise CheckpointError(f"{_this(folder)} is incomplete ({len(there)} of {len(manifest.files)} files)")
    for name, record in manifest.files.items():
        size = (folder / name).stat().st_size
        if size != record.bytes:
            raise CheckpointError(f"checkpoint file {folder / name} is damaged ({size} bytes, expected {record.bytes})")


class SavedCheckpoint:
    """A verified checkpoint, read as a `dino_ds.engine.state.SavedState`; also its whole_* tensors and manifest."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.layouts = manifest.layouts
        self._open: dict[str, Any] = {}

    def read(self, rank: int, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a rank's flat tensor, FP32, on the CPU. Raises CheckpointError if it is shorter."""
        try:
            values: Tensor = self._file(rank_file(rank)).get_slice(name)[start:stop]
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{self.folder / rank_file(rank)}: {error}") from None
        if values.shape != (stop - start,):
            raise CheckpointError(f"{self.folder / rank_file(rank)}: {name} ends before element {stop}")
        return values.to(torch.float32)

    def whole(self) -> dict[str, Tensor]:
        """Tensors of all whole_* files by name; they stay on the disk until they are used."""
        tensors: dict[str, Tensor] = {}
        for name in sorted(self.manifest.files):
            if name.startswith(WHOLE):
                try:
                    file = self._file(name)
                    tensors.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 (not a dict)
                except (OSError, safetensors.SafetensorError) as error:
                    raise CheckpointError(f"{self.folder / name}: {error}") from None
        return tensors

    def of_rank(self, rank: int, prefix: str) -> dict[str, Tensor]:
        """A rank's tensors named `prefix`..., without the prefix; ranks beyond those saved reuse files in turn."""
        file = self._file(rank_file(rank % self.manifest.world_size))
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 (not a dict)
        return {name.removeprefix(prefix): file.get_tensor(name) for name in names}

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safetensors.safe_open(self.folder / name, framework="pt")
        return self._open[name]


def _this(folder: Path) -> str:
    match = STEP_NAME.fullmatch(folder.name)
    return f"checkpoint step {int(match[1])}" if match else f"checkpoint {folder}"


def sealed(body: dict[str, Any]) -> bytes:
    """The JSON of `body`, always written in the same way, with the CRC32 of its other keys."""
    return _dump({**body, "crc32": content_sum(body)})


def content_sum(body: dict[str, Any]) -> int:
    """CRC32 of the content of a JSON object, whatever its layout in the file."""
    return zlib.crc32(_dump(body))


def _dump(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()

"""Reads a checkpoint folder, and checks that every byte is as its manifest says.

step_00000500/  manifest.json  rank_00000.safetensors ...  whole_00000.safetensors ...
rank_*: each rank's part of student and optimizer; whole_*: teacher and center, each tensor in the file of one rank.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors
import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from torch import Tensor

from dino_ds.basics.file_format import FORMAT, check_format
from dino_ds.basics.names import step_name
from dino_ds.checkpoint.files import FileRecord, is_plain_file, rank_file
from dino_ds.errors import CheckpointError, one_line

MANIFEST = "manifest.json"
WHOLE = "whole_"
"""Beginning of the names of the files that hold the teacher, its heads and the centers."""
STEP_NAME = re.compile(r"step_(\d{8,12})")
KEPT = "kept"
"""The key of `Manifest.state` with the step of an older checkpoint that is kept: its teacher is the best so far."""
_MOST_BYTES = 2**28
FileName = Annotated[str, StringConstraints(pattern=r"^(rank|whole)_\d{5,7}\.safetensors$")]
Whole = Annotated[int, Field(ge=0)]


class Manifest(BaseModel):
    """Everything about a checkpoint but its tensors.

    config_hash: hash of the settings in recipe and gradient_clipping that change what is learned; images: the training
    images (see `dino_ds.data.image_set`); frozen_teacher: source and digest of the teacher that is distilled, or None;
    state: position and counters of the run; layouts: one per rank, of its
    tensors (see `dino_ds.engine.saved_state`); files: lengths and checksums by name.
    """

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
    config_hash: str
    images: dict[str, Any]
    frozen_teacher: dict[str, Any] | None = None
    versions: dict[str, str]
    state: dict[str, Any]
    layouts: list[dict[str, Any]]
    files: dict[FileName, FileRecord]

    def seal(self) -> bytes:
        """The content of the file on the disk."""
        return _seal(self.model_dump())


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
        if not isinstance(body, dict) or _seal({k: v for k, v in body.items() if k != "crc32"}) != content:
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


def check_content(folder: Path, name: str, manifest: Manifest, record: FileRecord) -> None:
    """Check that one file's bytes are the saved ones. Raises CheckpointError."""
    expected = manifest.files[name]
    if record != expected:
        how = f"crc {record.crc32:08x}, expected {expected.crc32:08x}: its bytes are not those that were saved"
        raise CheckpointError(f"checkpoint file {folder / name} is damaged ({how})")


class SavedCheckpoint:
    """A verified checkpoint: a `dino_ds.engine.saved_state.SavedState`, the tensors of whole_*, and the manifest."""

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
        """Tensors of a rank's file whose names begin with `prefix`, without it; of more ranks than saved, in turn."""
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


def content_sum(body: dict[str, Any]) -> int:
    """CRC32 of the content of a JSON object, whatever its layout in the file."""
    return zlib.crc32(_dump(body))


def _seal(body: dict[str, Any]) -> bytes:
    """The JSON of `body`, always written in the same way, with the CRC32 of its other keys."""
    return _dump({**body, "crc32": content_sum(body)})


def _dump(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()

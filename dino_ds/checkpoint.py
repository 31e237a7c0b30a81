"""Checkpoints that are complete or absent: RUN/checkpoints/step_00000500/, `latest`, and the teacher's own file.

A checkpoint is written under a temporary name; when all ranks have finished, rank 0 renames it and moves `latest`.
It holds student and optimizer (DeepSpeed's files), teacher and centre (whole.safetensors) and the run's position
(state.json). No random-number state: data, augmentation and stochastic depth follow from (seed, epoch, index).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
from torch import Tensor

from dino_ds import distributed
from dino_ds.errors import CheckpointError

_NAME = re.compile(r"step_(\d{8})")


class Sharded(Protocol):
    """What is saved in parts, one or more a rank: the engine."""

    def save(self, folder: Path, tag: str) -> None: ...

    def load(self, folder: Path, tag: str) -> None: ...


class Checkpoints:
    """The checkpoints of one run folder; `keep` of them stay."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self._folder = run_dir / "checkpoints"
        self._keep = keep

    def save(self, engine: Sharded, whole: dict[str, Tensor], state: dict[str, Any]) -> None:
        """All ranks must call it. `whole` are tensors that only rank 0 need have; `state` plain JSON with "step"."""
        name = f"step_{state['step']:08d}"
        temporary = f"writing_{name}"
        if distributed.rank() == 0:
            shutil.rmtree(self._folder / temporary, ignore_errors=True)
            self._folder.mkdir(parents=True, exist_ok=True)
        distributed.barrier()
        engine.save(self._folder, temporary)
        if distributed.rank() == 0:
            folder = self._folder / temporary
            safetensors.torch.save_file(whole, folder / "whole.safetensors")
            files = {p.name: p.stat().st_size for p in sorted(folder.iterdir())}
            (folder / "state.json").write_text(json.dumps({**state, "files": files}, indent=1))
            _make_durable(folder)
            _put_in_place(folder, self._folder / name)
            _replace_text(self._folder / "latest", name + "\n")
            self._rotate()
        distributed.barrier()

    def _rotate(self) -> None:
        for folder in self._complete()[: -self._keep]:
            shutil.rmtree(folder, ignore_errors=True)

    def _complete(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(f for f in self._folder.iterdir() if _NAME.fullmatch(f.name) and (f / "state.json").is_file())

    def find_latest(self) -> Path | None:
        """The checkpoint that `latest` names, or the newest complete one where `latest` is gone; None for none.

        Raises CheckpointError when `latest` names another.
        """
        complete = self._complete()
        if not complete:
            return None
        pointer = self._folder / "latest"
        name = pointer.read_text().strip() if pointer.is_file() else complete[-1].name
        for folder in complete:
            if folder.name == name:
                return folder
        have = ", ".join(folder.name for folder in complete)
        raise CheckpointError(f"{pointer} names {name!r}, which is not there; have: {have}. Write one of them into it")

    def read_state(self, folder: Path) -> dict[str, Any]:
        """The position that `save` wrote. Raises CheckpointError if a file is missing or has another size."""
        instead = f"name another step in {self._folder / 'latest'}: {', '.join(f.name for f in self._complete())}"
        try:
            state: dict[str, Any] = json.loads((folder / "state.json").read_text())
        except ValueError as error:
            raise CheckpointError(f"{folder / 'state.json'} is damaged ({error}); {instead}") from None
        for name, size in state["files"].items():
            path = folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                what = "is missing" if found is None else f"has {found} bytes instead of {size}"
                raise CheckpointError(f"{path} {what}; {instead}")
        return state

    def load(self, folder: Path, engine: Sharded) -> dict[str, Tensor]:
        """Student and optimizer into the engine; returns the whole tensors. All ranks must call it."""
        engine.load(folder.parent, folder.name)
        return safetensors.torch.load_file(folder / "whole.safetensors")


def save_teacher(run_dir: Path, backbone: dict[str, Tensor], about: dict[str, Any]) -> None:
    """RUN/teacher.safetensors: FP32 with timm's names; RUN/teacher.json: how it was made. Rank 0 writes."""
    if distributed.rank() != 0:
        return
    path = run_dir / "teacher.safetensors"
    temporary = path.with_suffix(".tmp")
    safetensors.torch.save_file(backbone, temporary, metadata={"format": "pt"})
    os.replace(temporary, path)
    _replace_text(run_dir / "teacher.json", json.dumps(about, indent=1) + "\n")


def _make_durable(folder: Path) -> None:
    """On the disk, whatever happens to the power."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(folder: Path, place: Path) -> None:
    """Rename `folder` to `place`; an older folder there goes only after the new one has come."""
    old = place.with_name(f"replaced_{place.name}")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    folder.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _replace_text(path: Path, text: str) -> None:
    """Old text or new text, never half of it, whenever the power goes."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)

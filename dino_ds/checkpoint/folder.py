"""The checkpoints of a run, complete or absent: RUN/checkpoints/step_00000500/ ..., and `latest` names the newest.

A checkpoint is written under another name (`dino_ds.checkpoint.saving`), and valid once its folder is renamed. It is
used only if every byte is as its manifest says. It has no random-number state: data, augmentation and stochastic depth
follow from (seed, epoch, index).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from dino_ds.basics.files import discard, put_in_place, replace_file, sync
from dino_ds.basics.names import step_name
from dino_ds.checkpoint.manifest import (
    KEPT,
    MANIFEST,
    STEP_NAME,
    FileRecord,
    Manifest,
    SavedCheckpoint,
    check_content,
    check_present,
    checksum,
    read_manifest,
)
from dino_ds.engine import distributed
from dino_ds.errors import CheckpointError

Read = Callable[[Path, Callable[[int], object]], FileRecord]
_WRITING, _REMOVING, _ASIDE = "writing_", "removing_", "aside_"


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from, or None if the run has none yet, and notes about the choice."""

    saved: SavedCheckpoint | None
    notes: list[str]


class Checkpoints:
    """The checkpoints of a run. It keeps the last `keep` complete ones, those whose step is a multiple of `keep_every`,
    and the one with the best teacher, whose step is in the newest manifest (KEPT)."""

    def __init__(self, run_dir: Path, keep: int, keep_every: int = 0) -> None:
        self.folder = run_dir / "checkpoints"
        self._keep, self._keep_every = keep, keep_every

    def choose(self, wanted: int | None, run_id: str | None, accept: Callable[[Manifest], None]) -> Choice:
        """Choose the checkpoint of step `wanted` or the newest intact one, of the run `run_id`; all ranks must call it.

        `accept` raises CheckpointError for a checkpoint that cannot be resumed. Raises CheckpointError on all ranks if
        there are checkpoints and none is intact, or `wanted` is absent or damaged.
        """
        steps = distributed.gather_objects(self._steps())[0]
        if wanted is not None and wanted not in steps:
            raise CheckpointError(f"checkpoint of step {wanted} not found in {self.folder}; found: {_list(steps)}")
        problems: list[str] = []
        for step in steps if wanted is None else [wanted]:
            manifest, problem = self._inspect(step, run_id, accept)
            if manifest is not None:
                notes = [f"{line}; using step {step}" for line in problems]
                return Choice(SavedCheckpoint(self.folder / step_name(step), manifest), notes)
            problems.append(problem)
        if wanted is not None:
            raise CheckpointError(f"{problems[0]}; found: {_list(steps)}")
        if problems:
            raise CheckpointError(f"{'; '.join(problems)}; and no older checkpoint exists in {self.folder}")
        return Choice(None, [])

    def _inspect(
        self, step: int, run_id: str | None, accept: Callable[[Manifest], None]
    ) -> tuple[Manifest | None, str]:
        """The manifest of an intact checkpoint, else a description of the damage; the same on all ranks.

        Every rank reads the manifest; the files are divided among the ranks to verify their checksums.
        """
        folder, manifest, problem = self.folder / step_name(step), None, ""
        try:
            # Unlike Path.resolve, realpath raises nothing for a link to itself.
            if os.path.dirname(os.path.realpath(folder)) != os.path.realpath(self.folder):
                raise CheckpointError(f"checkpoint step {step} is a link that leads out of {self.folder}: refused")
            manifest = read_manifest(folder)
            if run_id not in (None, manifest.run_id):
                file = self.folder.parent / "environment.json"
                raise CheckpointError(f"checkpoint step {step} in {self.folder} is of another run than {file} says")
            check_present(folder, manifest)
        except CheckpointError as error:
            problem = str(error)
        except OSError as error:
            problem = f"checkpoint step {step} can't be read ({error.strerror})"
        if problem := _first(problem):
            return None, problem
        assert manifest is not None
        with distributed.raise_on_all_ranks():
            accept(manifest)
        share = sorted(manifest.files)[distributed.rank() :: distributed.world_size()]
        if problem := _first(find_damage(folder, manifest, share)):
            return None, problem
        return manifest, ""

    def tidy(self, step: int) -> list[str]:
        """On rank 0, clear up before training continues from `step`; returns lines for the log. Raises OSError.

        Half-written folders are removed. Checkpoints of later steps are set aside, and removed once training has
        reached their step again.
        """
        if distributed.rank() != 0 or not self.folder.is_dir():
            return []
        for path in self.folder.iterdir():
            if path.name.startswith((_WRITING, _REMOVING)) or path.name.endswith(".tmp"):
                discard(path)
        later = [later_step for later_step in self._steps() if later_step > step]
        for later_step in later:
            aside = self.folder / (_ASIDE + step_name(later_step))
            discard(aside)
            (self.folder / step_name(later_step)).rename(aside)
        self._point_to(step)
        return [f"checkpoints of later steps are put aside as {_ASIDE}step_*: {_list(later)}"] if later else []

    def free_bytes(self) -> int:
        """Free space on the disk, including the space that `tidy` will free."""
        existing = next(path for path in (self.folder, *self.folder.parents) if path.is_dir())
        disk = os.statvfs(existing)
        left = [path for path in self.folder.glob("*") if path.name.startswith((_WRITING, _REMOVING))]
        return disk.f_bavail * disk.f_frsize + sum(file.lstat().st_size for path in left for file in path.glob("*"))

    def begin(self, step: int) -> Path:
        """Make an empty folder to write a checkpoint into, on rank 0. Raises OSError."""
        folder = self.writing_folder(step)
        discard(folder)
        self.folder.mkdir(exist_ok=True)  # without parents: a renamed run folder must not be made again
        folder.mkdir()
        return folder

    def writing_folder(self, step: int) -> Path:
        return self.folder / (_WRITING + step_name(step))

    def _point_to(self, step: int) -> None:
        """Write this step, unless it is 0, into `latest`, a hint for people; no run resumes by it. Raises OSError."""
        if step and not (self.folder / "latest").is_dir():
            replace_file(self.folder / "latest", step_name(step) + "\n")

    def commit(self, manifest: Manifest) -> Path:
        """Make the written folder, whose files are verified, the newest checkpoint, on rank 0. Raises OSError.

        If the process dies here, `latest` names the new checkpoint or the one before.
        """
        written, folder = self.writing_folder(manifest.step), self.folder / step_name(manifest.step)
        replace_file(written / MANIFEST, manifest.seal())
        if os.path.lexists(folder):
            self._remove(folder)
        put_in_place(written, folder)
        self._point_to(manifest.step)
        return folder

    def rotate(self, newest: int) -> None:
        """Remove the checkpoints before `newest` that are not kept, on rank 0. Only good ones count towards `keep`."""
        good = [step for step in self._steps() if step <= newest and self._looks_good(step)]
        oldest = good[: self._keep][-1]
        best = read_manifest(self.folder / step_name(newest)).state.get(KEPT)
        for step in self._steps():
            if step < oldest and step != best and not (self._keep_every and step % self._keep_every == 0):
                self._remove(self.folder / step_name(step))
        for path in self.folder.glob(_ASIDE + "step_*"):
            match = STEP_NAME.fullmatch(path.name.removeprefix(_ASIDE))
            if match and int(match[1]) <= newest:
                self._remove(path)

    def _looks_good(self, step: int) -> bool:
        folder = self.folder / step_name(step)
        try:
            check_present(folder, read_manifest(folder))
        except (CheckpointError, OSError):
            return False
        return True

    def _remove(self, folder: Path) -> None:
        """Rename the folder, then remove it: if the process dies meanwhile, no incomplete checkpoint is left."""
        doomed = self.folder / (_REMOVING + folder.name)
        discard(doomed)
        folder.rename(doomed)
        sync(self.folder)
        discard(doomed)

    def _steps(self) -> list[int]:
        """Steps of all entries of the folder that have a checkpoint's name, newest first."""
        if not self.folder.is_dir():
            return []
        matches = [match for name in os.listdir(self.folder) if (match := STEP_NAME.fullmatch(name))]
        return sorted((int(m[1]) for m in matches if step_name(int(m[1])) == m[0]), reverse=True)


def find_damage(folder: Path, manifest: Manifest, names: Sequence[str], read: Read = checksum) -> str:
    """Read these files of a checkpoint with `read`; returns a description of the first damage, or ""."""
    total = sum(manifest.files[name].bytes for name in names)
    quiet = distributed.rank() != 0 or not sys.stderr.isatty()
    title = f"verifying {folder.name}"
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, leave=False, disable=quiet) as bar:
        for name in names:
            try:
                check_content(folder, name, manifest, read(folder / name, bar.update))
            except CheckpointError as error:
                return str(error)
            except OSError as error:
                return f"checkpoint file {folder / name} can't be read ({error.strerror})"
    return ""


def _first(problem: str) -> str:
    """The problem of the first rank that has one, or "", on all ranks."""
    return next((text for text in distributed.gather_objects(problem) if text), "")


def _list(steps: list[int]) -> str:
    return ", ".join(str(step) for step in sorted(steps)) or "none"

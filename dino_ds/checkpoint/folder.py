"""The checkpoints of a run, complete or absent: RUN/checkpoints/step_00000500/ ..., and `latest` names the newest. A
checkpoint is written under another name, and valid once its folder is renamed. It is used only if every byte is as its
manifest says. It has no random-number state: data, augmentation and stochastic depth follow from (seed, epoch, index).
It is saved in the background: a copy in host memory, a thread that writes it, a commit at the end. A rank reports that
it has written in the flags of a step; after that step, all ranks decide on the commit, with two host gathers."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from dino_ds.basics.files import discard, put_in_place, replace_file, sync
from dino_ds.basics.formatting import short
from dino_ds.basics.names import step_name
from dino_ds.checkpoint import manifest as manifests
from dino_ds.checkpoint.manifest import Manifest, PendingSave, SavedCheckpoint
from dino_ds.engine import distributed
from dino_ds.engine.distributed import RankFlags
from dino_ds.errors import NO_SPACE, CheckpointError, OutOfMemory, StorageError, UserError
from dino_ds.health.beat import Event

Read = Callable[[Path, Callable[[int], object]], manifests.FileRecord]
_WRITING, _REMOVING, _ASIDE = "writing_", "removing_", "aside_"


@dataclass(frozen=True)
class Choice:
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
        Raises CheckpointError on all ranks if none of those there is intact, or `accept` refuses one by raising it."""
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
        """The manifest of an intact checkpoint, or its damage in words; each rank reads some files, and all agree."""
        folder, manifest, problem = self.folder / step_name(step), None, ""
        try:
            # Unlike Path.resolve, realpath raises nothing for a link to itself.
            if os.path.dirname(os.path.realpath(folder)) != os.path.realpath(self.folder):
                raise CheckpointError(f"checkpoint step {step} is a link that leads out of {self.folder}: refused")
            manifest = manifests.read_manifest(folder)
            if run_id not in (None, manifest.run_id):
                file = self.folder.parent / "environment.json"
                raise CheckpointError(f"checkpoint step {step} in {self.folder} is of another run than {file} says")
            manifests.check_present(folder, manifest)
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
        """On rank 0, clear up before training continues from `step`: remove half-written folders, and set checkpoints
        of later steps aside until training has reached their step again. Returns lines for the log. Raises OSError."""
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
        """Make the written folder, whose files are verified, the newest checkpoint, on rank 0. Raises OSError. If the
        process dies here, `latest` names the new checkpoint or the one before."""
        written, folder = self.writing_folder(manifest.step), self.folder / step_name(manifest.step)
        replace_file(written / manifests.MANIFEST, manifests.sealed(manifest.model_dump()))
        if os.path.lexists(folder):
            self._remove(folder)
        put_in_place(written, folder)
        self._point_to(manifest.step)
        return folder

    def rotate(self, newest: int) -> None:
        """Remove the checkpoints before `newest` that are not kept, on rank 0. Only good ones count towards `keep`."""
        good = []
        for step in self._steps():
            folder = self.folder / step_name(step)
            with contextlib.suppress(CheckpointError, OSError):
                if step <= newest:
                    manifests.check_present(folder, manifests.read_manifest(folder))
                    good.append(step)
        oldest = good[: self._keep][-1]
        best = manifests.read_manifest(self.folder / step_name(newest)).state.get(manifests.KEPT)
        for step in self._steps():
            if step < oldest and step != best and not (self._keep_every and step % self._keep_every == 0):
                self._remove(self.folder / step_name(step))
        for path in self.folder.glob(_ASIDE + "step_*"):
            match = manifests.STEP_NAME.fullmatch(path.name.removeprefix(_ASIDE))
            if match and int(match[1]) <= newest:
                self._remove(path)

    def _remove(self, folder: Path) -> None:
        """Rename the folder, then remove it: if the process dies meanwhile, no incomplete checkpoint is left."""
        doomed = self.folder / (_REMOVING + folder.name)
        discard(doomed)
        folder.rename(doomed)
        sync(self.folder)
        discard(doomed)

    def _steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        matches = [match for name in os.listdir(self.folder) if (match := manifests.STEP_NAME.fullmatch(name))]
        return sorted((int(m[1]) for m in matches if step_name(int(m[1])) == m[0]), reverse=True)


def find_damage(folder: Path, manifest: Manifest, names: Sequence[str], read: Read = manifests.checksum) -> str:
    """Read these files of a checkpoint with `read`; returns a description of the first damage, or ""."""
    total = sum(manifest.files[name].bytes for name in names)
    quiet = distributed.rank() != 0 or not sys.stderr.isatty()
    title = f"verifying {folder.name}"
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, leave=False, disable=quiet) as bar:
        for name in names:
            try:
                record, expected = read(folder / name, bar.update), manifest.files[name]
            except OSError as error:
                return f"checkpoint file {folder / name} can't be read ({error.strerror})"
            if record != expected:
                how = f"crc {record.crc32:08x}, expected {expected.crc32:08x}: its bytes are not those that were saved"
                return f"checkpoint file {folder / name} is damaged ({how})"
    return ""


def _first(problem: str) -> str:
    """The problem of the first rank that has one, or "", on all ranks."""
    return next((text for text in distributed.gather_objects(problem) if text), "")


def _list(steps: list[int]) -> str:
    return ", ".join(str(step) for step in sorted(steps)) or "none"


_NUMBERS = 255  # a save's flag is its number, 1 to 255: its sum over 65,000 ranks is exact in FP32
_WAIT_SECONDS = 1.0
# On top of the tensors: manifest, folders, and what a file system keeps for itself.
_SPARE_FRACTION, _SPARE_BYTES = 0.02, 2**20


class SaveCost(NamedTuple):
    """Cost of the last checkpoint, equal on all ranks: time that training stood still, time until the commit, size."""

    stall_seconds: float
    seconds: float
    bytes: int


class Saving:
    """Saves checkpoints; every rank calls the same methods after the same steps, and at most one save is being written.
    Args: `flags` has "saved" and "save_failed"; without `background` the tensors themselves are written while training
    waits, and no copy in host memory is made. Rank 0 runs `finish(folder)`, in a thread, for each new checkpoint."""

    def __init__(
        self, checkpoints: Checkpoints, flags: RankFlags, background: bool, finish: Callable[[Path], None]
    ) -> None:
        self._checkpoints, self._flags, self._background = checkpoints, flags, background
        self._pending: PendingSave | None = None
        self._last: dict[str, Any] | None = None
        self._number = self._failures = 0
        self._finish = finish
        self._tasks_error: OSError | None = None
        self._tasks: threading.Thread | None = None
        self.copies: dict[tuple[str, str], Tensor] = {}
        self.cost: SaveCost | None = None

    def check_space(self, tensors: Mapping[str, Tensor], whole: Mapping[str, Tensor], more: int) -> None:
        """Raise StorageError, on all ranks, if the disk has no space for one checkpoint and `more` bytes."""
        total = sum(distributed.gather_objects(manifests.bytes_of(manifests.files_of_this_rank(tensors, whole))))
        needed, folder = int((total + more) * (1 + _SPARE_FRACTION)) + _SPARE_BYTES, self._checkpoints.folder
        with distributed.raise_on_all_ranks():
            if distributed.rank() == 0:
                left = [path for path in folder.glob("*") if path.name.startswith((_WRITING, _REMOVING))]
                free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.is_dir())).free
                free += sum(file.lstat().st_size for path in left for file in path.glob("*"))  # `tidy` will free it
                if needed > free:
                    few = f"need {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free in {folder.parent}"
                    raise StorageError(f"a checkpoint and the teacher {few}: make room, or give another --run_dir")

    def save(
        self,
        tensors: Mapping[str, Tensor],
        layout: dict[str, Any],
        whole: Mapping[str, Tensor],
        manifest: dict[str, Any],
        wait: bool,
    ) -> list[str]:
        """Save this rank's `tensors` and `whole`, which all ranks hold; returns lines for the log. `manifest`: fields
        of Manifest without layouts and files. With `wait` it is committed on return, or StorageError raised."""
        lines: list[str] = []
        if self._pending is not None and self._pending.manifest != manifest:
            lines += self._wait_and_commit(must=False)
        if self._pending is None and self._last != manifest:
            lines += self._start(manifests.files_of_this_rank(tensors, whole), layout, manifest, wait)
        if wait or not self._background:
            lines += self._wait_and_commit(must=wait)
        if wait:
            lines += self._wait_for_tasks(must=True)
        return lines

    def poll(self) -> list[str]:
        """After an applied step, commit a save that all ranks have written; returns log lines. Raises StorageError."""
        lines, pending = self._ended_tasks(), self._pending
        if pending is not None:
            written = self._flags.count("saved") + self._flags.count("save_failed")
            if written == pending.number * distributed.world_size():
                lines += self._commit(pending, must=False)
        return lines

    def finish(self, must: bool = False) -> list[str]:
        """Wait for the save that is being written, if any; returns lines for the log. All ranks must call this. With
        `must` a failure raises StorageError on all ranks; else it is a line, unless it is the third in a row."""
        return self._wait_and_commit(must) + self._wait_for_tasks(must)

    def _start(self, files: manifests.Files, layout: dict[str, Any], manifest: dict[str, Any], wait: bool) -> list[str]:
        begun, step, size = time.perf_counter(), int(manifest["step"]), manifests.bytes_of(files)
        lines: list[str] = []
        total, problem = self._make_room(step, size)
        if problem:  # older checkpoints may be about to be removed
            lines += self._wait_for_tasks()
            total, problem = self._make_room(step, size)
            if problem:
                return lines + self._failed(step, StorageError(problem), must=wait)
        if self._background and not wait:
            files = self._copied(files)
        number = self._number = self._number % _NUMBERS + 1
        self._pending = PendingSave(number, manifest, layout, total, begun)
        folder = self._checkpoints.writing_folder(step)
        self._pending.start(folder, files, lambda good: self._flags.set("saved" if good else "save_failed", number))
        return lines

    def _copied(self, files: manifests.Files) -> manifests.Files:
        """The tensors as they are now, in host memory that all saves reuse; page-locked for tensors on a GPU."""
        copies: manifests.Files = {name: {} for name in files}
        for name, key, tensor in ((name, *item) for name, file in files.items() for item in file.items()):
            host = self.copies.get((name, key))
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copies[name][key] = self.copies[name, key] = host.copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies

    def _make_room(self, step: int, size: int) -> tuple[int, str]:
        """Make the folder, on rank 0; on all ranks, return the bytes of all files, and why they can't be written."""
        free, error = 0, ""
        try:
            if distributed.rank() == 0:
                free = shutil.disk_usage(self._checkpoints.begin(step)).free
        except OSError as problem:
            error = f"cannot save step {step}: {problem.strerror}: {problem.filename}"
        answers = distributed.gather_objects((size, free, error))
        total, (_, free, error) = sum(answer[0] for answer in answers), answers[0]
        needed = int(total * (1 + _SPARE_FRACTION)) + _SPARE_BYTES
        return total, error or (self._no_space(step, needed, free) if needed > free else "")

    def _wait_and_commit(self, must: bool) -> list[str]:
        """Wait until all ranks have written, in slices so that no collective waits for a slow disk; then commit."""
        pending = self._pending
        if pending is None:
            return []
        begun, quiet = time.perf_counter(), distributed.rank() != 0 or not sys.stderr.isatty()
        title = f"saving step {pending.step}"
        with tqdm(desc=title, bar_format="{desc}: {elapsed}", leave=False, disable=quiet) as bar:
            while not all(distributed.gather_objects(pending.is_written(_WAIT_SECONDS))):
                bar.update()
        pending.stalled += time.perf_counter() - begun
        return self._commit(pending, must)

    def _commit(self, pending: PendingSave, must: bool) -> list[str]:
        begun = time.perf_counter()
        self._pending = None
        self._flags.set("saved", 0)
        self._flags.set("save_failed", 0)
        pending.is_written(_WAIT_SECONDS)  # the thread has set its flag, and is about to end
        mine = self._reason(pending, pending.error) if pending.error else None
        answers = distributed.gather_objects((pending.records, pending.layout, mine))
        reason = next((type(why)(f"{why} (rank {rank})") for rank, (*_, why) in enumerate(answers) if why), None)
        folder = None
        if not reason and distributed.rank() == 0:
            files = {name: record for records, *_ in answers for name, record in records.items()}
            try:
                manifest = Manifest(**pending.manifest, layouts=[layout for _, layout, _ in answers], files=files)
                folder = self._checkpoints.commit(manifest)
            except Exception as error:  # of any kind: the other ranks wait for the outcome
                reason = self._reason(pending, manifests.as_os_error(error, self._checkpoints.folder))
        now = time.perf_counter()
        stalled = pending.stalled + now - begun
        outcomes = distributed.gather_objects((reason, stalled, now - pending.begun))
        if reason := outcomes[0][0]:
            return self._failed(pending.step, reason, must)
        self._failures, self._last = 0, pending.manifest
        if folder is not None:
            self._start_tasks(folder, pending.step)
        _, stalls, seconds = zip(*outcomes, strict=True)
        self.cost = cost = SaveCost(max(stalls), max(seconds), pending.bytes)
        size = f"{short(cost.bytes / 2**30)} GiB in {cost.seconds:.1f} s"
        stall = f"training stood still for {cost.stall_seconds:.2f} s"
        return [Event(f"save     step {pending.step}: {size}, {stall}", detail=True)]

    def _reason(self, pending: PendingSave, error: OSError) -> UserError:
        if error.errno in NO_SPACE:
            free = shutil.disk_usage(self._checkpoints.folder).free
            return StorageError(self._no_space(pending.step, pending.bytes, free))
        return _explained(f"cannot save step {pending.step}", error, self._checkpoints.folder)

    def _no_space(self, step: int, needed: int, free: int) -> str:
        where = self._checkpoints.folder
        return f"cannot save step {step}: {needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free in {where}"

    def _failed(self, step: int, reason: UserError, must: bool) -> list[str]:
        """Remove the files of the failed save; return a line for the log or raise an error, the same on all ranks."""
        if distributed.rank() == 0:
            discard(self._checkpoints.writing_folder(step))
        self._failures += 1
        if must:
            raise reason
        limit = 3
        if self._failures >= limit:
            raise type(reason)(f"{reason}; {limit} saves in a row have failed")
        line = f"warning  {reason}; training continues ({self._failures} failed in a row, {limit} stop the run)"
        return [Event(line, "save failed", step=step)]

    def _start_tasks(self, folder: Path, step: int) -> None:
        before = self._tasks

        def work() -> None:
            if before is not None:
                before.join()
            try:
                self._checkpoints.rotate(step)
                self._finish(folder)
            except Exception as error:
                self._tasks_error = manifests.as_os_error(error, folder)

        self._tasks = threading.Thread(target=work, name="after save", daemon=True)
        self._tasks.start()

    def _ended_tasks(self, must: bool = False) -> list[str]:
        """Lines for the log once the work after a commit has ended, [] before. With `must`, a failure is raised."""
        if self._tasks is None or self._tasks.is_alive():
            return []
        error, self._tasks, self._tasks_error = self._tasks_error, None, None
        if error is not None and must:
            raise _explained("after a save", error)
        return [] if error is None else [f"warning  {_explained('after a save', error)}"]

    def _wait_for_tasks(self, must: bool = False) -> list[str]:
        """Wait for the work after a commit. With `must`, a failure is raised on all ranks, and all must call this."""
        if self._tasks is not None:
            self._tasks.join()
        with distributed.raise_on_all_ranks() if must else contextlib.nullcontext():
            return self._ended_tasks(must)


def _explained(task: str, error: OSError, where: Path | None = None) -> UserError:
    text = f"{task}: {error.strerror}: {error.filename or where}"
    if error.errno == errno.ENOMEM:
        how = "Give the job more host memory, or go without a second copy with --save_in_background false"
        return OutOfMemory(f"{text}. {how}")
    return StorageError(text)

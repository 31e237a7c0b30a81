"""`dino-ds convert`: a checkpoint written again for another number of ranks, piece by piece; no network is built."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor
from tqdm import tqdm

from dino_ds.basics.digits import short
from dino_ds.basics.durable import replace_file, replacing_folder
from dino_ds.checkpoint.files import FileRecord, rank_file, whole_file, write_parts, write_tensors
from dino_ds.checkpoint.folder import Checkpoints
from dino_ds.checkpoint.manifest import SavedCheckpoint
from dino_ds.checkpoint.opening import open_checkpoint
from dino_ds.config.loading import dump_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.engine.saved_state import MASTER, Piece, SavedParameters, even_shares, layout_of
from dino_ds.errors import CheckpointError, ConfigError, StorageError
from dino_ds.options.run import ConvertOptions


def run(options: ConvertOptions) -> None:
    """Write `out`, a run with one checkpoint for `ranks` ranks, or with `student` a folder with student.safetensors.

    Raises ConfigError, CheckpointError for one that is not whole, StorageError; there is then no `out`.
    """
    begin = time.monotonic()
    if options.student and options.ranks is not None:
        raise ConfigError(f"--ranks {options.ranks} is for a checkpoint, --student writes only weights: leave one out")
    saved, place = _open(Path(options.checkpoint).expanduser()), Path(options.out).expanduser().absolute()
    parameters, ranks = SavedParameters(saved), None if options.student else options.ranks or 1
    try:
        bytes_written = _write(saved, parameters, place, ranks)
    except OSError as error:
        raise StorageError(f"{place} can't be written: {error.strerror or error}; fix --out") from error
    result = {
        "out": options.out,
        "step": saved.manifest.step,
        "ranks": ranks,
        "parameters": len(parameters.shapes),
        "bytes": bytes_written,
        "seconds": round(time.monotonic() - begin, 3),
    }
    if options.json:
        print(json.dumps(result))
        return
    old = saved.manifest.world_size
    what = "the student's weights" if options.student else f"{old} rank{'s' * (old > 1)} -> {ranks}"
    size, seconds = f"{short(bytes_written / 2**30)} GiB", f"{result['seconds']:.1f} s"
    print(f"step {result['step']}: {what}, {size} in {options.out} ({seconds})")


def _open(folder: Path) -> SavedCheckpoint:
    """The checkpoint there, every byte of it verified."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: --checkpoint is RUN/checkpoints/step_...")
    if (folder / "checkpoints").is_dir():
        found = ", ".join(sorted(path.name for path in (folder / "checkpoints").glob("step_*"))) or "none"
        raise CheckpointError(f"{folder} is a run; --checkpoint is one of its checkpoints/step_...; found: {found}")
    return open_checkpoint(folder)


def _write(saved: SavedCheckpoint, parameters: SavedParameters, place: Path, ranks: int | None) -> int:
    """All under another name first. Returns the bytes written. Raises OSError."""
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise ConfigError(f"{place} is there already: give --out a new folder")
    place.parent.mkdir(parents=True, exist_ok=True)
    elements = sum(math.prod(shape) for shape in parameters.shapes.values())
    whole = sum(record.bytes for name, record in saved.manifest.files.items() if name.startswith("whole_"))
    needed = 4 * elements if ranks is None else 12 * elements + whole
    free = shutil.disk_usage(place.parent).free
    if needed > free:
        raise StorageError(f"{place}: {needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free; fix --out")
    quiet = not sys.stderr.isatty()
    with (
        replacing_folder(place) as temporary,
        tqdm(total=needed, desc="writing", unit="B", unit_scale=True, leave=False, disable=quiet) as bar,
    ):
        if ranks is None:
            records = {"student.safetensors": _write_student(saved, parameters, temporary, bar)}
        else:
            records = _write_checkpoint(saved, parameters, temporary, ranks, bar)
    return sum(record.bytes for record in records.values())


def _write_student(saved: SavedCheckpoint, parameters: SavedParameters, folder: Path, bar: tqdm) -> FileRecord:
    def parts(name: str) -> Iterator[Tensor]:
        return _parts(parameters, MASTER, Piece(name, 0, math.prod(parameters.shapes[name]), 0), bar)

    kinds = {name: (torch.float32, shape) for name, shape in parameters.shapes.items()}
    return write_parts(folder / "student.safetensors", kinds, parts, saved.manifest.about())


def _write_checkpoint(
    saved: SavedCheckpoint, parameters: SavedParameters, run_dir: Path, ranks: int, bar: tqdm
) -> dict[str, FileRecord]:
    """A run folder: the recipe, `latest` and the one checkpoint."""
    checkpoints = Checkpoints(run_dir, keep=1)
    folder, about = checkpoints.begin(saved.manifest.step), saved.manifest.about()
    layouts, files = [], {}
    for rank in range(ranks):
        pieces = even_shares(parameters.shapes, rank, ranks)
        flats = [(piece.parameter, parameters.step_of([piece.parameter]), [piece]) for piece in pieces]
        layouts.append(layout_of(flats, None if rank else parameters.shared))
        files[rank_file(rank)] = _write_rank(folder / rank_file(rank), flats, parameters, about, bar)
    files[whole_file(0)] = write_tensors(folder / whole_file(0), saved.whole(), about)
    bar.update(files[whole_file(0)].bytes)
    new = {"world_size": ranks, "layouts": layouts, "files": files}
    checkpoints.commit(saved.manifest.model_copy(update=new))
    try:
        replace_file(run_dir / "config.yaml", dump_recipe(Recipe.model_validate(saved.manifest.recipe)))
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise CheckpointError(f"{saved.folder} has a recipe that this version does not know ({where})") from None
    return files


def _write_rank(
    path: Path,
    flats: Iterable[tuple[str, int, list[Piece]]],
    parameters: SavedParameters,
    about: dict[str, str],
    bar: tqdm,
) -> FileRecord:
    """One piece a parameter, so the flat tensors have the parameters' names."""
    tensors = {}
    for name, step, [piece] in flats:
        for kind in (MASTER, *(parameters.moments if step else ())):
            tensors[f"{name}.{kind}"] = (kind, piece)
    kinds = {name: (torch.float32, [piece.stop - piece.start]) for name, (_, piece) in tensors.items()}
    return write_parts(path, kinds, lambda name: _parts(parameters, *tensors[name], bar), about)


def _parts(parameters: SavedParameters, kind: str, piece: Piece, bar: tqdm) -> Iterator[Tensor]:
    for _, values in parameters.read(kind, piece.parameter, piece.start, piece.stop):
        yield values
        bar.update(4 * values.numel())

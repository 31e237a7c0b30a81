"""The parts of an embedding, of which each rank writes its own, and the final files that are made of them."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dino_ds.basics.durable import put_in_place, replace_file, replacing, sync
from dino_ds.basics.text_file import read_object
from dino_ds.checkpoint.files import checksum, is_plain_file
from dino_ds.config.schema import differences
from dino_ds.data.base import Source
from dino_ds.data.image_set import changed_images
from dino_ds.data.parquet import import_parquet
from dino_ds.engine import distributed
from dino_ds.engine.device import device
from dino_ds.errors import ConfigError, unwritable
from dino_ds.evals.features import LabeledImages, Reading, load_batches

Rows = npt.NDArray[Any]
_PART, _PART_BYTES = 4096, 256 * 2**20
"""Most images of a part, and most bytes of a part: an interruption costs each rank one part."""
_FEW, _PARTS = 64, 64
"""Fewest images of a part, and the number of parts into which few images are divided, for all ranks to get some."""
_OPAQUE = dict.fromkeys(("images", "times", "weights"))
"""Facts of an embedding whose differences are described separately."""


@dataclass(frozen=True)
class Parts:
    """The folder of parts of one embedding: `images` rows of `shape` in NumPy's `dtype`, a few thousand in a file."""

    folder: Path
    images: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def length(self) -> int:
        """Rows of a part."""
        most = min(_PART, _PART_BYTES // (4 * math.prod(self.shape)))
        return max(1, min(most, max(_FEW, -(-self.images // _PARTS))))

    def begin(self, facts: dict[str, Any]) -> None:
        """Make the folder, or continue an earlier one. Raises ConfigError that names the differences if that one was
        begun with other `facts`."""
        text = json.dumps({**facts, "rows": self.images, "shape": list(self.shape), "dtype": self.dtype}, indent=1)
        try:
            # A folder with only a temporary description is of a process that was killed before it wrote any part.
            is_begun = self.folder.exists() and any(p.name != "about.json.tmp" for p in self.folder.iterdir())
            if is_begun and (differ := self._differences(json.loads(text))):
                raise ConfigError(
                    f"{self.folder} holds parts of another embedding ({differ}): remove it, or name another file with "
                    "--out"
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self.about, text)
        except OSError as error:
            raise unwritable(self.folder, error, "out") from None

    @property
    def about(self) -> Path:
        return self.folder / "about.json"

    def _differences(self, now: dict[str, Any]) -> str:
        """Differences from the embedding whose parts are here, in words; "" for none."""
        try:
            before = read_object(self.about)
            changes = changed_images(before, now)
        except (OSError, ValueError, AttributeError):
            changes = None
        if changes is None:
            return f"{self.about.name} does not say of which, it is missing, damaged or of an earlier version"
        texts = differences(before | _OPAQUE, now | _OPAQUE) | ({"images": changes} if changes else {})
        if before.get("weights") != now["weights"]:
            texts["weights"] = "other weights"
        return ", ".join(texts.values())

    def write(
        self, describe: Callable[[Tensor], Tensor], source: Source, reading: Reading
    ) -> tuple[list[str], list[str]]:
        """Write this rank's parts that are missing or damaged. Returns texts that name the unreadable images of all
        parts of this rank, and notes on the damaged parts."""
        mine = range(distributed.rank(), -(-self.images // self.length), distributed.world_size())
        known = {part: self._unreadable(part) for part in mine}
        damaged = [part for part in mine if known[part] is None and self._file(part).exists()]
        missing = [part for part in mine if known[part] is None]
        for part, rows, bad in self._computed(missing, describe, source, reading):
            self._save(part, rows, bad)
            known[part] = bad
        notes = [f"{self._file(part)} was incomplete or damaged: computed again" for part in damaged]
        return [text for bad in known.values() for text in bad or ()], notes

    def _unreadable(self, part: int) -> list[str] | None:
        """The texts that name the unreadable images of a part; None if the part is missing or damaged."""
        try:
            sealed = read_object(self._file(part, "json"))
            whole = is_plain_file(self._file(part)) and sealed == self._sealed(part, sealed["unreadable"])
            return [str(text) for text in sealed["unreadable"]] if whole else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def _sealed(self, part: int, bad: list[str]) -> dict[str, Any]:
        """The JSON next to a part: `bad`, the CRC32 of its file, and that of all that it belongs to. Raises OSError."""
        of = zlib.crc32(f"{self.about.read_text()}{part}{bad}".encode(errors="surrogatepass"))
        return {"of": of, "crc32": checksum(self._file(part)).crc32, "unreadable": bad}

    def _computed(
        self, missing: list[int], describe: Callable[[Tensor], Tensor], source: Source, reading: Reading
    ) -> Iterator[tuple[int, Rows, list[str]]]:
        """Yield (part, its rows, texts that name its unreadable images) for the missing parts."""
        indices = [index for part in missing for index in self._rows(part)]
        images = LabeledImages(source, indices, reading)
        loading = load_batches(images, source, reading.workers, reading.progress, batch_size=reading.batch)
        with closing(loading) as batches:
            left, seen = list(missing), 0
            rows, bad = self._empty(left), list[str]()
            for crops, places, unreadable in batches:
                features: Any = ()
                if len(crops):
                    with torch.no_grad():
                        features = describe(crops.to(device())).float().cpu().numpy().astype(self.dtype)
                read = dict(zip(places[:, 0].tolist(), features, strict=True))
                names = iter(unreadable)
                for position in range(seen, min(seen + reading.batch, len(indices))):
                    part = left[0]
                    if position in read:
                        rows[indices[position] - self._rows(part).start] = read[position]
                    else:
                        bad.append(next(names))
                    if indices[position] == self._rows(part).stop - 1:
                        yield left.pop(0), rows, bad
                        rows, bad = self._empty(left), []
                seen += reading.batch
        assert not left

    def _empty(self, left: list[int]) -> Rows:
        return np.full((len(self._rows(left[0])) if left else 0, *self.shape), np.nan, self.dtype)

    def _rows(self, part: int) -> range:
        return range(part * self.length, min((part + 1) * self.length, self.images))

    def _file(self, part: int, ending: str = "npy") -> Path:
        return self.folder / f"{part:08d}.{ending}"

    def _save(self, part: int, rows: Rows, bad: list[str]) -> None:
        try:
            with replacing(self._file(part)) as temporary, temporary.open("wb") as file:
                np.save(file, rows)
            replace_file(self._file(part, "json"), json.dumps(self._sealed(part, bad)))
        except OSError as error:
            raise unwritable(self.folder, error, "out") from None

    def __iter__(self) -> Iterator[tuple[range, Rows]]:
        """Yield (indices of rows, their features) of every part, in order."""
        for part in range(-(-self.images // self.length)):
            yield self._rows(part), np.load(self._file(part))


def put_together(
    path: Path, files: Sequence[Path], parts: Parts, source: Source, origin: dict[str, str | None]
) -> None:
    """Write `files`: `path`, in the format of its ending, and those beside it; remove the parts. Raises StorageError.

    The .json among them has all settings that the rows depend on, `origin`, and checksums of the other files. They are
    made in the folder of parts: after the command was killed, it makes them again when it is repeated.
    """
    write = {".npy": _write_npy, ".pt": _write_pt, ".csv": _write_csv, ".parquet": _write_parquet}[path.suffix]
    made = {parts.folder / f"written{file.suffix}": file for file in files}
    try:
        write(parts.folder / f"written{path.suffix}", parts, source)
        sums = {file.suffix: vars(checksum(made_as)) for made_as, file in made.items() if file.suffix != ".json"}
        about = {**read_object(parts.about), "origin": origin, "files": sums}
        (parts.folder / "written.json").write_text(json.dumps(about, indent=1))
        for file, final in made.items():
            sync(file)
            put_in_place(file, final)
        discarded = path.with_name(f".{parts.folder.name}"[:255])
        shutil.rmtree(discarded, ignore_errors=True)
        os.replace(parts.folder, discarded)  # in one step: a half-removed folder would be continued
    except OSError as error:
        raise unwritable(path, error, "out") from None
    shutil.rmtree(discarded, ignore_errors=True)


def _label_of(source: Source, index: int) -> tuple[int, str]:
    """An image's label, or -1, and the name of its class, or ""."""
    label = -1 if source.labels is None else int(source.labels[index])
    return label, source.classes[label] if source.classes and label >= 0 else ""


def _write_npy(path: Path, parts: Parts, source: Source) -> None:
    """Write the array, and next to it a .csv with name, label and class of every row."""
    with path.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(("name", "label", "class"))
        lines.writerows((source.name(i), *_label_of(source, i)) for i in range(parts.images))
    _fill(path, parts)


def _fill(path: Path, parts: Parts) -> None:
    whole = np.lib.format.open_memmap(path, "w+", parts.dtype, (parts.images, *parts.shape))
    for rows, features in parts:
        whole[rows.start : rows.stop] = features
    whole.flush()


def _write_pt(path: Path, parts: Parts, source: Source) -> None:
    """Write what torch.load reads as {"features": (n, ...), "names", "labels", "classes"}."""
    about = {
        "names": [source.name(i) for i in range(parts.images)],
        "labels": torch.tensor([_label_of(source, i)[0] for i in range(parts.images)]),
        "classes": list(source.classes or ()),
    }
    array = parts.folder / "whole.npy"
    _fill(array, parts)
    torch.save({"features": torch.from_numpy(np.load(array, mmap_mode="r+")), **about}, path)


def _write_csv(path: Path, parts: Parts, source: Source) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(("name", "label", "class", *(f"f{i}" for i in range(parts.shape[0]))))
        for rows, features in parts:
            for index, row in zip(rows, features, strict=True):
                lines.writerow((source.name(index), *_label_of(source, index), *row.tolist()))


def _write_parquet(path: Path, parts: Parts, source: Source) -> None:
    """Write columns name, label, class and features, a row group for each part.

    Maps are flat, and the metadata of the file has their shape.
    """
    parquet = import_parquet()
    import pyarrow

    kind = pyarrow.list_(pyarrow.from_numpy_dtype(np.dtype(parts.dtype)), math.prod(parts.shape))
    fields = [("name", pyarrow.string()), ("label", pyarrow.int64()), ("class", pyarrow.string()), ("features", kind)]
    schema = pyarrow.schema(fields, metadata={"shape": json.dumps(list(parts.shape))})
    with parquet.ParquetWriter(path, schema) as writer:
        for rows, vectors in parts:
            labels = [_label_of(source, i) for i in rows]
            features = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.reshape(-1)), type=kind)
            columns = [[source.name(i) for i in rows], [label for label, _ in labels], [name for _, name in labels]]
            writer.write_table(pyarrow.table([*columns, features], schema=schema))

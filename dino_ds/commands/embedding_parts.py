"""An embedding that is being written: one array on the disk, whose parts the ranks fill, and its final files."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dino_ds.basics.files import read_object, replace_file, replacing
from dino_ds.config.schema import differences
from dino_ds.data.image_set import changed_images
from dino_ds.data.images import Source
from dino_ds.data.parquet import import_parquet
from dino_ds.engine import distributed, process
from dino_ds.errors import ConfigError, unwritable
from dino_ds.evals.features import LabeledImages, Reading, fill_rows, load_batches

Rows = npt.NDArray[Any]
_PART, _PART_BYTES = 4096, 256 * 2**20
"""Most images of a part, and most bytes of a part: an interruption costs each rank one part."""
_FEW, _PARTS = 64, 64
"""Fewest images of a part, and the number of parts into which few images are divided, so that all ranks get some."""
DIGEST = "rows_sha256"  # the key of an embedding's .json with the digest of its rows
_OPAQUE = dict.fromkeys(("images", "times", "weights"))
"""Facts of an embedding whose differences are described separately."""


@dataclass(frozen=True)
class Parts:
    """A folder with the array of one embedding, `images` rows of `shape` in NumPy's `dtype`, and a record of progress.
    A part, some thousand rows, counts once its record is there: a .json with the names of its unreadable images."""

    folder: Path
    images: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def length(self) -> int:
        """Rows of a part."""
        most = min(_PART, _PART_BYTES // (4 * math.prod(self.shape)))
        return max(1, min(most, max(_FEW, -(-self.images // _PARTS))))

    @property
    def about(self) -> Path:
        return self.folder / "about.json"

    @property
    def array(self) -> Path:
        return self.folder / "rows.npy"

    def begin(self, facts: dict[str, Any]) -> None:
        """Make the folder, or continue an earlier one. Raises ConfigError that names the differences if that one was
        begun with other `facts`."""
        now = json.loads(json.dumps(facts | {"rows": self.images, "shape": self.shape, "dtype": self.dtype}))
        try:
            if not self.about.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                np.lib.format.open_memmap(self.array, "w+", self.dtype, (self.images, *self.shape)).flush()
                replace_file(self.about, json.dumps(now, indent=1))
                return
            before = read_object(self.about)
            differ = differences(before | _OPAQUE, now | _OPAQUE)
            differ |= {"weights": "other weights"} if before.get("weights") != now["weights"] else {}
            differ |= {"images": changes} if (changes := changed_images(before, now)) else {}
            if differ:
                said = f"{self.folder} holds parts of another embedding ({', '.join(differ.values())})"
                raise ConfigError(f"{said}: remove it, or name another file with --out")
            if not self.array.exists():  # killed when the array had its final name, and the folder was still there
                os.replace(self.folder.with_suffix(""), self.array)
        except OSError as error:
            raise unwritable(self.folder, error, "out") from None
        except ValueError:
            raise ConfigError(f"{self.about} is damaged: remove {self.folder}") from None

    def write(self, describe: Callable[[Tensor], Tensor], source: Source, reading: Reading) -> list[str]:
        """Write this rank's parts that are missing. Returns texts that name the unreadable images of all its parts."""
        mine = range(distributed.rank(), -(-self.images // self.length), distributed.world_size())
        missing = [part for part in mine if not self._record(part).exists()]
        batches = [
            rows[i : i + reading.batch] for rows in map(self._rows, missing) for i in range(0, len(rows), reading.batch)
        ]
        images = LabeledImages(source, list(range(self.images)), reading)
        loading = load_batches(images, source, reading.workers, reading.progress, batch_sampler=batches)
        with closing(loading) as loaded:
            for part in missing:
                rows, bad = self._rows(part), list[str]()
                features = np.full((len(rows), *self.shape), np.nan, self.dtype)
                for _ in range(0, len(rows), reading.batch):
                    bad += fill_rows(features, next(loaded), describe, process.device(), rows.start)
                self._save(part, features, bad)
        return [text for part in mine for text in json.loads(self._record(part).read_text())]

    def _rows(self, part: int) -> range:
        return range(part * self.length, min((part + 1) * self.length, self.images))

    def _record(self, part: int) -> Path:
        return self.folder / f"{part:08d}.json"

    def _save(self, part: int, features: Rows, bad: list[str]) -> None:
        try:
            with self.array.open("r+b") as file:  # not through a memory map, which a full disk ends by SIGBUS
                file.seek(np.load(self.array, mmap_mode="r").offset + self._rows(part).start * features[0].nbytes)
                file.write(features.tobytes())
                os.fsync(file.fileno())
            replace_file(self._record(part), json.dumps(bad))
        except OSError as error:
            raise unwritable(self.folder, error, "out") from None

    def __iter__(self) -> Iterator[tuple[range, Rows]]:
        """Yield (indices of rows, their features) of every part, in order."""
        array = np.load(self.array, mmap_mode="r")
        for part in range(-(-self.images // self.length)):
            yield (rows := self._rows(part)), array[rows.start : rows.stop]


def put_together(path: Path, parts: Parts, source: Source, origin: dict[str, str | None]) -> None:
    """Write an .npy with a .csv beside it, or a .parquet, and a .json with all settings that the rows depend on; remove
    the parts. Raises StorageError. `path` is written last, before the parts are removed, so that a killed command
    can be repeated."""
    about = {**read_object(parts.about), "origin": origin, "classes": list(source.classes or ())}
    about[DIGEST] = digest_of_rows(features for _, features in parts)
    discarded = path.with_name(f".{parts.folder.name}"[:255])
    try:
        replace_file(path.with_name(f"{path.name}.json"), json.dumps(about, indent=1))
        (_write_npy if path.suffix == ".npy" else _write_parquet)(path, parts, source)
        shutil.rmtree(discarded, ignore_errors=True)
        os.replace(parts.folder, discarded)  # in one step: a half-removed folder would be continued
    except OSError as error:
        raise unwritable(path, error, "out") from None
    shutil.rmtree(discarded, ignore_errors=True)


def digest_of_rows(blocks: Iterable[Rows]) -> str:
    """SHA-256 of the rows of all blocks, in their order: about 1 GB in a second."""
    sha256 = hashlib.sha256()
    for block in blocks:
        sha256.update(np.ascontiguousarray(block).data)
    return sha256.hexdigest()


def _named(source: Source, index: int) -> tuple[str, int, str]:
    """An image's name, its label, or -1, and the name of its class, or ""."""
    label = -1 if source.labels is None else int(source.labels[index])
    return source.name(index), label, source.classes[label] if source.classes and label >= 0 else ""


def _write_npy(path: Path, parts: Parts, source: Source) -> None:
    """Write a .csv with name, label and class of every row, and give the array its final name."""
    with replacing(path.with_suffix(".csv")) as beside, beside.open("w", newline="", encoding="utf-8") as text:
        lines = csv.writer(text)
        lines.writerow(("name", "label", "class"))
        lines.writerows(_named(source, i) for i in range(parts.images))
    os.replace(parts.array, path)


def _write_parquet(path: Path, parts: Parts, source: Source) -> None:
    """Write columns name, label, class and features (flat; the metadata have the shape), a row group for each part."""
    parquet = import_parquet()
    import pyarrow

    kind = pyarrow.list_(pyarrow.from_numpy_dtype(np.dtype(parts.dtype)), math.prod(parts.shape))
    fields = [("name", pyarrow.string()), ("label", pyarrow.int64()), ("class", pyarrow.string()), ("features", kind)]
    schema = pyarrow.schema(fields, metadata={"shape": json.dumps(list(parts.shape))})
    with replacing(path) as temporary, parquet.ParquetWriter(temporary, schema) as writer:
        for rows, vectors in parts:
            columns = zip(*(_named(source, i) for i in rows), strict=True)
            features = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.reshape(-1)), type=kind)
            writer.write_table(pyarrow.table([*map(list, columns), features], schema=schema))

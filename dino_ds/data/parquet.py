"""Images in a column of Parquet files, as on the Hugging Face Hub; needs pyarrow only."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import numpy as np

from dino_ds.data import encoded, images
from dino_ds.data.listing import LABEL_NAMES, Labels, join_classes, note_unnamed, printable
from dino_ds.data.remote import FilePiece, Remote, find_states, open_remote, remote_with_room
from dino_ds.errors import ConfigError, DataError

_OPEN_FILES = 32  # most files that a process keeps open, with their footers
_MOST_BYTES = 1 << 30  # most bytes of a row group's column: each loader process reads an image with its whole group
_MOST_AHEAD = 256 << 20  # most bytes of row groups that are fetched before they are read
_LOOKED_AT, _NUMBERS = 64, 1 << 16  # rows per read: when looking for image bytes, and of a column of plain numbers
_NULL = "__HIVE_DEFAULT_PARTITION__"  # stands in a folder's name for the value of rows that have none


@dataclass(eq=False)
class _RemoteParquet:
    """A remote file; its footer is read once, and is sent to loader processes."""

    remote: Remote
    state: Sequence[int]
    footer: Any = None


_Location = tuple[str, tuple[int, ...] | None, _RemoteParquet | None]
"""A file's path or address; its size and time if it is on a disk; the remote file if it is not."""


class ParquetImages(encoded.RowImages):
    """The rows of Parquet files, file after file.
    The image column is binary, or a struct with `bytes`. Classes come from a label column of whole numbers or texts,
    else from folders label=CLASS; Hugging Face stores the names of numbers in the schema's metadata. Raises ConfigError
    without pyarrow, DataError for a file that can't be read, or has no image column or too large row groups."""

    def __init__(self, files: list[str], cache_gib: float = 0.0) -> None:
        import_parquet()
        super().__init__(files)
        self._elsewhere = list[_RemoteParquet]()
        if self.elsewhere:
            states = find_states(files)
            self._remote, self.notes = remote_with_room(files, states, sum(size for size, _ in states), cache_gib)
            self._elsewhere = [_RemoteParquet(self._remote, state) for state in states]
        groups, ends, has_bytes = list[tuple[int, int]](), list[int](), False
        labels, names = list[list[Any]](), list[list[str]]()
        for number, file in enumerate(self._files):
            with encoded.naming_file(file, "Parquet"):
                opened = _parquet_file(self._location(number))
                if number == 0:
                    schema = opened.schema_arrow
                    self._column, label = _image_column(schema, file), _label_column(schema, self.notes)
                _check_alike(schema, opened.schema_arrow, self._column, label, (self._files[0], file))
                state = self._elsewhere[number].state if self.elsewhere else self._states[number]
                if state and (rows := opened.metadata.num_rows) > state[0]:
                    raise DataError(f"{printable(file)} has {rows} rows in {state[0]} bytes, so they hold no images")
                labels.append([])
                names.append(_class_names(opened.schema_arrow, label) if label is not None else [])
                ends.append(ends[-1] if ends else 0)
                for group in range(opened.num_row_groups):
                    groups.append((ends[-1], group))
                    ends[-1] += opened.metadata.row_group(group).num_rows
                    if _bytes_of(opened, group, self._column) > _MOST_BYTES:
                        large = f"row group {group} of {printable(file)} holds more than {_MOST_BYTES >> 20} MiB"
                        remedy = "write groups of 100 rows (row_group_size=100)"
                        raise DataError(f"{large} of images, and each is read with its whole group: {remedy}")
                    has_bytes = has_bytes or _has_bytes(opened, group, self._column)
                    if label is not None:
                        for part in _read_parts(opened, group, label):
                            labels[-1] += part.to_pylist()
        if not ends[-1]:
            raise DataError(f"no rows in {printable(self._files[0])}; fix data.root")
        if not has_bytes:
            remedy = "write the paths that it has into a .txt list, one a line, and give that as data.root"
            raise DataError(f"{printable(self._files[0])} has no bytes in its column {self._column}: {remedy}")
        self._ends, self._groups, self._parts = np.array(ends), np.array(groups, np.int64), [""] * len(files)
        classes = _merge_class_names(labels, names, self._files)
        if label is None:
            values, notes = _partitions(self._files)
            labels = [[value] * count for value, count in zip(values, np.diff([0, *ends]).tolist(), strict=True)]
            self.notes += notes
        elif not classes and _kind_of_label(schema.field(label).type) == "number":
            self.notes += note_unnamed(map(os.path.dirname, self._files))
        self.labels, self.classes = _number(list(itertools.chain.from_iterable(labels)), classes)

    def read(self, index: int) -> bytes:
        index = range(len(self))[index]
        first, group = self._groups[np.searchsorted(self._groups[:, 0], index, side="right") - 1].tolist()
        with self._naming_image(index, "Parquet"):
            data = _read_group(self._location(self._find(index)[0]), group, self._column)[index - first].as_py()
        if isinstance(data, dict):
            data = data["bytes"]
        if not data:
            raise images.UnreadableImage(self.name(index), "no bytes in this row" if data is None else "empty file")
        return data

    def prepare(self, indices: Sequence[int], seconds: float | None = None) -> None:
        """Begin to fetch the row groups of the images of remote files that will be read next."""
        numbers = np.searchsorted(self._groups[:, 0], np.asarray(indices, np.int64), side="right") - 1
        pieces = [self._piece(*self._groups[number].tolist()) for number in dict.fromkeys(numbers.tolist())]
        ends = itertools.accumulate(piece.length for piece in pieces)
        self._remote.prepare((piece for piece, end in zip(pieces, ends, strict=True) if end <= _MOST_AHEAD), seconds)

    def _piece(self, first: int, group: int) -> FilePiece:
        """The bytes of the image column in a row group, whose first row is row `first` of all files."""
        number, _ = self._find(first)
        size, tag = self._elsewhere[number].state
        chunks = _chunks_of(self._elsewhere[number].footer, group, self._column)
        begins = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks]
        ends = [begin + chunk.total_compressed_size for begin, chunk in zip(begins, chunks, strict=True)]
        return FilePiece(self._files[number], size, tag, min(begins), max(ends) - min(begins))

    def _location(self, number: int) -> _Location:
        return self._files[number], self._states[number], self._elsewhere[number] if self.elsewhere else None


def import_parquet() -> Any:
    """Import pyarrow.parquet. Raises ConfigError with the command that installs it."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("Parquet files need pyarrow: pip install 'dino_ds[parquet]'") from None
    return pyarrow.parquet


@lru_cache(maxsize=1)  # neighboring rows cost one read; more groups would be too much memory in each worker
def _read_group(location: _Location, group: int, column: str) -> Any:
    import pyarrow

    return pyarrow.chunked_array(_read_parts(_open_parquet(location), group, column))


def _read_parts(opened: Any, group: int, column: str) -> Iterator[Any]:
    """Yield a row group's column in parts. Raises ValueError if they become too large: in a file of a few kilobytes
    every row may stand for the same gigabyte, which the footer counts only once."""
    total, size = 0, _bytes_of(opened, group, column)
    rows = max(1, _MOST_BYTES // size) if size else _NUMBERS
    # One thread: loader processes share out the cores, and threads of a library do not survive a fork.
    for batch in opened.iter_batches(rows, row_groups=[group], columns=[column], use_threads=False):
        total += batch.nbytes
        if total > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES >> 20} MiB in the column {column} of row group {group}")
        yield batch.column(0)


def _bytes_of(opened: Any, group: int, column: str) -> int:
    """Uncompressed bytes of a row group's column, according to the footer."""
    chunks = _chunks_of(opened.metadata, group, column)
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.physical_type == "BYTE_ARRAY")


def _chunks_of(footer: Any, group: int, column: str) -> list[Any]:
    metadata = footer.row_group(group)
    chunks = [metadata.column(number) for number in range(metadata.num_columns)]
    return [chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(f"{column}.")]


def _has_bytes(opened: Any, group: int, column: str) -> bool:
    rows = min(_LOOKED_AT, max(1, _MOST_BYTES // max(1, _bytes_of(opened, group, column))))
    parts = (batch.column(0) for batch in opened.iter_batches(rows, [group], [column], use_threads=False))
    values = (part.field("bytes") if hasattr(part, "field") else part for part in parts)
    return any(part.null_count < len(part) for part in values)


def _parquet_file(location: _Location) -> Any:
    file, _, elsewhere = location
    if elsewhere is None:
        return import_parquet().ParquetFile(file)
    opened = open_remote(elsewhere.remote, file, elsewhere.state, 0)
    parquet = import_parquet().ParquetFile(opened, metadata=elsewhere.footer)
    elsewhere.footer = parquet.metadata
    return parquet


_open_parquet = lru_cache(maxsize=_OPEN_FILES)(_parquet_file)


def _image_column(schema: Any, file: str) -> str:
    from pyarrow import types

    def holds_images(kind: Any) -> bool:
        if types.is_struct(kind):
            return kind.get_field_index("bytes") >= 0 and holds_images(kind.field("bytes").type)
        return types.is_binary(kind) or types.is_large_binary(kind)

    fitting = [field.name for field in schema if holds_images(field.type)]
    named = [name for name in ("image", "img", "jpg", "png") if name in fitting]
    if named or len(fitting) == 1:
        return (named or fitting)[0]
    texts = "" if fitting else "; paths in a column of texts write into a .txt list, one a line"
    several = f"several columns of bytes ({', '.join(fitting)}), none called image"
    problem = several if fitting else "no column of image files"
    columns = ", ".join(f"{field.name}: {field.type}" for field in schema)[:300]
    wanted = f"wanted is bytes or struct<bytes, path>, and it has {columns}{texts}"
    raise DataError(f"{printable(file)} has {problem}; {wanted}")


def _label_column(schema: Any, notes: list[str]) -> str | None:
    """Name of the column of classes, or None; `notes` gets a line for a column whose values can't be classes."""
    for name in filter(schema.names.__contains__, LABEL_NAMES):
        if _kind_of_label(kind := schema.field(name).type):
            return name
        column = f"the column {name} ({kind}) of the Parquet files"
        notes.append(f"{column} is not read as classes: it must be whole numbers or texts")
    return None


def _kind_of_label(kind: Any) -> str:
    """How an Arrow type can name classes: "number", "text", or "" if it can't."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_integer(kind):
        return "number"
    return "text" if types.is_string(kind) or types.is_large_string(kind) else ""


def _check_alike(first: Any, schema: Any, image: str, label: str | None, files: tuple[str, str]) -> None:
    """Raises DataError if the second of `files` lacks a column of the first, or has labels of another kind."""
    for column in filter(None, (image, label)):
        if column not in schema.names:
            problem = f"has no column {column}"
        elif column == label and _kind_of_label(schema.field(label).type) != _kind_of_label(first.field(label).type):
            problem = f"has another type in the column {label}, {schema.field(label).type}"
        else:
            continue
        raise DataError(f"{printable(files[1])} {problem}, unlike {printable(files[0])}: write all files alike")


def _class_names(schema: Any, label: str) -> list[str]:
    """Names of class numbers in the Hugging Face metadata of the schema, or []."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        names = [str(name) for name in features[label]["names"]]
        return names if _kind_of_label(schema.field(label).type) == "number" else []
    except (KeyError, TypeError, ValueError):
        return []


def _merge_class_names(labels: list[list[Any]], names: list[list[str]], files: list[str]) -> list[str]:
    """Change the labels of each file, whose classes are `names`, to numbers of one list of class names, and return the
    list. Raises DataError for numbers without names in some files only."""
    if all(some == names[0] for some in names):
        return names[0]
    for values, some, file in zip(labels, names, files, strict=True):
        if not all(value is None or value < len(some) for value in values):
            problem = f"{printable(file)} has class numbers without names, unlike other files"
            remedy = "write them into all files (with datasets: ClassLabel), or give the files as parts of data.mixture"
            raise DataError(f"{problem}: {remedy}")
    classes, joined = join_classes(names)
    for values, numbers in zip(labels, joined, strict=True):
        values[:] = [int(numbers[-1 if value is None or value < 0 else value]) for value in values]
    return classes


def _partitions(files: list[str]) -> tuple[list[str | None], list[str]]:
    """Class of each file by a folder such as label=cat below the folder of all; and a note on KEY=… without classes."""
    begin = len(os.path.commonpath(list(map(os.path.dirname, files)))) + 1
    of_files = [dict(part.split("=", 1) for part in file[begin:].split("/")[:-1] if "=" in part) for file in files]
    keys = list(dict.fromkeys(key for pairs in of_files for key in pairs))
    key = next((name for name in LABEL_NAMES if name in keys), None)
    if key is None:
        folders = ", ".join(f"{printable(name)}=…" for name in keys[:3])
        return [None] * len(files), [f"folders {folders} give no classes: call them label=…"] * bool(keys)
    values = (pairs.get(key, _NULL) for pairs in of_files)
    return [None if value == _NULL else unquote(value) for value in values], []


def _number(values: list[Any], names: list[str]) -> tuple[Labels | None, list[str] | None]:
    """Number the values of the label column (None = no class); returns labels, and class names: `names` if they fit."""
    present = sorted({value for value in values if value is not None and value != -1})
    if not present:
        return None, None
    if names and isinstance(present[-1], int) and present[0] >= 0 and present[-1] < len(names):
        present = list(range(len(names)))
    else:
        names = [str(value) for value in present]
    numbers = {value: number for number, value in enumerate(present)}
    return Labels(np.array([numbers.get(value, -1) for value in values], np.int32)), names

"""Images in a column of Parquet files, as on the Hugging Face Hub; needs pyarrow only."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from dino_ds.basics.files import is_url
from dino_ds.data.encoded import RowImages
from dino_ds.data.images import UnreadableImage, find_placeholder
from dino_ds.data.listing import LABEL_NAMES, Labels, merge_class_names, note_unnamed, partitions, printable
from dino_ds.data.remote import FilePiece, Remote, find_states, open_remote, remote_with_room
from dino_ds.errors import ConfigError, DataError, one_line

_IMAGE_NAMES = ("image", "img", "jpg", "png")
_OPEN_FILES = 32
"""Most files that a process keeps open, with their footers."""
_MOST_BYTES = 1 << 30
"""Most bytes of a row group's column: each loader process reads an image with its whole group."""
_MOST_AHEAD = 256 << 20
"""Most bytes of row groups that are fetched before they are read."""
_LOOKED_AT, _NUMBERS = 64, 1 << 16
"""Rows per read: when looking for image bytes, and of a column of plain numbers."""


@dataclass(eq=False)
class _RemoteParquet:
    """A remote file; its footer is read once, and is sent to loader processes."""

    remote: Remote
    state: Sequence[int]
    footer: Any = None


_Location = tuple[str, tuple[int, ...] | None, _RemoteParquet | None]
"""A file, its size and time on a disk, and what it is elsewhere."""


class ParquetImages(RowImages):
    """The rows of Parquet files, file after file.

    The image column is binary, or a struct with `bytes`. Classes come from a label column of whole numbers or texts,
    else from folders label=CLASS; Hugging Face stores the names of numbers in the schema's metadata. Raises ConfigError
    without pyarrow, DataError for a file that can't be read, has no image column, or has row groups that are too large.
    """

    def __init__(self, files: list[str], cache_gib: float = 0.0) -> None:
        import_parquet()
        super().__init__(files)
        self.elsewhere = is_url(files[0])
        states = find_states(files) if self.elsewhere else []
        if self.elsewhere:
            self._remote, self.notes = remote_with_room(files, states, sum(size for size, _ in states), cache_gib)
        self._elsewhere = [_RemoteParquet(self._remote, state) for state in states]
        first, groups, ends, has_bytes = 0, [], [], False
        labels, names = list[list[Any]](), list[list[str]]()
        for number, file in enumerate(self._files):
            try:
                opened = _parquet_file(self._location(number))
                if number == 0:
                    schema = opened.schema_arrow
                    self._column, label = _image_column(schema, file), _label_column(schema, self.notes)
                _check_alike(schema, opened.schema_arrow, self._column, label, (self._files[0], file))
                state = states[number] if states else self._states[number]
                if state and (rows := opened.metadata.num_rows) > state[0]:
                    raise DataError(f"{printable(file)} has {rows} rows in {state[0]} bytes, so they hold no images")
                labels.append([])
                names.append(_class_names(opened.schema_arrow, label) if label is not None else [])
                for group in range(opened.num_row_groups):
                    groups.append((first, group))
                    first += opened.metadata.row_group(group).num_rows
                    if _bytes_of(opened, group, self._column) > _MOST_BYTES:
                        raise DataError(
                            f"row group {group} of {printable(file)} holds more than {_MOST_BYTES >> 20} MiB of images,"
                            " and each is read with its whole group: write groups of 100 rows (row_group_size=100)"
                        )
                    has_bytes = has_bytes or _has_bytes(opened, group, self._column)
                    if label is not None:
                        labels[-1] += itertools.chain.from_iterable(
                            part.to_pylist() for part in _read_parts(opened, group, label)
                        )
                ends.append(first)
            except DataError:
                raise
            except Exception as error:  # pyarrow has its own family of errors beside Python's
                reason = find_placeholder(file) or one_line(error, 200)
                raise DataError(f"{printable(file)} cannot be read as Parquet: {reason}") from None
        if not first:
            raise DataError(f"no rows in {printable(self._files[0])}; fix data.root")
        if not has_bytes:
            raise DataError(
                f"{printable(self._files[0])} has no bytes in its column {self._column}: write the paths that it "
                "has into a .txt list, one a line, and give that as data.root"
            )
        self._ends, self._groups = np.array(ends), np.array(groups, np.int64)
        self._parts = [""] * len(files)
        self.labels, self.classes = self._find_classes(labels, names, "" if label is None else schema.field(label).type)

    def _find_classes(self, labels: list[list[Any]], names: list[list[str]], kind: Any) -> Any:
        """Labels and class names by the values of each file's label column of type `kind`, else by folders."""
        labels, classes = merge_class_names(labels, names, self._files)
        if not kind:
            values, notes = partitions(self._files)
            labels = [[value] * count for value, count in zip(values, np.diff([0, *self._ends]).tolist(), strict=True)]
            self.notes += notes
        elif not classes and _kind_of_label(kind) == "number":
            self.notes += note_unnamed(map(os.path.dirname, self._files))
        return _number(list(itertools.chain.from_iterable(labels)), classes)

    def read(self, index: int) -> bytes:
        index = range(len(self))[index]
        first, group = self._groups[np.searchsorted(self._groups[:, 0], index, side="right") - 1].tolist()
        try:
            data = _read_group(self._location(self._find(index)[0]), group, self._column)[index - first].as_py()
            self._check_unchanged(index)
        except DataError:
            raise
        except Exception as error:  # as above
            raise UnreadableImage(self.name(index), f"Parquet: {one_line(error, 200)}") from None
        if isinstance(data, dict):
            data = data["bytes"]
        if not data:
            raise UnreadableImage(self.name(index), "no bytes in this row" if data is None else "empty file")
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
    """Whether any row of a group has an image's bytes, not only its path."""
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
    named = [name for name in _IMAGE_NAMES if name in fitting]
    if named or len(fitting) == 1:
        return (named or fitting)[0]
    texts = "" if fitting else "; paths in a column of texts write into a .txt list, one a line"
    several = f"several columns of bytes ({', '.join(fitting)}), none called image"
    problem = several if fitting else "no column of image files"
    columns = ", ".join(f"{field.name}: {field.type}" for field in schema)
    raise DataError(
        f"{printable(file)} has {problem}; wanted is bytes or struct<bytes, path>, and it has {columns[:300]}{texts}"
    )


def _label_column(schema: Any, notes: list[str]) -> str | None:
    """Name of the column of classes, or None; `notes` gets a line for a column whose values can't be classes."""
    for name in filter(schema.names.__contains__, LABEL_NAMES):
        kind = schema.field(name).type
        if _kind_of_label(kind):
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

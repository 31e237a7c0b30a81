"""Images in a column of Parquet files, as Hugging Face keeps them; needs pyarrow only."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from dino_ds.basics.text_file import is_url
from dino_ds.data.base import UnreadableImage, find_placeholder
from dino_ds.data.encoded import RowImages
from dino_ds.data.listing import LABEL_NAMES, Labels, printable
from dino_ds.data.remote import find_states, open_remote, remote_with_room
from dino_ds.errors import ConfigError, DataError, one_line

_IMAGE_NAMES = ("image", "img", "jpg", "png")
_OPEN_FILES = 32
"""Files a process keeps open at most, with what their footers say."""
_MOST_BYTES = 1 << 30
"""The most that a column of a row group may hold: each loader process reads an image with its whole group."""
_LOOKED_AT, _NUMBERS = 64, 1 << 16
"""Rows that are read at a time to see whether they have bytes, and rows of plain numbers."""


class ParquetImages(RowImages):
    """The rows of Parquet files, file after file in the order given.

    The image column is of type binary or struct with `bytes`; a label column of whole numbers or texts gives classes,
    with the names that Hugging Face stores beside the schema. Raises ConfigError without pyarrow, DataError where a
    file can't be read, has no such column, or has row groups that are too large.
    """

    def __init__(self, files: list[str], cache_gib: float = 0.0) -> None:
        import_parquet()
        super().__init__(files)
        self._elsewhere = list[tuple[Any, ...]]()
        if is_url(files[0]):
            states = find_states(files)
            remote, self.notes = remote_with_room(files, states, sum(size for size, _ in states), cache_gib)
            self._elsewhere = [(remote, *state) for state in states]
        first, groups, ends, labels, has_bytes = 0, [], [], list[Any](), False
        for number, file in enumerate(self._files):
            try:
                opened = _parquet_file(self._place(number))
                if number == 0:
                    schema = opened.schema_arrow
                    self._column, label = _image_column(schema, file), _label_column(schema, self.notes)
                _check_alike(schema, opened.schema_arrow, self._column, label, (self._files[0], file))
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
                        labels += itertools.chain.from_iterable(
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
        self.labels, self.classes = _number(labels, _class_names(schema, label)) if label is not None else (None, None)

    def read(self, index: int) -> bytes:
        index = range(len(self))[index]
        place = np.searchsorted(self._groups[:, 0], index, side="right") - 1
        first, group = self._groups[place].tolist()
        try:
            data = _read_group(self._place(self._find(index)[0]), group, self._column)[index - first].as_py()
        except DataError:
            raise
        except Exception as error:  # as above
            raise UnreadableImage(self.name(index), f"Parquet: {one_line(error, 200)}") from None
        if isinstance(data, dict):
            data = data["bytes"]
        if not data:
            raise UnreadableImage(self.name(index), "no bytes in this row" if data is None else "empty file")
        return data

    def _place(self, number: int) -> tuple[Any, ...]:
        """A file, and the way to it, its size and its tag where it is elsewhere."""
        return (self._files[number], *(self._elsewhere[number] if self._elsewhere else ()))


def import_parquet() -> Any:
    """pyarrow.parquet, or a ConfigError with the command that installs it."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("Parquet files need pyarrow: pip install 'dino_ds[parquet]'") from None
    return pyarrow.parquet


@lru_cache(maxsize=1)  # neighboring rows cost one read; more groups would be too much memory in each worker
def _read_group(place: tuple[Any, ...], group: int, column: str) -> Any:
    import pyarrow

    return pyarrow.chunked_array(_read_parts(_open_parquet(place), group, column))


def _read_parts(opened: Any, group: int, column: str) -> Iterator[Any]:
    """A column of a row group, in parts. Raises ValueError where it becomes too large: a file of a few kilobytes can
    say that every row is the same gigabyte, and its footer counts that once."""
    total, size = 0, _bytes_of(opened, group, column)
    rows = max(1, _MOST_BYTES // size) if size else _NUMBERS
    # One thread: loader processes share out the cores, and threads of a library do not survive a fork.
    for batch in opened.iter_batches(rows, row_groups=[group], columns=[column], use_threads=False):
        total += batch.nbytes
        if total > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES >> 20} MiB in the column {column} of row group {group}")
        yield batch.column(0)


def _bytes_of(opened: Any, group: int, column: str) -> int:
    """Bytes that texts of a column take in a row group before they are compressed, by the footer."""
    about = opened.metadata.row_group(group)
    chunks = [about.column(place) for place in range(about.num_columns)]
    own = [one for one in chunks if one.path_in_schema == column or one.path_in_schema.startswith(f"{column}.")]
    return sum(one.total_uncompressed_size for one in own if one.physical_type == "BYTE_ARRAY")


def _has_bytes(opened: Any, group: int, column: str) -> bool:
    """Whether any row of a group has the bytes of an image: others have its path alone."""
    rows = min(_LOOKED_AT, max(1, _MOST_BYTES // max(1, _bytes_of(opened, group, column))))
    parts = (batch.column(0) for batch in opened.iter_batches(rows, [group], [column], use_threads=False))
    values = (part.field("bytes") if hasattr(part, "field") else part for part in parts)
    return any(part.null_count < len(part) for part in values)


def _parquet_file(place: tuple[Any, ...]) -> Any:
    file, *elsewhere = place
    return import_parquet().ParquetFile(open_remote(elsewhere[0], file, elsewhere[1:], 0) if elsewhere else file)


_open_parquet = lru_cache(maxsize=_OPEN_FILES)(_parquet_file)


def _image_column(schema: Any, file: str) -> str:
    from pyarrow import types

    def holds_images(kind: Any) -> bool:
        if types.is_struct(kind):
            return kind.get_field_index("bytes") >= 0 and holds_images(kind.field("bytes").type)
        return types.is_binary(kind) or types.is_large_binary(kind)

    found = [field.name for field in schema if holds_images(field.type)]
    named = [name for name in _IMAGE_NAMES if name in found]
    if named or len(found) == 1:
        return (named or found)[0]
    texts = "" if found else "; paths in a column of texts write into a .txt list, one a line"
    what = f"several columns of bytes ({', '.join(found)}), none called image" if found else "no column of image files"
    columns = ", ".join(f"{field.name}: {field.type}" for field in schema)
    raise DataError(
        f"{printable(file)} has {what}; wanted is bytes or struct<bytes, path>, and it has {columns[:300]}{texts}"
    )


def _label_column(schema: Any, notes: list[str]) -> str | None:
    """The column of classes, or None; `notes` gets a line for one whose values can't be classes."""
    for name in LABEL_NAMES:
        place = schema.get_field_index(name)
        if place < 0:
            continue
        if _kind_of_label(schema.field(place).type):
            return name
        what = f"the column {name} ({schema.field(place).type}) of the Parquet files"
        notes.append(f"{what} is not read as classes: it must be whole numbers or texts")
    return None


def _kind_of_label(kind: Any) -> str:
    """The kind of values that an Arrow type holds: "number", "text", or "" for what can't be classes."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_integer(kind):
        return "number"
    return "text" if types.is_string(kind) or types.is_large_string(kind) else ""


def _check_alike(first: Any, schema: Any, image: str, label: str | None, files: tuple[str, str]) -> None:
    """Raise DataError where a file, the second of `files`, lacks a column of the first one's, or has other labels."""
    for column in (image, label) if label else (image,):
        place = schema.get_field_index(column)
        if place < 0:
            what = f"has no column {column}"
        elif column == label and _kind_of_label(schema.field(place).type) != _kind_of_label(first.field(label).type):
            what = f"has another type in the column {column}, {schema.field(place).type}"
        else:
            continue
        raise DataError(f"{printable(files[1])} {what}, unlike {printable(files[0])}: write all files alike")


def _class_names(schema: Any, label: str) -> list[str]:
    """Hugging Face's, or none."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return [str(name) for name in features[label]["names"]]
    except (KeyError, TypeError, ValueError):
        return []


def _number(values: list[Any], names: list[str]) -> tuple[Labels | None, list[str] | None]:
    """Values of the label column (None = none) -> class numbers and their names; all of `names`, where it fits."""
    present = sorted({value for value in values if value is not None and value != -1})
    if not present:
        return None, None
    if names and isinstance(present[-1], int) and present[0] >= 0 and present[-1] < len(names):
        present = list(range(len(names)))
    else:
        names = [str(value) for value in present]
    numbers = {value: number for number, value in enumerate(present)}
    return Labels(np.array([numbers.get(value, -1) for value in values], np.int32)), names

"""Images in a dataset of HDF5 files, stored as arrays or as encoded files; needs h5py only."""

from __future__ import annotations

import io
import os
import zlib
from functools import lru_cache
from typing import Any

import numpy as np

from dino_ds.data.encoded import MAX_BYTES, RowImages, naming_file
from dino_ds.data.images import UnreadableImage
from dino_ds.data.listing import Labels, note_unnamed, printable
from dino_ds.errors import ConfigError, DataError

_OPEN_FILES = 32  # largest number of files that a process keeps open
_MOST_NAMES = 10_000  # largest number of names in a file that are searched for a fitting dataset
_DEFLATE = 1  # number of the filter that h5py calls gzip
_LABELS = ("label", "labels", "targets", "y")
_FITTING = "(n, h, w), (n, h, w, c) or (n, c, h, w) of numbers, or n encoded files as opaque or variable-length bytes"


class Hdf5Images(RowImages):
    """The images of a dataset, file after file: the dataset called `name`, or the only one that fits.
    A row is read like a .npy file with its values. A dataset beside it with a name of `_LABELS`, one number an image,
    has the classes. References to other files are refused: external and soft links, virtual datasets, external storage.
    Raises ConfigError without h5py, DataError for a file that can't be read or has no such dataset."""

    def __init__(self, files: list[str], name: str | None = None) -> None:
        import_h5py()
        super().__init__(files)
        counts, labels = list[int](), list[np.ndarray]()
        self._parts = []
        for file in self._files:
            with naming_file(file, "HDF5"), _open(file) as opened:
                dataset = _named(opened, name) if name is not None else _only(opened)
                if problem := _problem(dataset):
                    raise DataError(f"{printable(f'{file}:{dataset.name}')} {problem}; wanted is {_FITTING}")
                self._parts.append(dataset.name)
                counts.append(len(dataset))
                labels.append(_labels_beside(opened, dataset, self.notes))
        self._ends, numbers = np.cumsum(counts), np.concatenate(labels)
        if len(classes := np.unique(numbers[numbers >= 0])):
            ranks = np.where(numbers >= 0, np.searchsorted(classes, numbers), -1).astype(np.int32)
            self.labels, self.classes = Labels(ranks), list(map(str, classes.tolist()))
            self.notes += note_unnamed(map(os.path.dirname, self._files))

    def read(self, index: int) -> bytes:
        file, row = self._find(index)
        with self._naming_image(index, "HDF5"):
            dataset = _dataset(os.getpid(), self._files[file], self._states[file], self._parts[file])
            value = _read_rows(dataset, row, row + 1)[0]
        if isinstance(value, np.void):  # opaque bytes of one length
            return value.tobytes()
        if value.dtype == np.uint8 and value.ndim == 1:
            data = value.tobytes()
        else:
            stream = io.BytesIO()
            np.lib.format.write_array(stream, np.ascontiguousarray(value), (1, 0), allow_pickle=False)
            data = stream.getvalue()
        if not data:
            raise UnreadableImage(self.name(index), "no bytes in this row")
        return data


def import_h5py() -> Any:
    """Import and return h5py. Raises ConfigError where it is not installed."""
    try:
        import h5py
    except ImportError:
        raise ConfigError("HDF5 files need h5py: pip install 'dino_ds[hdf5]'") from None
    return h5py


def _open(file: str) -> Any:
    return import_h5py().File(file, "r", locking="best-effort", rdcc_nbytes=16 << 20)


@lru_cache(maxsize=_OPEN_FILES)
def _dataset(process: int, file: str, state: tuple[int, ...] | None, name: str) -> Any:
    """The dataset, opened by this process: a handle from before a fork would share its position in the file."""
    dataset = _named(_open(file), name)
    if problem := _problem(dataset):
        raise ValueError(f"the file has changed: {name} {problem}")
    return dataset


def _named(opened: Any, name: str) -> Any:
    """The dataset called `name`, found by hard links alone: other links may lead to any file. Raises DataError."""
    h5py, node, file = import_h5py(), opened, printable(opened.filename)
    dataset = printable(f"{opened.filename}:{name}")
    for part in filter(None, name.split("/")):
        link = node.get(part, getlink=True) if isinstance(node, h5py.Group) else None
        if link is None:
            raise DataError(f"{file} has no dataset {printable(name)}{_datasets_in_words(opened)}")
        if not isinstance(link, h5py.HardLink):
            raise DataError(f"{dataset} is a link, which is not followed: name its target")
        node = node[part]
    if not isinstance(node, h5py.Dataset):
        raise DataError(f"{dataset} is no dataset{_datasets_in_words(opened)}")
    return node


def _only(opened: Any) -> Any:
    """The only fitting dataset of a file. Raises DataError for none or several."""
    fitting = [dataset for dataset in _datasets(opened) if not _problem(dataset)]
    if len(fitting) == 1:
        return fitting[0]
    count = f"{len(fitting)} datasets that fit" if fitting else f"no dataset of images ({_FITTING})"
    words = f"{count}{_datasets_in_words(opened)}"
    raise DataError(f"{printable(opened.filename)} has {words}: name one, as file.h5:/images")


def _datasets_in_words(opened: Any) -> str:
    some = [f"{dataset.name} {tuple(dataset.shape or ())} {dataset.dtype}" for dataset in _datasets(opened)[:5]]
    return printable(f"; it has {', '.join(some)}"[:400]) if some else ""


def _datasets(opened: Any) -> list[Any]:
    """Datasets of a file, without following links."""
    items = list[Any]()

    def visit(_: str, item: Any) -> bool | None:
        items.append(item)
        return True if len(items) >= _MOST_NAMES else None

    opened.visititems(visit)
    return [item for item in items if isinstance(item, import_h5py().Dataset)]


def _problem(dataset: Any) -> str:
    """Reason why a dataset has no images that can be read from this file alone; "" if it has."""
    if dataset.is_virtual or dataset.external:
        return "takes its values from other files, which are not read"
    shape, kind = dataset.shape or (), dataset.dtype
    if not shape or not 0 < shape[0] <= 10**9:
        return f"has the shape {shape}"
    if dataset.chunks and int(np.prod(dataset.chunks, dtype=object)) * kind.itemsize > MAX_BYTES:
        return f"has chunks {dataset.chunks} of more than {MAX_BYTES >> 20} MiB, and an image costs a whole one"
    if len(shape) == 1:
        is_bytes = kind.kind == "V" and kind.names is None and kind.subdtype is None and 0 < kind.itemsize <= MAX_BYTES
        if not is_bytes and import_h5py().check_vlen_dtype(kind) != np.uint8:
            return f"has values of type {kind}"
    elif kind.kind not in "uif" or kind.itemsize > 8:
        return f"has values of type {kind}"
    elif len(shape) not in (3, 4) or min(shape) < 1 or (len(shape) == 3 and shape[2] <= 4) or max(shape[1:]) < 2:
        return f"has the shape {shape}"  # (h, w, 3) is one image, not h of them
    elif int(np.prod(shape[1:], dtype=object)) * kind.itemsize > MAX_BYTES:
        return f"has images of more than {MAX_BYTES >> 20} MiB"
    if not dataset.id.get_storage_size():
        return "has no values: none were written"
    there = os.stat(dataset.file.filename).st_size  # an image takes at least a byte
    return f"has {shape[0]} images in a file of {there} bytes" if shape[0] > there else ""


def _read_rows(dataset: Any, first: int, end: int) -> Any:
    """Rows of a dataset. Raises ValueError for a chunk that inflates beyond its size: HDF5 would inflate it all."""
    plist = dataset.id.get_create_plist()
    filters = [plist.get_filter(number)[0] for number in range(plist.get_nfilters())]
    if filters.count(_DEFLATE) > 1:
        raise ValueError("it is compressed twice")
    if _DEFLATE in filters:
        rows = (slice(first, end), *(slice(0, side) for side in dataset.shape[1:]))
        for part in dataset.iter_chunks(rows):
            corner = tuple(span.start // side * side for span, side in zip(part, dataset.chunks, strict=True))
            _check_chunk(dataset, corner, filters.index(_DEFLATE))
    return dataset[first:end]


@lru_cache(maxsize=_OPEN_FILES)  # rows are often read in order
def _check_chunk(dataset: Any, corner: tuple[int, ...], number: int) -> None:
    most = int(np.prod(dataset.chunks, dtype=object)) * dataset.dtype.itemsize
    if dataset.id.get_chunk_info_by_coord(corner).size:
        left_out, data = dataset.id.read_direct_chunk(corner)
        if not left_out >> number & 1 and len(zlib.decompressobj().decompress(data, most + 1)) > most:
            raise ValueError(f"a chunk of {most} bytes inflates to more")


def _labels_beside(opened: Any, dataset: Any, notes: list[str]) -> np.ndarray:
    """Class numbers (n,) next to a dataset, or all -1; `notes` gets a line for values that can't be classes."""
    h5py, group = import_h5py(), opened[os.path.dirname(dataset.name) or "/"]
    for name in _LABELS:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            continue
        values = group[name]
        if not isinstance(values, h5py.Dataset) or values.is_virtual or values.external:
            continue
        if values.dtype.kind in "ui" and values.shape == (len(dataset), *[1] * (values.ndim - 1)):
            return np.asarray(_read_rows(values, 0, len(values)), np.int64).reshape(-1)
        labels = f"{values.name} {values.shape} {values.dtype} of {opened.filename}"
        notes.append(printable(f"{labels} is not read as classes: it must be whole numbers, one an image"))
    return np.full(len(dataset), -1)

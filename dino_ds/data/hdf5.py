"""Images in a dataset of HDF5 files: arrays, or encoded files as bytes; needs h5py only."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dino_ds.data.base import UnreadableImage, find_placeholder
from dino_ds.data.encoded import MAX_BYTES, RowImages
from dino_ds.data.listing import Labels, printable
from dino_ds.errors import ConfigError, DataError, one_line

_OPEN_FILES = 32
"""Files a process keeps open at most."""
_CACHE = 16 << 20
"""Bytes of decompressed chunks that a process keeps of each dataset."""
_MOST_NAMES = 10_000
"""Names in a file that are looked at for a dataset that fits."""
_MOST_ROWS = 10**9
_LABELS = ("label", "labels", "targets", "y")
_FITTING = "(n, h, w), (n, h, w, c) or (n, c, h, w) of numbers, or n encoded files as opaque or variable-length bytes"


class Hdf5Images(RowImages):
    """The images of a dataset, file after file in the order given: the one called `name`, or the one that fits.

    An array is read as a .npy file of it would be. Numbers next to it, one an image, called as in `_LABELS`, are its
    classes. What leads out of a file is refused: external and soft links, virtual datasets, external storage. Raises
    ConfigError without h5py, DataError where a file can't be read or has no such dataset.
    """

    def __init__(self, files: list[str], name: str | None = None) -> None:
        import_h5py()
        super().__init__(files)
        counts, labels = list[int](), list[np.ndarray | None]()
        self._parts = []
        for file in self._files:
            try:
                with _open(file) as opened:
                    dataset = _named(opened, name) if name is not None else _only(opened)
                    if problem := _problem(dataset):
                        raise DataError(f"{printable(f'{file}:{dataset.name}')} {problem}; wanted is {_FITTING}")
                    self._parts.append(dataset.name)
                    self.notes += _note_chunks(dataset, file)
                    counts.append(len(dataset))
                    labels.append(_labels_beside(opened, dataset, self.notes))
            except DataError as error:
                raise DataError(f"{error}") from None
            except Exception as error:  # h5py raises OSError, KeyError, RuntimeError and others for a broken file
                reason = find_placeholder(file) or one_line(error, 200)
                raise DataError(f"{printable(file)} cannot be read as HDF5: {reason}") from None
        self._ends = np.cumsum(counts)
        self.labels, self.classes = _number(labels)

    def read(self, index: int) -> bytes:
        file, row = self._find(index)
        try:
            value = _dataset(os.getpid(), self._files[file], self._parts[file])[row]
            if isinstance(value, np.void):  # opaque bytes of one length
                return value.tobytes()
            if value.dtype == np.uint8 and value.ndim == 1:
                data = value.tobytes()
            else:
                stream = io.BytesIO()
                np.lib.format.write_array(stream, np.ascontiguousarray(value), (1, 0), allow_pickle=False)
                data = stream.getvalue()
        except Exception as error:  # as above
            raise UnreadableImage(self.name(index), f"HDF5: {one_line(error, 200)}") from None
        if not data:
            raise UnreadableImage(self.name(index), "no bytes in this row")
        return data


def import_h5py() -> Any:
    """h5py. Raises ConfigError where it is not installed."""
    try:
        import h5py
    except ImportError:
        raise ConfigError("HDF5 files need h5py: pip install 'dino_ds[hdf5]'") from None
    return h5py


def _open(file: str) -> Any:
    return import_h5py().File(file, "r", locking="best-effort", rdcc_nbytes=_CACHE)


@lru_cache(maxsize=_OPEN_FILES)
def _dataset(process: int, file: str, name: str) -> Any:
    """The dataset, opened by this process: a handle of another one, after a fork, shares its place in the file."""
    dataset = _named(_open(file), name)
    if problem := _problem(dataset):
        raise ValueError(f"the file has changed: {name} {problem}")
    return dataset


def _named(opened: Any, name: str) -> Any:
    """The dataset called `name`, by hard links alone: others may lead to any file. Raises DataError."""
    h5py, found = import_h5py(), opened
    for part in filter(None, name.split("/")):
        link = found.get(part, getlink=True) if isinstance(found, h5py.Group) else None
        if link is None:
            raise DataError(f"{printable(opened.filename)} has no dataset {printable(name)}{_there(opened)}")
        if not isinstance(link, h5py.HardLink):
            raise DataError(
                f"{printable(f'{opened.filename}:{name}')} is a link, which is not followed: name its target"
            )
        found = found[part]
    if not isinstance(found, h5py.Dataset):
        raise DataError(f"{printable(f'{opened.filename}:{name}')} is no dataset{_there(opened)}")
    return found


def _only(opened: Any) -> Any:
    """The one dataset of a file that fits. Raises DataError where there is none, or several."""
    found = [dataset for dataset in _datasets(opened) if not _problem(dataset)]
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} datasets that fit" if found else f"no dataset of images ({_FITTING})"
    raise DataError(f"{printable(opened.filename)} has {what}{_there(opened)}: name one, as file.h5:/images")


def _there(opened: Any) -> str:
    some = [f"{dataset.name} {tuple(dataset.shape or ())} {dataset.dtype}" for dataset in _datasets(opened)[:5]]
    return printable(f"; it has {', '.join(some)}"[:400]) if some else ""


def _datasets(opened: Any) -> list[Any]:
    """Datasets of a file, without following links."""
    h5py, found, seen = import_h5py(), list[Any](), 0

    def visit(_: str, item: Any) -> bool | None:
        nonlocal seen
        seen += 1
        if isinstance(item, h5py.Dataset):
            found.append(item)
        return True if seen >= _MOST_NAMES else None

    opened.visititems(visit)
    return found


def _problem(dataset: Any) -> str:
    """Why a dataset does not hold images that can be read from this file alone; "" if it does."""
    if dataset.is_virtual or dataset.external:
        return "takes its values from other files, which are not read"
    shape, kind = dataset.shape or (), dataset.dtype
    if not shape or not 0 < shape[0] <= _MOST_ROWS:
        return f"has the shape {shape}"
    if dataset.chunks and int(np.prod(dataset.chunks, dtype=object)) * kind.itemsize > MAX_BYTES:
        return f"has chunks {dataset.chunks} of more than {MAX_BYTES >> 20} MiB, and an image costs a whole one"
    if len(shape) == 1:
        is_bytes = kind.kind == "V" and kind.names is None and kind.subdtype is None and 0 < kind.itemsize <= MAX_BYTES
        if not is_bytes and import_h5py().check_vlen_dtype(kind) != np.uint8:
            return f"has values of type {kind}"
        return _why_not_stored(dataset)
    if kind.kind not in "uif" or kind.itemsize > 8:
        return f"has values of type {kind}"
    if len(shape) not in (3, 4) or min(shape) < 1 or (len(shape) == 3 and shape[2] <= 4) or max(shape[1:]) < 2:
        return f"has the shape {shape}"  # (h, w, 3) is one image, not h of them
    if int(np.prod(shape[1:], dtype=object)) * kind.itemsize > MAX_BYTES:
        return f"has images of more than {MAX_BYTES >> 20} MiB"
    return _why_not_stored(dataset)


def _why_not_stored(dataset: Any) -> str:
    """Why a dataset can't have so many images as it claims; "" if it may: each takes a byte of the file at least."""
    if not dataset.id.get_storage_size():
        return "has no values: none were written"
    there = os.stat(dataset.file.filename).st_size
    return f"has {len(dataset)} images in a file of {there} bytes" if len(dataset) > there else ""


def _note_chunks(dataset: Any, file: str) -> list[str]:
    """Notes on chunks that cost each image far more than its own bytes, and on those that were never written."""
    if not dataset.chunks:
        return []
    where, notes = printable(f"{file}:{dataset.name}"), list[str]()
    size = int(np.prod(dataset.chunks, dtype=object)) * dataset.dtype.itemsize
    if dataset.chunks[0] > 1 and size > _CACHE:
        notes.append(
            f"each image of {where} costs a chunk of {size >> 20} MiB, {dataset.chunks[0]} images: "
            "write it with one image in each chunk"
        )
    grid = math.prod(-(-side // chunk) for side, chunk in zip(dataset.shape, dataset.chunks, strict=True))
    if missing := grid - dataset.id.get_num_chunks():
        notes.append(f"{missing} of {grid} chunks of {where} were never written: their images are of one color")
    return notes


def _labels_beside(opened: Any, dataset: Any, notes: list[str]) -> np.ndarray | None:
    """Class numbers (n,) next to a dataset, or None; `notes` gets a line for each set of values that can't be these."""
    h5py, group = import_h5py(), _parent(opened, dataset.name)
    for name in _LABELS:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            continue
        found = group[name]
        if not isinstance(found, h5py.Dataset) or found.is_virtual or found.external:
            continue
        if found.dtype.kind in "ui" and found.shape == (len(dataset), *[1] * (found.ndim - 1)):
            return np.asarray(found[()], np.int64).reshape(-1)
        what = f"{found.name} {found.shape} {found.dtype} of {opened.filename} is not read as classes"
        notes.append(printable(f"{what}: it must be whole numbers, one an image"))
    return None


def _parent(opened: Any, name: str) -> Any:
    folder = os.path.dirname(name)
    return opened[folder] if folder else opened


def _number(found: Sequence[np.ndarray | None]) -> tuple[Labels | None, list[str] | None]:
    """Classes of all files by their numbers, -1 for none; (None, None) where a file has no labels."""
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None, None
    labels = np.concatenate(known)
    classes = np.unique(labels[labels >= 0])
    numbers = np.where(labels >= 0, np.searchsorted(classes, labels), -1).astype(np.int32)
    return (Labels(numbers), [str(one) for one in classes.tolist()]) if len(classes) else (None, None)

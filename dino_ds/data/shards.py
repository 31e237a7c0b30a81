"""Tar shards, map-style: any image by index with one read at its place, so ranks and positions are as for a folder."""

from __future__ import annotations

import functools
import io
import os

import numpy as np

from dino_ds.data.base import UnreadableImage
from dino_ds.data.encoded import MAX_BYTES, ListedImages
from dino_ds.data.formats import EXTENSIONS
from dino_ds.data.listing import Listing, find_listing, printable
from dino_ds.data.tar_index import index_beside, index_shards, is_same_file, shards_are_current
from dino_ds.errors import DataError

_OPEN_SHARDS = 128
"""Files a process keeps open at most."""


class TarShards(ListedImages):
    """The images of tar files, shard after shard in the order given, members in the order of the file.

    The index lies beside the shards where `dino-ds shard` made them, else in the cache; it is used while each shard has
    the size and time (or, for a copy, the checksum of its ends) it was made from. `notes` says what of the shards can't
    be read. Raises DataError if there are no images.
    """

    _opened = (*ListedImages._opened, "_shards", "_states", "_shard", "_offset", "_size")

    def __init__(self, shards: list[str]) -> None:
        shards = [os.path.abspath(shard) for shard in shards]
        listing, note = index_beside(shards)
        self._base = os.path.dirname(shards[0]) if listing else ""
        if listing is None:
            build = functools.partial(index_shards, shards, shards)
            key = "\n".join((*shards, *EXTENSIONS))
            listing = find_listing("shards", key, lambda known: shards_are_current(known, ""), build)
        super().__init__(listing)
        self.notes = [*([note] if note else []), *listing.about["notes"]]
        if not len(self):
            where = shards[0] if len(shards) == 1 else f"{len(shards)} shards, {shards[0]} ..."
            raise DataError("; ".join([f"no images in {printable(where)}", *self.notes[:3]]) + "; fix data.root")

    def _open(self, listing: Listing) -> None:
        super()._open(listing)
        self._shards, self._states = listing.texts("shards"), listing.arrays["shards.state"].reshape(-1, 3)
        self._shard, self._offset, self._size = (listing.arrays[key] for key in ("shard", "offset", "size"))

    def read(self, index: int) -> bytes:
        shard, size = int(self._shard[index]), int(self._size[index])
        if not size:
            raise UnreadableImage(self.name(index), "empty file")
        if size > MAX_BYTES:
            raise UnreadableImage(self.name(index), f"{size} bytes, {MAX_BYTES} are allowed")
        try:
            file = _open_shard(self._path(shard), *self._states[shard].tolist())
            data = os.pread(file.fileno(), size, int(self._offset[index]))
        except OSError as error:
            raise UnreadableImage(self.name(index), f"shard: {error.strerror or error}") from None
        if len(data) != size:
            raise UnreadableImage(self.name(index), "shard: cut off since it was indexed")
        return data

    def name(self, index: int) -> str:
        return printable(f"{self._path(int(self._shard[index]))}/{self._names[index]}")

    def file_bytes(self, index: int) -> int:
        return int(self._size[index])

    def file_time(self, index: int) -> int:
        """Time of the shard's last change in nanoseconds, as it was indexed: one that has changed is not read."""
        return int(self._states[int(self._shard[index])][1])

    def _path(self, shard: int) -> str:
        return os.path.join(self._base, self._shards[shard])


@functools.lru_cache(maxsize=_OPEN_SHARDS)
def _open_shard(path: str, size: int, time: int, crc: int) -> io.FileIO:
    """Reads give their own position, so a file may be shared by threads and by forked processes; it is closed when the
    last user is done with it.

    Raises OSError, also where the file is no longer the one that was indexed.
    """
    file = io.FileIO(path)
    if not is_same_file(file.fileno(), np.array([size, time, crc])):
        file.close()
        raise OSError("changed since it was indexed")
    return file

"""Decoded images in memory shared by a machine's loader processes: a small dataset is decoded once a run."""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import numpy as np

from dino_ds.basics.machine import host_memory_gib
from dino_ds.data.decode import DecodedImage, EncodedImage
from dino_ds.data.images import Source
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError

_USED, _FULL, _FIRST = 0, 1, 2
"""Positions in the table of int64: bytes used; 1 after an image had no room, 2 once reported; offset of image 0."""
_HEADER = 5
"""int32 numbers before the pixels: height, width, channels, bytes per value, whether a decoder may shrink the file."""
_ALIGNED = 64


class ImageCache:
    """Pixels by image index; an image without room is not kept. The memory has no name in a file system: processes
    receive its descriptor with the pickled cache, and the kernel frees it with the last process, however that ends."""

    def __init__(self, fd: int, images: int) -> None:
        self._fd, self._images, self._memory = fd, images, mmap.mmap(fd, 0)
        self._table = np.frombuffer(self._memory, np.int64, images + _FIRST)
        weakref.finalize(self, os.close, fd)

    @staticmethod
    def create(images: int, size: int) -> ImageCache:
        """Empty cache of `size` bytes for `images` images. Memory is allocated as images are added."""
        fd, table = os.memfd_create("dino_ds images"), _aligned(8 * (images + _FIRST))
        os.ftruncate(fd, table + size)
        cache = ImageCache(fd, images)
        cache._table[_USED] = table
        return cache

    @property
    def address(self) -> tuple[int, int, int]:
        """Process, descriptor and inode, for other processes of this machine."""
        return os.getpid(), self._fd, os.fstat(self._fd).st_ino

    @staticmethod
    def attach(address: tuple[int, int, int], images: int) -> ImageCache:
        """The cache of another process of this user on this machine. Raises OSError."""
        pid, number, inode = address
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        if os.fstat(fd).st_ino != inode:
            os.close(fd)
            raise OSError(0, "another process has this number here")
        return ImageCache(fd, images)

    def __getstate__(self) -> tuple[Any, int]:
        return reduction.DupFd(self._fd), self._images

    def __setstate__(self, state: tuple[Any, int]) -> None:
        ImageCache.__init__(self, state[0].detach(), state[1])

    def get(self, index: int) -> tuple[np.ndarray, bool] | None:
        """Pixels (h, w, c) of an image, and whether a decoder may shrink its file; None if it is not kept."""
        if not (offset := int(self._table[_FIRST + index])):
            return None
        *shape, itemsize, shrinks = np.frombuffer(self._memory, np.int32, _HEADER, offset).tolist()
        dtype = np.uint8 if itemsize == 1 else np.float32
        return np.ndarray(shape, dtype, self._memory, offset + _ALIGNED), bool(shrinks)

    def put(self, index: int, pixels: np.ndarray, shrinks: bool) -> None:
        """Keep pixels (h, w, c) of uint8 or float32, if there is room."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)  # the kernel drops a dead process's lock
        try:
            offset = int(self._table[_USED])
            end = offset + _ALIGNED + _aligned(pixels.nbytes)
            if end > len(self._memory):
                self._table[_FULL] = self._table[_FULL] or 1
                return
            self._table[_USED] = end
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
        header = [*pixels.shape, pixels.itemsize, shrinks]
        np.frombuffer(self._memory, np.int32, _HEADER, offset)[:] = header
        np.ndarray(pixels.shape, pixels.dtype, self._memory, offset + _ALIGNED)[:] = pixels
        self._table[_FIRST + index] = offset  # last: now others may read it

    def take_note(self) -> str | None:
        """A line for the user once an image has had no room, returned once and to one process only; else None."""
        if self._table[_FULL] != 1:
            return None
        self._table[_FULL] = 2
        kept = np.count_nonzero(self._table[_FIRST:])
        return f"data.cache_gib is full with {kept} of {self._images} images; the others are decoded in every epoch"


class CachedImage:
    """An image from the cache, or cached once it is decoded in full, with EncodedImage's interface. open_file: returns
    the file with its header read; called only for an image or size that is not cached."""

    def __init__(self, cache: ImageCache, index: int, open_file: Callable[[], EncodedImage | DecodedImage]) -> None:
        self._cache, self._index, self._open_file = cache, index, open_file
        self._kept = cache.get(index)
        self._file = None if self._kept else open_file()
        if self._kept:
            self.height, self.width, self.channels = self._kept[0].shape
        elif self._file:
            self.height, self.width, self.channels = self._file.height, self._file.width, self._file.channels

    def decode(self, shrink: int = 1) -> np.ndarray:
        """The same pixels as EncodedImage.decode, bit for bit. Raises UnreadableImage."""
        if self._kept and (shrink == 1 or not self._kept[1]):
            return self._kept[0]
        file = self._file or self._open_file()
        pixels, shrinks = file.decode(shrink), getattr(file, "format", "") == "JPEG"
        if not self._kept and (shrink == 1 or not shrinks):
            self._cache.put(self._index, pixels, shrinks)
        return pixels


def fitting_cache(gib: float, source: Source) -> tuple[float, list[str]]:
    """Size of the cache in GiB: `gib`, or 0 with a log line for a source without files. Raises ConfigError for more
    memory than this machine has free."""
    if gib and not hasattr(source, "read"):
        return 0.0, [f"data.cache_gib {gib:g} is left out: it keeps decoded files, and this data.source has none"]
    if gib > (free := host_memory_gib()[1]):
        raise ConfigError(f"data.cache_gib {gib:.12g} is more than this machine has free ({free:.1f} GiB): give less")
    return gib, []


def open_cache(gib: float, images: int) -> ImageCache | None:
    """Open the cache that the ranks of this machine share, or None for 0 GiB; every rank must call this. Raises
    ConfigError if the ranks of a machine can't open each other's memory."""
    if not gib:
        return None
    cache, node = ImageCache.create(images, int(gib * 2**30)), platform.node()
    first = next(address for name, address in distributed.gather_objects((node, cache.address)) if name == node)
    with distributed.raise_on_all_ranks():  # the owner waits here until all have opened it
        try:
            return cache if first == cache.address else ImageCache.attach(first, images)
        except OSError as error:
            why = f"the ranks of {node} can't share memory ({error.strerror}), as in containers of their own"
            raise ConfigError(f"{why}: set data.cache_gib 0") from None


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED

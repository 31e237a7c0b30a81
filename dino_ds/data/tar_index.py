"""An index of the images in tar files: members are found and their names noted, nothing is ever extracted.

The layout is WebDataset's: a member with an image's ending is one image; KEY.cls holds the class of KEY.jpg.
"""

from __future__ import annotations

import os
import tarfile
import zlib
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from dino_ds.data.encoded import note_left_out
from dino_ds.data.formats import EXTENSIONS, OTHER_KINDS
from dino_ds.data.listing import Contents, FolderLabels, Listing, Packer, label_arrays, printable
from dino_ds.errors import one_line

INDEX = "index.safetensors"
"""The index beside the shards, which `dino-ds shard` writes."""
CLASSES = "classes.txt"
"""Beside the shards: the name of class n is line n."""
_ENDINGS = tuple(os.fsencode(extension) for extension in EXTENSIONS)
_BLOCK = 512
_HEAD, _TAIL = 8 * _BLOCK, 32 * _BLOCK
_THREADS = 16
_MAX_LABEL_BYTES = 1000
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""The first bytes of files of gzip, bzip2, xz and zstd."""
_MAX_NOTES = 20


class _Members:
    """The images of one shard; `labels` has the text of each one's .cls or None, `notes` what could not be read.

    others: images of kinds that nothing here reads, unless an image of the same key is beside them.
    """

    def __init__(self, path: str) -> None:
        self.size, self.time, self.crc = 0, 0, -1
        self.names, self.offsets, self.sizes = dict[bytes, None](), array("q"), array("q")
        self.notes, self.others = list[str](), list[bytes]()
        self._classes: dict[bytes, bytes] = {}
        self._repeated: list[bytes] = []
        try:
            with open(path, "rb") as file:
                state = os.fstat(file.fileno())
                self.size, self.time = state.st_size, state.st_mtime_ns
                self.crc = _crc_of_ends(file.fileno(), self.size)
                problems = [self._walk(file)]
        except OSError as error:
            problems = [error.strerror or str(error)]
        self.labels = [self._classes.get(_key(name)) for name in self.names]
        if self.others:
            keys = {_key(name) for name in self.names}
            self.others = [name for name in self.others if _key(name) not in keys]
        if self._repeated:
            first = printable(os.fsdecode(self._repeated[0]))
            problems.append(f"{len(self._repeated)} members like {first} have the name of an earlier one: left out")
        if any(problems):
            found = "; ".join(filter(None, problems))
            self.notes.append(f"{printable(path)}: {found}; {len(self.names)} images of it are used")

    def _walk(self, file: BinaryIO) -> str | None:
        """Note the members of a tar; what is wrong with it in a few words, None if nothing is."""
        end = -1
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                while (member := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps them all
                    if archive.offset <= end or member.size < 0:
                        return f"damaged at byte {end}"
                    if member.offset_data + member.size > self.size:
                        return f"cut off in {printable(member.name)} at byte {member.offset}"
                    if member.isreg() and member.sparse is None:
                        self._note_member(file, member)
                    end = max(end, archive.offset)
                return _look_at_end(file, archive.offset)
        except (tarfile.TarError, ValueError, OverflowError, RecursionError, MemoryError, EOFError) as error:
            if end < 0 and os.pread(file.fileno(), 6, 0).startswith(_COMPRESSED):
                return "compressed: unpack it, images are read at their places"
            return f"cut off or damaged after byte {max(end, 0)} ({one_line(error)})"

    def _note_member(self, file: BinaryIO, member: tarfile.TarInfo) -> None:
        name = os.fsencode(member.name).replace(b"\0", b"?")
        lower = name.lower()
        if os.path.basename(name).startswith(b"."):
            return
        if lower.endswith(b".cls") and member.size <= _MAX_LABEL_BYTES:
            text = os.pread(file.fileno(), member.size, member.offset_data).strip()
            self._classes.setdefault(_key(name), text.replace(b"\0", b"?"))
        elif name in self.names:
            self._repeated.append(name)
        elif lower.endswith(_ENDINGS):
            self.names[name] = None
            self.offsets.append(member.offset_data)
            self.sizes.append(member.size)
        elif lower.endswith(OTHER_KINDS):
            self.others.append(name)


def index_shards(shards: Sequence[str], stored_names: Sequence[str]) -> Contents:
    """One row an image: `shard`, `offset`, `size`, names and labels; one row a shard: its name, size, time and CRC.

    A shard that is cut off or damaged gives what stands before the damage; about["notes"] says which.
    """
    names, folders, packed = Packer(), FolderLabels(), Packer()
    counts, offsets, sizes, states = array("q"), array("q"), array("q"), array("q")
    labels, numbers, notes, others = array("i"), dict[bytes | None, int](), list[str](), list[bytes]()
    bar = tqdm(total=len(shards), desc="indexing shards", unit=" shards", delay=2, leave=False, disable=None)
    with bar, ThreadPoolExecutor(_THREADS) as pool:
        for found in pool.map(_Members, shards):
            for name in found.names:
                names.add(name)
                folders.add(name.removeprefix(b"./").lstrip(b"/"))
            for label in found.labels:
                labels.append(numbers.setdefault(label, len(numbers)))
            counts.append(len(found.names))
            offsets.extend(found.offsets)
            sizes.extend(found.sizes)
            states.extend((found.size, found.time, found.crc))
            notes += found.notes
            others += found.others
            bar.update()
    for stored in stored_names:
        packed.add(os.fsencode(stored))
    arrays = {
        **names.arrays("names"),
        "shard": np.repeat(np.arange(len(shards), dtype=np.int32), np.asarray(counts)),
        "offset": np.asarray(offsets, np.int64),
        "size": np.asarray(sizes, np.int64),
        **packed.arrays("shards"),
        "shards.state": np.asarray(states, np.int64),
        **(_class_arrays(labels, numbers, shards) or folders.arrays()),
    }
    if len(notes) > _MAX_NOTES:
        notes[_MAX_NOTES:] = [f"and {len(notes) - _MAX_NOTES} more shards like these"]
    return Contents(arrays, {"notes": [*note_left_out(others), *notes]})


def shards_are_current(listing: Listing, base: str) -> bool:
    """Whether every shard, its name taken relative to `base`, is the file that was indexed."""
    shards, states = listing.texts("shards"), listing.arrays["shards.state"].reshape(-1, 3)

    def same(i: int) -> bool:
        try:
            handle = os.open(os.path.join(base, shards[i]), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return is_same_file(handle, states[i])
        finally:
            os.close(handle)

    with ThreadPoolExecutor(_THREADS) as pool:
        return all(pool.map(same, range(len(shards)), chunksize=64))


def is_same_file(handle: int, state: np.ndarray) -> bool:
    """Whether an open shard has the size and time it was indexed with; for a copy, the CRC of its two ends counts."""
    size, time, crc = state.tolist()
    now = os.fstat(handle)
    return now.st_size == size and crc >= 0 and (now.st_mtime_ns == time or _crc_of_ends(handle, size) == crc)


def index_beside(shards: Sequence[str]) -> tuple[Listing | None, str | None]:
    """The index in the shards' folder if it is of exactly these shards; a note where it should be but does not fit."""
    folders = {os.path.dirname(shard) for shard in shards}
    folder = folders.pop()
    path = Path(folder, INDEX)
    if folders or not path.is_file():
        return None, None
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        listing = Listing(path)
        if list(listing.texts("shards")) != [os.path.basename(shard) for shard in shards]:
            return None, None  # some of its shards were asked for
        if _columns_agree(listing) and shards_are_current(listing, folder):
            return listing, None
    return None, f"{path} is damaged or does not fit the shards beside it; they were indexed anew"


def _columns_agree(listing: Listing) -> bool:
    """Whether every image has a shard, a place and a class that there is: an index may come from anywhere."""
    arrays, images = listing.arrays, len(listing.texts("names"))
    columns = [arrays[name] for name in ("shard", "offset", "size")]
    ranges = [(arrays["shard"], 0, len(listing.texts("shards")))]
    if "labels" in arrays:
        columns.append(arrays["labels"])
        ranges.append((arrays["labels"], -1, len(listing.texts("classes"))))
    return all(len(column) == images for column in columns) and all(
        images == 0 or (first <= int(column.min()) and int(column.max()) < end) for column, first, end in ranges
    )


def _key(name: bytes) -> bytes:
    """WebDataset's: the path up to the first dot of the file's name."""
    folder, slash, base = name.rpartition(b"/")
    return folder + slash + base.partition(b".")[0]


def _look_at_end(file: BinaryIO, offset: int) -> str | None:
    """tarfile ends in silence at a damaged header, and where the file ends between two members."""
    block = os.pread(file.fileno(), _BLOCK, offset)
    if block == bytes(_BLOCK):
        return None
    return f"damaged at byte {offset}" if block else "ends without a tar's end mark, so it may be cut off"


def _crc_of_ends(handle: int, size: int) -> int:
    """CRC-32 of the first 4 KiB and the last 16 KiB: a header's time tells one packing from another."""
    return zlib.crc32(os.pread(handle, _TAIL, max(0, size - _TAIL)), zlib.crc32(os.pread(handle, _HEAD, 0)))


def _class_arrays(
    labels: array[int], numbers: dict[bytes | None, int], shards: Sequence[str]
) -> dict[str, np.ndarray] | None:
    """The classes in texts of .cls members, sorted as numbers if all are; names from classes.txt where it has them."""
    texts = [text for text in numbers if text is not None]
    if not texts:
        return None
    whole = all(text.isdigit() for text in texts)
    texts.sort(key=int if whole else None)
    try:
        names = Path(shards[0]).with_name(CLASSES).read_bytes().splitlines()
    except OSError:
        names = []
    called = [names[int(text)] if whole and int(text) < len(names) else text for text in texts]
    of_images = np.asarray(labels, np.int32)
    if None in numbers:
        of_images[of_images == numbers[None]] = -1
    return label_arrays([numbers[text] for text in texts], of_images, called)

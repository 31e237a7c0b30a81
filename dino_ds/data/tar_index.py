"""Where the images lie in tar files: members are found and their names noted, nothing is ever extracted.

The layout is WebDataset's: a member with an image's ending is one image; KEY.cls holds the class of KEY.jpg.
"""

from __future__ import annotations

import os
import tarfile
import zlib
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from dino_ds.data.encoded import EXTENSIONS
from dino_ds.data.labels import FolderLabels, label_arrays
from dino_ds.data.listing import Contents, Listing, Packer, printable

INDEX = "index.safetensors"
"""The index beside the shards, which `dino-ds shard` writes."""
CLASSES = "classes.txt"
"""Beside the shards: the name of class n is line n."""
_ENDINGS = tuple(os.fsencode(extension) for extension in EXTENSIONS)
_BLOCK = 512
_HEAD, _TAIL = 8 * _BLOCK, 32 * _BLOCK
_THREADS = 16
_MAX_LABEL_BYTES = 1000
_MAX_NOTES = 20


@dataclass
class _Members:
    """The images of one shard; `labels` has the text of each one's .cls or None; `notes`, what could not be read."""

    size: int = 0
    time: int = 0
    crc: int = -1
    names: list[bytes] = field(default_factory=list)
    offsets: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    labels: list[bytes | None] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def index_shards(shards: Sequence[str], stored_names: Sequence[str]) -> Contents:
    """One row an image: `shard`, `offset`, `size`, names and labels; one row a shard: its name, size, time and CRC.

    A shard that is cut off or damaged gives what stands before the damage; about["notes"] says which.
    """
    names, folders, packed = Packer(), FolderLabels(), Packer()
    counts, offsets, sizes, states = array("q"), array("q"), array("q"), array("q")
    labels, numbers, notes = array("i"), dict[bytes | None, int](), list[str]()
    bar = tqdm(total=len(shards), desc="indexing shards", unit=" shards", delay=2, leave=False, disable=None)
    with bar, ThreadPoolExecutor(_THREADS) as pool:
        for found in pool.map(_find_members, shards):
            for name in found.names:
                names.add(name)
                folders.add(_without_root(name))
            for label in found.labels:
                labels.append(numbers.setdefault(label, len(numbers)))
            counts.append(len(found.names))
            offsets.extend(found.offsets)
            sizes.extend(found.sizes)
            states.extend((found.size, found.time, found.crc))
            notes += found.notes
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
    return Contents(arrays, {"notes": notes})


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
    try:
        listing = Listing(path)
        names = list(listing.texts("shards"))
        if names != [os.path.basename(shard) for shard in shards]:
            return None, None  # some of its shards were asked for
        if not _columns_agree(listing):
            return None, f"{path} contradicts itself; the shards were indexed anew"
        if shards_are_current(listing, folder):
            return listing, None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, f"{path} is damaged or of another version; the shards were indexed anew"
    return None, f"{path} is of other shards than those that lie there now; they were indexed anew"


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


def _find_members(path: str) -> _Members:
    found = _Members()
    try:
        with open(path, "rb") as file:
            state = os.fstat(file.fileno())
            found.size, found.time = state.st_size, state.st_mtime_ns
            found.crc = _crc_of_ends(file.fileno(), found.size)
            problem = _walk(file, found)
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        found.notes.append(f"{printable(path)}: {problem}; {len(found.names)} images of it are used")
    return found


def _walk(file: BinaryIO, found: _Members) -> str | None:
    """Fill `found` from a tar; what is wrong with it in a few words, None if nothing is."""
    classes: dict[bytes, bytes] = {}
    seen: set[bytes] = set()
    twice: list[bytes] = []
    end, problem = -1, None
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while problem is None and (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps them all
                if archive.offset <= end or member.size < 0:
                    problem = f"damaged at byte {end}"
                elif member.offset_data + member.size > found.size:
                    problem = f"cut off in {printable(member.name)} at byte {member.offset}"
                elif member.isreg() and member.sparse is None:
                    _note_member(file, member, found, classes, seen, twice)
                end = max(end, archive.offset)
            problem = problem or _look_at_end(file, archive.offset)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, MemoryError, EOFError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        problem = f"cut off or damaged after byte {max(end, 0)} ({text})"
        if end < 0 and _is_compressed(file):
            problem = "compressed: unpack it, images are read at their places"
    found.labels = [classes.get(_key(name)) for name in found.names]
    if twice:
        again = f"{len(twice)} members have the name of an earlier one and are left out: {_show(twice)}"
        problem = f"{problem}; {again}" if problem else again
    return problem


def _note_member(
    file: BinaryIO,
    member: tarfile.TarInfo,
    found: _Members,
    classes: dict[bytes, bytes],
    seen: set[bytes],
    twice: list[bytes],
) -> None:
    name = os.fsencode(member.name).replace(b"\0", b"?")
    lower = name.lower()
    if os.path.basename(name).startswith(b"."):
        return
    if lower.endswith(b".cls") and member.size <= _MAX_LABEL_BYTES:
        text = os.pread(file.fileno(), member.size, member.offset_data).strip()
        classes.setdefault(_key(name), text.replace(b"\0", b"?"))
    elif lower.endswith(_ENDINGS):
        if name in seen:
            twice.append(name)
            return
        seen.add(name)
        found.names.append(name)
        found.offsets.append(member.offset_data)
        found.sizes.append(member.size)


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


def _is_compressed(file: BinaryIO) -> bool:
    return os.pread(file.fileno(), 6, 0).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"))


def _crc_of_ends(handle: int, size: int) -> int:
    """CRC-32 of the first 4 KiB and the last 16 KiB: a header's time tells one packing from another."""
    return zlib.crc32(os.pread(handle, _TAIL, max(0, size - _TAIL)), zlib.crc32(os.pread(handle, _HEAD, 0)))


def _class_arrays(
    labels: array[int], numbers: dict[bytes | None, int], shards: Sequence[str]
) -> dict[str, np.ndarray] | None:
    """From the texts of .cls members: sorted as numbers if all are; names from classes.txt where it has them."""
    texts = [text for text in numbers if text is not None]
    if not texts:
        return None
    whole = all(text.isdigit() for text in texts)
    texts.sort(key=int if whole else None)
    names = _class_names(shards[0])
    called = [names[int(text)] if whole and int(text) < len(names) else text for text in texts]
    of_images = np.asarray(labels, np.int32)
    if None in numbers:
        of_images[of_images == numbers[None]] = -1
    return label_arrays([numbers[text] for text in texts], of_images, called)


def _class_names(shard: str) -> list[bytes]:
    try:
        return Path(shard).with_name(CLASSES).read_bytes().splitlines()
    except OSError:
        return []


def _without_root(name: bytes) -> bytes:
    return name.removeprefix(b"./").lstrip(b"/")


def _show(names: list[bytes]) -> str:
    shown = ", ".join(printable(os.fsdecode(name)) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} ..."

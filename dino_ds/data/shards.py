"""Map-style tar shards: one read gets any image by its index, so that ranks share them and resume as with a folder."""

from __future__ import annotations

import functools
import io
import os
from array import array
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from tqdm import tqdm

from dino_ds.basics.files import MAX_JSON_BYTES, MAX_LINES_BYTES, is_url, read_bytes
from dino_ds.data import decode, remote_request
from dino_ds.data.encoded import MAX_BYTES, ListedImages, archive_key, size_and_time
from dino_ds.data.images import UnreadableImage
from dino_ds.data.listing import (
    Contents,
    FolderLabels,
    Listing,
    Packer,
    join_classes,
    label_arrays,
    note_unnamed,
    printable,
)
from dino_ds.data.remote import FilePiece, Remote, find_states, known_states, open_remote, remote_with_room
from dino_ds.data.tar_members import IndexedMembers, Members
from dino_ds.errors import DataError, one_line

CLASSES, INDEX = "classes.txt", "index.jsonl"
"""Files beside the shards: line n of the first names class n; a line of the second replaces reading a shard."""
_THREADS = 16
_MOST_KINDS = 8  # most kinds of images per key; if there are more, file names merely contain dots
_MAX_NOTES = 20


class TarShards(ListedImages):
    """The images of tar files, shard after shard, members in the order of the file.

    The index is kept in the cache, and used while the shards' sizes and times are unchanged. `notes` names members that
    can't be read. Raises DataError if there are no images.

    Args:
        shards: paths of the files, or addresses.
        kind: ending of the images to take, such as input.png for KEY.input.png; None for all.
        cache_gib: disk space for images of remote shards.
    """

    def __init__(self, shards: list[str], kind: str | None = None, cache_gib: float = 0.0) -> None:
        self.elsewhere = is_url(shards[0])
        shards = shards if self.elsewhere else [os.path.abspath(shard) for shard in shards]
        index, unread = None, list[str]()
        if self.elsewhere and kind is None:
            url = f"{os.path.dirname(shards[0])}/{INDEX}"
            try:
                state = known_states([url]).get(url)
                index = None if state is None else FilePiece(url, *state)
            except remote_request.Refusal as error:
                unread = [f"{error}; the shards are read in place of it"]
        build = functools.partial(_index, shards, kind, index)
        names = [] if self.elsewhere else map(_names_in, dict.fromkeys(map(os.path.dirname, shards)))
        key = "\n".join((*shards, *decode.EXTENSIONS, kind or "", *map(str, index or names)))
        super().__init__("shards", key, build, _is_current)
        self.notes += unread
        if not len(self):
            where = shards[0] if len(shards) == 1 else f"{len(shards)} shards, {shards[0]} ..."
            raise DataError("; ".join([f"no images in {printable(where)}", *self.notes[:3]]) + "; fix data.root")
        if self.elsewhere:
            states = self._states.tolist()
            self._remote, note = remote_with_room(shards, states, int(self._size.sum()), cache_gib)
            self.notes += note

    def _open(self, listing: Listing) -> None:
        super()._open(listing)
        self._shards, self._states = listing.texts("shards"), listing.arrays["shards.state"].reshape(-1, 2)
        self._shard, self._offset, self._size = (listing.arrays[key] for key in ("shard", "offset", "size"))
        self._checksum = listing.arrays.get("checksum")

    def read(self, index: int) -> bytes:
        shard, size = int(self._shard[index]), self.file_bytes(index)
        if not size:
            raise UnreadableImage(self.name(index), "empty file")
        if size > MAX_BYTES:
            raise UnreadableImage(self.name(index), f"{size} bytes, {MAX_BYTES} are allowed")
        if self.elsewhere:
            return self._remote.read(self._piece(index))
        try:
            file = _open_shard(self._shards[shard], *self._states[shard].tolist())
            data = os.pread(file.fileno(), size, int(self._offset[index]))
            if size_and_time(os.fstat(file.fileno())) != self._states[shard].tolist():
                raise OSError("changed since it was indexed")
            return data
        except OSError as error:
            raise UnreadableImage(self.name(index), f"shard: {error.strerror or error}") from None

    def prepare(self, indices: Sequence[int], seconds: float | None = None) -> None:
        """Begin to fetch the images of remote shards that will be read next."""
        few = [index for index in indices if 0 < self.file_bytes(index) <= MAX_BYTES]
        self._remote.prepare(map(self._piece, few), seconds)

    def _piece(self, index: int) -> FilePiece:
        shard = int(self._shard[index])
        size, tag = self._states[shard].tolist()
        checksum = -1 if self._checksum is None else int(self._checksum[index])
        return FilePiece(self._shards[shard], size, tag, int(self._offset[index]), self.file_bytes(index), checksum)

    def file_keys(self) -> np.ndarray:
        return np.array(list(map(archive_key, self._shards)), np.uint64)[self._shard] + self._offset.view(np.uint64)

    def name(self, index: int) -> str:
        return printable(f"{self._shards[int(self._shard[index])]}/{self._names[index]}")

    def file_bytes(self, index: int) -> int:
        return int(self._size[index])

    def file_time(self, index: int) -> int:
        """Nanoseconds of the shard's last change, or its remote tag, when indexed: changed shards are not read."""
        return int(self._states[int(self._shard[index])][1])


@functools.lru_cache(maxsize=128)
def _open_shard(path: str, size: int, time: int) -> io.FileIO:
    """Open a shard, for threads and forked processes: each read passes its own position. Raises OSError."""
    return io.FileIO(path)


def _read_index(index: FilePiece) -> dict[str, IndexedMembers]:
    """Read an index: its shards by their addresses. Raises DataError."""
    known = dict[str, IndexedMembers]()
    try:
        if not 0 < index.size < MAX_LINES_BYTES:
            raise ValueError("no lines, or more than can be kept")
        with open_remote(Remote(), index.url, [index.size, index.tag]) as lines:
            while line := lines.readline(MAX_JSON_BYTES):
                shard = IndexedMembers(line, printable(index.url))
                known[f"{os.path.dirname(index.url)}/{shard.name}"] = shard
        return known
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        remedy = "copy it there again from the folder of dino-ds shard, or remove it"
        raise DataError(f"{printable(index.url)} is damaged: {remedy}") from None


def _index(shards: Sequence[str], kind: str | None, index: FilePiece | None) -> Contents:
    """Build the index, with rows for images (`shard`, `offset`, `size`, name, label) and shards (name, size, time). Of
    a damaged shard it has the images before the damage, and a note; unchanged remote shards in `index` are not read."""
    known = _read_index(index) if index else {}
    states = dict(zip(shards, find_states(shards), strict=True)) if is_url(shards[0]) else {}
    changed = list[str]()

    def find_members(shard: str) -> Members:
        line = known.get(shard)
        if line and line.is_of(shard, states[shard]):
            line.time = states[shard][1] or line.time
            return line
        changed.extend([shard] if line else [])
        return Members(shard, kind, states.get(shard))

    names, folders, packed = Packer(), FolderLabels(), Packer()
    counts, spans, checksums, facts = array("q"), array("q"), array("q"), array("q")
    classes, notes, others, kinds = _Classes(), list[str](), list[bytes](), Counter[bytes]()
    bar = tqdm(total=len(shards), desc="indexing shards", unit=" shards", delay=2, leave=False, disable=None)
    with bar, ThreadPoolExecutor(_THREADS) as pool:
        for path, members in zip(shards, pool.map(find_members, shards), strict=True):
            packed.add(os.fsencode(path))
            for name, span in members.images.items():
                names.add(name)
                folders.add(name.removeprefix(b"./").lstrip(b"/"))
                spans.extend(span)
            checksums.extend(members.checksums or [-1] * len(members.images))
            classes.add(os.path.dirname(path), members.labels())
            counts.append(len(members.images))
            facts.extend((members.size, members.time))
            kinds += members.kinds()
            others += members.others
            if problem := "; ".join(filter(None, members.problems)):
                notes.append(f"{printable(path)}: {problem}; {len(members.images)} images of it are used")
            bar.update()
    if changed:
        some = f"{len(changed)} of {len(shards)} shards, such as {printable(min(changed))}"
        notes.append(f"{INDEX} is not of {some}, which are read in place of it: copy there the one made with them")
    if len(notes) > _MAX_NOTES:
        notes[_MAX_NOTES:] = [f"{len(notes) - _MAX_NOTES} more shards like these"]
    named = classes.arrays()
    arrays = {
        **names.arrays("names"),
        **packed.arrays("shards"),
        **(folders.arrays() if named is None else named),
        "shard": np.repeat(np.arange(len(shards), dtype=np.int32), np.frombuffer(counts, np.int64)),
        "offset": np.frombuffer(spans, np.int64)[::2],
        "size": np.frombuffer(spans, np.int64)[1::2],
        "shards.state": np.frombuffer(facts, np.int64),
        **({"checksum": np.frombuffer(checksums, np.int64)} if known else {}),
    }
    return Contents(arrays, {"notes": [*decode.note_left_out(others), *_note_kinds(kinds), *classes.notes, *notes]})


def _note_kinds(kinds: Counter[bytes]) -> list[str]:
    """Note that keys have several images, unless file names merely contain dots."""
    if not 1 < len(kinds) <= _MOST_KINDS or max(kinds.values()) < 2:
        return []
    names = sorted(printable(os.fsdecode(kind)) for kind in kinds)
    some = ", ".join(f"{printable(os.fsdecode(kind))} of {count}" for kind, count in sorted(kinds.items()))
    note = f"several images have the same key ({some}), and all of them are images of the set, masks too"
    return [f"{note}: FILE.tar:{names[0]} takes one kind"]


class _Classes:
    """Collects the classes that tar members name, matched by name: in a folder with a classes.txt a number stands for
    the name in that line."""

    def __init__(self) -> None:
        self.notes = list[str]()
        self._labels, self._numbers = array("i"), dict[tuple[int, bytes] | None, int]()
        self._lists, self._list_of = dict[tuple[bytes, ...], int](), dict[str, int]()
        """Number of each distinct list of names in a classes.txt, () without one; and the number of a folder's list."""

    def add(self, folder: str, texts: list[bytes | None]) -> None:
        if folder not in self._list_of and any(text is not None for text in texts):
            names, notes = _names_in(folder)
            self._list_of[folder] = self._lists.setdefault(names, len(self._lists))
            self.notes += notes
        for text in texts:
            known_as = None if text is None else (self._list_of[folder], text)
            self._labels.append(self._numbers.setdefault(known_as, len(self._numbers)))

    def arrays(self) -> dict[str, np.ndarray] | None:
        """Arrays of a Listing, None without classes. The classes of one list of names are sorted, as numbers if all
        are numbers. Raises DataError for numbers without names beside others with names."""
        texts, called = list[list[bytes]](), list[list[str]]()
        for names, number in self._lists.items():
            some = [text for of, text in filter(None, self._numbers) if of == number]
            whole = all(map(bytes.isdigit, some))
            if whole and not names:
                folders = [printable(folder) for folder, of in self._list_of.items() if of == number]
                if len(self._lists) > 1:
                    problem = f"the classes of the shards in {folders[0]} are numbers without names"
                    remedy = f"names in {CLASSES}: write one there, or give the folders as parts of data.mixture"
                    raise DataError(f"{problem}, and other folders have {remedy}")
                self.notes += note_unnamed(folders)
            some.sort(key=int if whole else None)
            named = [names[int(text)] if whole and int(text) < len(names) else text for text in some]
            texts, called = [*texts, some], [*called, list(map(os.fsdecode, named))]
        if not texts:
            return None
        classes, joined = join_classes(called)
        renumbered = np.full(len(self._numbers), -1, np.int32)
        for number, some in enumerate(texts):
            renumbered[[self._numbers[number, text] for text in some]] = joined[number][:-1]
        of_images = renumbered[np.asarray(self._labels, np.int32)]
        return label_arrays(list(range(len(classes))), of_images, list(map(os.fsencode, classes)))


def _names_in(folder: str) -> tuple[tuple[bytes, ...], list[str]]:
    """The lines of classes.txt in a folder, line n for class n, () without one; and a note if it can't be read."""
    path = os.path.join(folder, CLASSES)
    try:
        text = Remote().read(FilePiece(path)) if is_url(path) else read_bytes(path, MAX_JSON_BYTES)
        return tuple(text.splitlines()), []
    except FileNotFoundError:
        return (), []
    except (OSError, ValueError, remote_request.Refusal) as error:
        return (), [f"classes are numbers, without names: {CLASSES} can't be read: {one_line(error)}"]


def _is_current(listing: Listing) -> bool:
    """Whether no shard has changed since it was indexed; a remote shard without a tag counts as changed."""
    shards, states = listing.texts("shards"), listing.arrays["shards.state"].reshape(-1, 2)
    if is_url(shards[0]):
        now = find_states([*shards])
        return now == states.tolist() and all(tag for _, tag in now)

    def same(shard: str, state: np.ndarray) -> bool:
        with suppress(OSError):
            return size_and_time(os.stat(shard)) == state.tolist()
        return False

    with ThreadPoolExecutor(_THREADS) as pool:
        return all(pool.map(same, shards, states))

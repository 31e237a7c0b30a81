"""Describes a set of images in a few kilobytes: enough to say what has changed when work on them is continued.

Whatever continues (a run, an embedding) compares the description that it was begun with, and says or refuses the rest.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import heapq
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dino_ds.data.base import Joined, Source, prepare_images
from dino_ds.data.draws import draws_in
from dino_ds.data.images import evenly_spaced_indices

_SAMPLE = 1024
_READ = 64
"""Images whose content is hashed: as many as a small batch reads, and enough to meet one in twenty that is another."""
_NO_SIZE = -1
_THREADS, _CHUNK = 16, 1024


@dataclass(frozen=True)
class ImageSet:
    """Number of images, a hash of all `names` in their order, a `sample`: hash of a name -> bytes of its file, and
    `contents`: hash of a name -> hash of its file's content.

    The sample has the 1,024 smallest hashes and the contents the 64 smallest, so that two sets sample the same names:
    sets of up to 1,024 images are compared whole, larger ones by a part that is the same every time. A source without
    `read`, and a description that an earlier version has written, have no contents. `parts`: descriptions of the
    sources of a mixture, by their places; `groups`: a hash of the class or cluster of each image where they are
    balanced; `lines`: the hash of the names as a list has them, which earlier versions took, where it is another one.
    """

    count: int
    names: str
    sample: dict[int, int]
    contents: dict[int, int] = field(default_factory=dict)
    parts: dict[str, ImageSet] = field(default_factory=dict)
    groups: str = ""
    lines: str = ""

    @staticmethod
    def of(source: Source, root: str | None) -> ImageSet:
        """The description of a source; names count as they are below `root`, which may move."""
        order, lines = (hashlib.blake2b(digest_size=16) for _ in range(2))
        is_list = hasattr(source, "listed_place")

        def hashes() -> Iterator[tuple[int, int]]:
            for index in range(len(source)):
                digest = hashlib.blake2b(name_of(source, index, root), digest_size=8).digest()
                order.update(digest)
                if is_list:
                    line = name_of(source, index, root, as_listed=True)
                    lines.update(hashlib.blake2b(line, digest_size=8).digest())
                yield int.from_bytes(digest, "little"), index

        chosen = heapq.nsmallest(_SAMPLE, hashes())
        sizes = {value: _size(source, index) for value, index in chosen}
        joined = source.joined if isinstance(source, Joined) else ()
        parts = {part.place: ImageSet.of(part.source, None) for part in joined}
        draws = draws_in(source)
        groups = "" if draws is None else draws.digest
        found = _contents(source, chosen[:_READ])
        names, listed = order.hexdigest(), lines.hexdigest() if is_list else ""
        return ImageSet(len(source), names, sizes, found, parts, groups, listed if listed != names else "")

    def to_json(self) -> dict[str, Any]:
        sample, contents = _packed("<Qq", self.sample), _packed("<QQ", self.contents)
        plain = {"count": self.count, "names": self.names, "sample": sample, "contents": contents}
        parts = {place: part.to_json() for place, part in self.parts.items()}
        return plain | ({"parts": parts} if parts else {}) | ({"groups": self.groups} if self.groups else {})

    @staticmethod
    def from_json(saved: Mapping[str, Any] | None) -> ImageSet | None:
        """The description that `to_json` has made, or None for anything else."""
        try:
            assert saved is not None
            sample, contents = _unpacked("<Qq", saved["sample"]), _unpacked("<QQ", saved.get("contents", ""))
            parts = {str(place): ImageSet.from_json(part) for place, part in saved.get("parts", {}).items()}
            known = {place: part for place, part in parts.items() if part is not None}
            groups = str(saved.get("groups", ""))
            found = ImageSet(int(saved["count"]), str(saved["names"]), sample, contents, known, groups)
            return found if found.count > 0 else None
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError, struct.error, binascii.Error):
            return None

    def changes(self, now: ImageSet) -> str:
        """Differences of `now`, such as "64 -> 96 images: 40 added, 8 removed, 0 of another size"; "" for none.

        Those of a mixture are named by source where its places have stayed.
        """
        if self.parts and self.parts.keys() == now.parts.keys():
            changed = ((place, part.changes(now.parts[place])) for place, part in self.parts.items())
            found = [f"{place}: {change}" for place, change in changed if change]
        else:
            found = [change for change in [self._changes(now)] if change]
        if not found and self.groups and now.groups and self.groups != now.groups:
            found = [f"{now.count} images as before: some are of another class or cluster"]
        return "; ".join(found)

    def _changes(self, now: ImageSet) -> str:
        if self.count == now.count and now.lines == self.names:  # described by an earlier version
            return ""
        counts = f"{self.count} -> {now.count} images" if self.count != now.count else f"{now.count} images as before"
        # Beyond the largest hash of a full sample nothing is known of that set.
        last = min(max(one.sample, default=0) if one.count > _SAMPLE else 2**64 for one in (self, now))
        before, after = ({value: size for value, size in one.sample.items() if value <= last} for one in (self, now))
        both = before.keys() & after.keys()
        added, removed = len(after) - len(both), len(before) - len(both)
        same_size = {value for value in both if before[value] == after[value]}
        read = same_size & self.contents.keys() & now.contents.keys()
        rewritten = sum(self.contents[value] != now.contents[value] for value in read)
        compared = len(before.keys() | after.keys())
        whole = len(self.sample) == self.count and len(now.sample) == now.count
        if not added + removed + len(both - same_size) + rewritten:
            if self.names == now.names:
                return ""
            if whole:
                return f"{counts}: the same names in another order"
        part = "" if whole else f"of {compared} that were compared "
        other = f", {rewritten} of {len(read)} that were read of other content" if rewritten else ""
        return f"{counts}: {part}{added} added, {removed} removed, {len(both - same_size)} of another size{other}"


def digest_of(source: Source, indices: Sequence[int]) -> str:
    """A digest of some images of a source: all names and classes, sizes of 1,024 files and contents of 64, evenly
    spread. Work on other images has another one."""
    found, labels, classes = hashlib.blake2b(digest_size=16), source.labels, source.classes or []
    for index in indices:
        label = -1 if labels is None else int(labels[index])
        found.update(b"%s\0%s\0" % (name_of(source, index, None), classes[label].encode() if label >= 0 else b""))
    for index in (indices[i] for i in evenly_spaced_indices(len(indices), _SAMPLE)):
        found.update(b"%d " % _size(source, index))
    read = [indices[i] for i in evenly_spaced_indices(len(indices), _READ)]
    found.update(repr(_contents(source, list(enumerate(read)))).encode())
    return found.hexdigest()


def facts_of_images(source: Source) -> dict[str, Any]:
    """Facts of a source when work on all its images begins, as JSON; `changed_images` compares it with that of a later
    start."""
    return {"images": ImageSet.of(source, None).to_json(), "times": times_of_files(source)}


def changed_images(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Differences between the `facts_of_images` of two starts, in words; "" for none, None where those of `before`
    are not known."""
    old, new = ImageSet.from_json(before.get("images")), ImageSet.from_json(now["images"])
    if old is None or new is None:
        return None
    changes = old.changes(new)
    if not changes and before.get("times") != now["times"]:
        return f"{new.count} images of the same names, whose files have other sizes or times"
    return changes


def times_of_files(source: Source) -> str | None:
    """A hash of the size and the time of the file of every image, or None for a source that does not tell them."""
    file_time = getattr(source, "file_time", None)
    if file_time is None:
        return None

    def described(first: int) -> bytes:
        places = range(first, min(first + _CHUNK, len(source)))
        return b"".join(struct.pack("<qq", _size(source, i), _known(file_time, i)) for i in places)

    found = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(_THREADS) as pool:  # a network file system answers many at once
        for part in pool.map(described, range(0, len(source), _CHUNK)):
            found.update(part)
    return found.hexdigest()


def _packed(form: str, values: Mapping[int, int]) -> str:
    return base64.b64encode(b"".join(struct.pack(form, *pair) for pair in values.items())).decode()


def _unpacked(form: str, text: str) -> dict[int, int]:
    return dict(struct.iter_unpack(form, base64.b64decode(text, validate=True)))


def _contents(source: Source, chosen: list[tuple[int, int]]) -> dict[int, int]:
    """Hash of a name -> hash of what its file holds, for those of (hash, index) that can be read."""
    read, found = getattr(source, "read", None), dict[int, int]()
    if read is None:
        return found
    prepare_images(source, [index for _, index in chosen])
    for value, index in sorted(chosen, key=lambda pair: pair[1]):  # neighbors lie in one row group of a Parquet file
        try:
            found[value] = int.from_bytes(hashlib.blake2b(read(index), digest_size=8).digest(), "little")
        except Exception:  # a source of the user's may raise anything: training says what, of which image
            continue
    return dict(sorted(found.items()))


def name_of(source: Source, index: int, root: str | None, as_listed: bool = False) -> bytes:
    """The name that identifies an image of a source, as it is below `root`; of a list that of its place, or the line
    `as_listed`."""
    if not as_listed and (place := getattr(source, "listed_place", None)):
        name: str = place(index)
    elif member := getattr(source, "member", None):
        name = member(index)
    else:
        name = source.name(index).removeprefix(str(Path(root)) if root else "")
    return name.encode(errors="surrogatepass")


def _size(source: Source, index: int) -> int:
    return _known(getattr(source, "file_bytes", None), index)


def _known(ask: Callable[[int], int] | None, index: int) -> int:
    try:
        return int(ask(index)) if ask else _NO_SIZE
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return _NO_SIZE

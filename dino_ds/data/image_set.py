"""Describes a set of images in a few kilobytes, from which a later start tells which images have changed."""

from __future__ import annotations

import base64
import hashlib
import heapq
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dino_ds.basics.files import FORMAT
from dino_ds.data.images import Joined, Source, evenly_spaced_indices, prepare_images
from dino_ds.data.mixture import draws_in
from dino_ds.errors import DataError

_SAMPLE = 1024
_READ = 64  # images whose content is hashed: a small batch, and enough to notice if one in twenty has changed


@dataclass(frozen=True)
class ImageSet:
    """Description of a set of images.
    Samples take the smallest hashes, 1,024 for sizes and 64 for contents, so that two sets sample the same names: sets
    of up to 1,024 images are compared whole, larger ones by the same part every time."""

    count: int
    names: str  # hash of all names in their order
    sample: dict[int, int]  # file size by hash of the name
    contents: dict[int, int] = field(default_factory=dict)
    """Hash of the file by hash of the name; empty for a source without `read`."""
    parts: dict[str, ImageSet] = field(default_factory=dict)  # descriptions of the sources of a mixture, by path
    groups: str = ""  # hash of the class or cluster of each image, if these are balanced

    @staticmethod
    def of(source: Source, root: str | None) -> ImageSet:
        """Describe a source by names relative to `root`, so that the folder may move."""
        order = hashlib.blake2b(digest_size=16)

        def hashes() -> Iterator[tuple[int, int]]:
            for index in range(len(source)):
                digest = hashlib.blake2b(name_of(source, index, root), digest_size=8).digest()
                order.update(digest)
                yield int.from_bytes(digest, "little"), index

        chosen = heapq.nsmallest(_SAMPLE, hashes())
        sizes = {value: _size(source, index) for value, index in chosen}
        joined = source.joined if isinstance(source, Joined) else ()
        parts = {path: ImageSet.of(part, None) for path, part in joined}
        groups = "" if (draws := draws_in(source)) is None else draws.digest
        return ImageSet(len(source), order.hexdigest(), sizes, _contents(source, chosen[:_READ]), parts, groups)

    def to_json(self) -> dict[str, Any]:
        sample, contents = _packed("<Qq", self.sample), _packed("<QQ", self.contents)
        plain = {"count": self.count, "names": self.names, "sample": sample, "contents": contents}
        parts = {path: part.to_json() for path, part in self.parts.items()}
        return plain | ({"parts": parts} if parts else {}) | ({"groups": self.groups} if self.groups else {})

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> ImageSet:
        """Description from the values of `to_json`. Raises DataError for anything else."""
        try:
            sample, contents = _unpacked("<Qq", saved["sample"]), _unpacked("<QQ", saved["contents"])
            parts = {str(path): ImageSet.from_json(part) for path, part in saved.get("parts", {}).items()}
            count, groups = int(saved["count"]), str(saved.get("groups", ""))
            return ImageSet(count, str(saved["names"]), sample, contents, parts, groups)
        except (AttributeError, KeyError, TypeError, ValueError, struct.error) as error:
            problem = f"a description of images can't be used ({error!r})"
            raise DataError(f"{problem}: make what it describes again") from None

    def changes(self, now: ImageSet) -> str:
        """Differences of `now`, such as "64 -> 96 images: 40 added, 8 removed, 0 of another size"; "" for none. Those
        of a mixture are named by source if its paths are unchanged."""
        words = self._changes(now)
        if self.parts and self.parts.keys() == now.parts.keys():
            changed = ((path, part.changes(now.parts[path])) for path, part in self.parts.items())
            words = "; ".join(f"{path}: {change}" for path, change in changed if change)
        if not words and self.groups and now.groups and self.groups != now.groups:
            return f"{now.count} images as before: some are of another class or cluster"
        return words

    def _changes(self, now: ImageSet) -> str:
        counts = f"{self.count} -> {now.count} images" if self.count != now.count else f"{now.count} images as before"
        # Nothing is known of a set beyond the largest hash of its full sample.
        last = min(max(s.sample, default=0) if s.count > _SAMPLE else 2**64 for s in (self, now))
        before, after = ({value: size for value, size in s.sample.items() if value <= last} for s in (self, now))
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
    """Digest of some images of a source: all names and classes, and 1,024 sizes and 64 contents, evenly spread."""
    digest, labels, classes = hashlib.blake2b(digest_size=16), source.labels, source.classes or []
    for index in indices:
        label = -1 if labels is None else int(labels[index])
        digest.update(b"%s\0%s\0" % (name_of(source, index, None), classes[label].encode() if label >= 0 else b""))
    for index in (indices[i] for i in evenly_spaced_indices(len(indices), _SAMPLE)):
        digest.update(b"%d " % _size(source, index))
    read = [indices[i] for i in evenly_spaced_indices(len(indices), _READ)]
    digest.update(repr(_contents(source, list(enumerate(read)))).encode())
    return digest.hexdigest()


def facts_of_images(source: Source) -> dict[str, Any]:
    """Facts of a source as JSON, which `changed_images` compares between the starts of a command: a description of its
    images, and a hash of the sizes and times of all files, None for a source without them."""
    images, file_time = ImageSet.of(source, None).to_json(), getattr(source, "file_time", None)
    digest = hashlib.blake2b(digest_size=16)

    def described(first: int) -> bytes:
        indices = range(first, min(first + 1024, len(source)))
        return b"".join(struct.pack("<qq", _size(source, i), _known(file_time, i)) for i in indices)

    with ThreadPoolExecutor(16) as pool:  # a network file system answers many at once
        for part in pool.map(described, range(0, len(source) if file_time else 0, 1024)):
            digest.update(part)
    return {"format": FORMAT, "images": images, "times": digest.hexdigest() if file_time else None}


def changed_images(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Differences between the `facts_of_images` of two starts, in words; "" for none. Raises DataError."""
    old, new = (ImageSet.from_json(facts.get("images", {})) for facts in (before, now))
    changes = old.changes(new)
    if not changes and before.get("times") != now["times"]:
        return f"{new.count} images of the same names, whose files have other sizes or times"
    return changes


def _packed(form: str, values: Mapping[int, int]) -> str:
    return base64.b64encode(b"".join(struct.pack(form, *pair) for pair in values.items())).decode()


def _unpacked(form: str, text: str) -> dict[int, int]:
    return dict(struct.iter_unpack(form, base64.b64decode(text, validate=True)))


def _contents(source: Source, chosen: list[tuple[int, int]]) -> dict[int, int]:
    """Hash of the file by hash of the name, for those (hash, index) pairs that can be read."""
    contents = dict[int, int]()
    if (read := getattr(source, "read", None)) is None:
        return contents
    prepare_images(source, [index for _, index in chosen])
    for value, index in sorted(chosen, key=lambda pair: pair[1]):  # neighbors lie in one row group of a Parquet file
        with suppress(Exception):  # a user's source may raise anything: training reports it with the image's name
            contents[value] = int.from_bytes(hashlib.blake2b(read(index), digest_size=8).digest(), "little")
    return dict(sorted(contents.items()))


def name_of(source: Source, index: int, root: str | None) -> bytes:
    """Name below `root` that identifies an image of a source; for an image of a list file, its canonical path."""
    if listed_path := getattr(source, "listed_place", None):
        name: str = listed_path(index)
    elif member := getattr(source, "member", None):
        name = member(index)
    else:
        name = source.name(index).removeprefix(str(Path(root)) if root else "")
    return name.encode(errors="surrogatepass")


def _size(source: Source, index: int) -> int:
    return _known(getattr(source, "file_bytes", None), index)


def _known(ask: Callable[[int], int] | None, index: int) -> int:
    with suppress(OSError, ValueError):  # ValueError: a NUL in the path
        return int(ask(index)) if ask else -1
    return -1

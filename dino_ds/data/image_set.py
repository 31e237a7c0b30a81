"""Which images a run is trained on, in a few kilobytes: enough to say on a resume what has changed since."""

from __future__ import annotations

import base64
import binascii
import hashlib
import heapq
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dino_ds.data.base import Source

_SAMPLE = 1024
_NO_SIZE = -1


@dataclass(frozen=True)
class ImageSet:
    """Number of images, a hash of all `names` in their order, and a `sample`: hash of a name -> bytes of its file.

    The sample has the 1,024 smallest hashes, so that two sets sample the same names: sets of up to 1,024 images are
    compared whole, larger ones by a part that is the same every time.
    """

    count: int
    names: str
    sample: dict[int, int]

    @staticmethod
    def of(source: Source, root: str | None) -> ImageSet:
        """Of a source; names count as they are below `root`, which may move."""
        order = hashlib.blake2b(digest_size=16)

        def hashes() -> Iterator[tuple[int, int]]:
            for index in range(len(source)):
                digest = hashlib.blake2b(_name(source, index, root), digest_size=8).digest()
                order.update(digest)
                yield int.from_bytes(digest, "little"), index

        chosen = heapq.nsmallest(_SAMPLE, hashes())
        return ImageSet(len(source), order.hexdigest(), {value: _size(source, index) for value, index in chosen})

    def to_json(self) -> dict[str, Any]:
        packed = b"".join(struct.pack("<Qq", value, size) for value, size in self.sample.items())
        return {"count": self.count, "names": self.names, "sample": base64.b64encode(packed).decode()}

    @staticmethod
    def from_json(saved: dict[str, Any] | None) -> ImageSet | None:
        """None for what no `to_json` has made."""
        try:
            assert saved is not None
            sample = dict(struct.iter_unpack("<Qq", base64.b64decode(saved["sample"], validate=True)))
            found = ImageSet(int(saved["count"]), str(saved["names"]), sample)
            return found if found.count > 0 else None
        except (AssertionError, KeyError, TypeError, ValueError, struct.error, binascii.Error):
            return None

    def changes(self, now: ImageSet) -> str:
        """What differs in `now`: "64 -> 96 images: 40 added, 8 removed, 0 of another size"; "" if nothing."""
        if self == now:
            return ""
        counts = f"{self.count} -> {now.count} images" if self.count != now.count else f"{now.count} images as before"
        # Beyond the largest hash of a full sample nothing is known of that set.
        last = min(max(one.sample, default=0) if one.count > _SAMPLE else 2**64 for one in (self, now))
        before, after = ({value: size for value, size in one.sample.items() if value <= last} for one in (self, now))
        both = before.keys() & after.keys()
        added, removed = len(after) - len(both), len(before) - len(both)
        resized = sum(before[value] != after[value] for value in both)
        compared = len(before.keys() | after.keys())
        whole = len(self.sample) == self.count and len(now.sample) == now.count
        if whole and not added + removed + resized:
            return f"{counts}: the same names in another order"
        part = "" if whole else f"of {compared} that were compared "
        return f"{counts}: {part}{added} added, {removed} removed, {resized} of another size"


def _name(source: Source, index: int, root: str | None) -> bytes:
    if member := getattr(source, "member", None):
        name: str = member(index)
    else:
        name = source.name(index).removeprefix(str(Path(root)) if root else "")
    return name.encode(errors="surrogatepass")


def _size(source: Source, index: int) -> int:
    file_bytes = getattr(source, "file_bytes", None)
    try:
        return int(file_bytes(index)) if file_bytes else _NO_SIZE
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return _NO_SIZE

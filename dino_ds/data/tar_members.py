"""The images in one tar file: members are found and their names noted, nothing is ever extracted.

The layout is WebDataset's: a member with an image's ending is one image; KEY.cls or KEY.json has the class of KEY.jpg.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections import Counter
from typing import BinaryIO

from dino_ds.data.base import what_else_it_is
from dino_ds.data.formats import EXTENSIONS, is_left_out
from dino_ds.data.listing import LABEL_NAMES, is_hidden, printable
from dino_ds.data.remote import Remote, open_remote
from dino_ds.errors import one_line

_ENDINGS = tuple(os.fsencode(extension) for extension in EXTENSIONS)
_BLOCK = 512
_ZEROS, _MOST_ZEROS = 1 << 20, 64
"""Bytes that are looked at together for an archive after the end mark of another, and how often."""
_MAX_LABEL_BYTES, _MAX_JSON_BYTES = 1000, 1 << 16
_JSON_LOOKED_AT = 20
"""JSON members of a shard, of which one must name a class for the others to be read."""
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""The first bytes of files of gzip, bzip2, xz and zstd."""


class Members:
    """The images of one shard in their order, each with its place (offset, size) and its class.

    `problems` says what could not be read, `others` names files of other kinds, unless an image of the same key is
    beside them. state: size and tag of a shard that is elsewhere.
    """

    def __init__(self, path: str, kind: str | None, state: list[int] | None = None) -> None:
        self.size, self.time = -1, 0
        self.images, self.others = dict[bytes, tuple[int, int]](), list[bytes]()
        self._kind = kind and os.fsencode(kind)
        self._classes, self._jsons = dict[bytes, bytes](), dict[bytes, tuple[int, int]]()
        self._repeated, self._special, self._texts = list[bytes](), list[bytes](), list[bytes]()
        try:
            with open(path, "rb") if state is None else open_remote(Remote(), path, state) as file:
                self.size, self.time = state or size_and_time(os.fstat(file.fileno()))
                self.problems = [self._walk(file)]
                if not self._classes:
                    self._read_jsons(file)
        except OSError as error:
            self.problems = [error.strerror or str(error)]
        keys = {_key(name) for name in self.images}
        self.others = [name for name in self.others if _key(name) not in keys]
        for some, what in (
            (self._repeated, "have the name of an earlier one"),
            (
                self._special,
                "are links, have holes or are no files (tar --dereference --hard-dereference packs files)",
            ),
        ):
            if some:
                such = printable(os.fsdecode(some[0]))
                self.problems.append(f"{len(some)} members like {such} are left out: they {what}")

    def _walk(self, file: BinaryIO) -> str | None:
        """Note the members of all archives that follow each other; what is wrong in a few words, None if nothing is."""
        begin: int | None = 0
        while begin is not None:
            file.seek(begin)
            end = -1
            try:
                with tarfile.open(fileobj=file, mode="r:") as archive:
                    while (member := archive.next()) is not None:
                        archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps them all
                        if archive.offset <= end or member.size < 0:
                            return f"damaged at byte {end}"
                        if member.sparse is None and member.offset_data + member.size > self.size:
                            return f"cut off in {printable(member.name)} at byte {member.offset}"
                        self._note_member(file, member)
                        end = max(end, archive.offset)
                    if problem := _look_at_end(file, archive.offset):
                        return f"what follows its end mark at byte {begin} is no tar" if begin and end < 0 else problem
                    begin = _after_zeros(file, archive.offset)
            except (tarfile.TarError, ValueError, OverflowError, RecursionError, MemoryError, EOFError) as error:
                return _describe_damage(_read_at(file, _BLOCK, 0), end, one_line(error))
        return None

    def _note_member(self, file: BinaryIO, member: tarfile.TarInfo) -> None:
        name = os.fsencode(member.name).replace(b"\0", b"?")
        lower = name.lower()
        if is_hidden(name) or member.isdir():
            return
        place = (member.offset_data, member.size)
        if not member.isreg() or member.sparse is not None:
            self._special.append(name)
        elif lower.endswith(_ENDINGS):
            if name in self.images:
                self._repeated.append(name)
            elif self._kind in (None, _ending(name)):
                self.images[name] = place
        elif lower.endswith(b".cls") and member.size <= _MAX_LABEL_BYTES:
            text = _read_at(file, member.size, member.offset_data).strip()
            self._classes.setdefault(_stem(name), text.replace(b"\0", b"?"))
        elif lower.endswith(b".json") and member.size <= _MAX_JSON_BYTES:
            self._jsons.setdefault(_stem(name), place)
        elif lower.endswith(b".txt"):
            self._texts.append(_stem(name))
        elif is_left_out(name):
            self.others.append(name)

    def _read_jsons(self, file: BinaryIO) -> None:
        """Classes from the members KEY.json, where one of the first names a class."""
        for number, (stem, (offset, size)) in enumerate(self._jsons.items()):
            if number == _JSON_LOOKED_AT and not self._classes:
                return
            try:
                found = json.loads(_read_at(file, size, offset))
                value = next(found[name] for name in LABEL_NAMES if name in found)
            except (ValueError, TypeError, StopIteration, RecursionError):
                continue
            if isinstance(value, int | str) and not isinstance(value, bool):
                self._classes[stem] = os.fsencode(str(value).strip()).replace(b"\0", b"?")

    def labels(self) -> list[bytes | None]:
        """The text of each image's class: that of its own name, else that of its key, else None."""
        if not self._classes:
            return [None] * len(self.images)
        stems, of_key = {_stem(name) for name in self.images}, dict[bytes, bytes | None]()
        for stem, text in self._classes.items():
            if stem not in stems:  # KEY.label.cls; where there are several, none is the key's
                of_key[_key(stem)] = None if _key(stem) in of_key else text
        found = self._classes
        return [found.get(_stem(name), found.get(_key(name), of_key.get(_key(name)))) for name in self.images]

    def texts(self) -> int:
        """Members KEY.txt beside images."""
        stems = {_stem(name) for name in self.images}
        return sum(stem in stems for stem in self._texts)

    def kinds(self) -> Counter[bytes]:
        """Count the endings, such as "input.png", that images have behind their key, where a key has several images."""
        keys = Counter(map(_key, self.images))
        return Counter(_ending(name) for name in self.images if keys[_key(name)] > 1)


def size_and_time(found: os.stat_result) -> list[int]:
    return [found.st_size, found.st_mtime_ns]


def _read_at(file: BinaryIO, size: int, offset: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _key(name: bytes) -> bytes:
    """WebDataset's: the path up to the first dot of the file's name."""
    folder, slash, base = name.rpartition(b"/")
    return folder + slash + base.partition(b".")[0]


def _ending(name: bytes) -> bytes:
    """The part of a member's name behind its key and a dot."""
    return name.rpartition(b"/")[2].partition(b".")[2]


def _stem(name: bytes) -> bytes:
    """The path up to the last dot of the file's name."""
    return name.rpartition(b".")[0]


def _look_at_end(file: BinaryIO, offset: int) -> str | None:
    """tarfile ends in silence at a damaged header, and where the file ends between two members."""
    block = _read_at(file, _BLOCK, offset)
    if block == bytes(_BLOCK):
        return None
    return f"damaged at byte {offset}" if block else "ends without a tar's end mark, so it may be cut off"


def _after_zeros(file: BinaryIO, offset: int) -> int | None:
    """The first block after an end mark that is not empty, as where archives were joined by cat; None for none."""
    for _ in range(_MOST_ZEROS):
        part = _read_at(file, _ZEROS, offset)
        if rest := part.lstrip(b"\0"):
            return offset + (len(part) - len(rest)) // _BLOCK * _BLOCK
        offset += len(part)
    return None


def _describe_damage(head: bytes, end: int, reason: str) -> str:
    if end < 0 and head.startswith(_COMPRESSED):
        return "compressed: unpack it, images are read at their places"
    return what_else_it_is(head) or f"cut off or damaged after byte {max(end, 0)} ({reason})"

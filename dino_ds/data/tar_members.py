"""Lists the images of a tar file, without extracting anything.

The layout is WebDataset's: a member with an image's ending is an image; KEY.cls or KEY.json has the class of KEY.jpg.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from dino_ds.basics.files import FORMAT, check_format
from dino_ds.data.decode import HEAD, is_image, is_left_out
from dino_ds.data.encoded import size_and_time
from dino_ds.data.images import name_placeholder
from dino_ds.data.listing import LABEL_NAMES, is_hidden, printable
from dino_ds.data.remote import Remote, open_remote
from dino_ds.errors import one_line

_BLOCK = 512
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # first bytes of gzip, bzip2, xz and zstd files


class Members:
    """The images of a shard in order, each with its (offset, size) and its class. state: size and tag if `path` is an
    address. kind: ending after the key, such as input.png, of the images to list; None for all.

    Attributes:
        end: offset of the mark that ends the last archive; None where there is none.
        problems: descriptions of members that could not be read.
        others: files of other kinds, except those that share their key with an image.
    """

    def __init__(self, path: str, kind: str | None, state: list[int] | None = None) -> None:
        self.size, self.time, self.checksums = -1, 0, array("q")
        self.end: int | None = None
        self.images, self.others = dict[bytes, tuple[int, int]](), list[bytes]()
        self._kind = kind and os.fsencode(kind)
        self._classes, self._jsons = dict[bytes, bytes](), dict[bytes, tuple[int, int]]()
        self._repeated, self._special = list[bytes](), list[bytes]()
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
        special = "are links, have holes or are no files (tar --dereference --hard-dereference packs files)"
        for names, reason in ((self._repeated, "have the name of an earlier one"), (self._special, special)):
            if names:
                example = printable(os.fsdecode(names[0]))
                self.problems.append(f"{len(names)} members like {example} are left out: they {reason}")

    def _walk(self, file: BinaryIO) -> str | None:
        """Note the members of all archives in the file, one after another; returns a description of damage, or None."""
        begin: int | None = 0
        headers: Any = _Headers(file)
        while begin is not None:
            file.seek(begin)
            end = -1
            try:
                with tarfile.open(fileobj=headers, mode="r:") as archive:
                    while (member := archive.next()) is not None:
                        archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps them all
                        if archive.offset <= end or member.size < 0:
                            return f"damaged at byte {end}"
                        if member.sparse is None and member.offset_data + member.size > self.size:
                            return f"cut off in {printable(member.name)} at byte {member.offset}"
                        self._note_member(file, member)
                        end = max(end, archive.offset)
                    block = _read_at(file, _BLOCK, archive.offset)
                    if block != bytes(_BLOCK):  # tarfile reports neither a damaged header nor an end between members
                        if begin and end < 0:
                            return f"what follows its end mark at byte {begin} is no tar"
                        cut = "ends without a tar's end mark, so it may be cut off"
                        return f"damaged at byte {archive.offset}" if block else cut
                    self.end, begin = archive.offset, _after_zeros(file, archive.offset)
            except (tarfile.TarError, ValueError, OverflowError, RecursionError, MemoryError, EOFError) as error:
                head = _read_at(file, _BLOCK, 0)
                if end < 0 and head.startswith(_COMPRESSED):
                    return "compressed: unpack it, images are read at their places"
                damage = f"cut off or damaged after byte {max(end, 0)} ({one_line(error)})"
                return name_placeholder(head) or damage
        return None

    def _note_member(self, file: BinaryIO, member: tarfile.TarInfo) -> None:
        name = os.fsencode(member.name).replace(b"\0", b"?")
        lower, span = name.lower(), (member.offset_data, member.size)
        if is_hidden(name) or member.isdir():
            return
        if not member.isreg() or member.sparse is not None:
            self._special.append(name)
        elif is_image(name, lambda: _read_at(file, min(HEAD, member.size), member.offset_data)):
            if name in self.images:
                self._repeated.append(name)
            elif self._kind in (None, _ending(name)):
                self.images[name] = span
        elif lower.endswith(b".cls") and member.size <= 1000:
            text = _read_at(file, member.size, member.offset_data).strip()
            self._classes.setdefault(_stem(name), text.replace(b"\0", b"?"))
        elif lower.endswith(b".json") and member.size <= 1 << 16:
            self._jsons.setdefault(_stem(name), span)
        elif is_left_out(name):
            self.others.append(name)

    def _read_jsons(self, file: BinaryIO) -> None:
        """Read classes from the members KEY.json, if one of the first 20 names a class."""
        for number, (stem, (offset, size)) in enumerate(self._jsons.items()):
            if number == 20 and not self._classes:
                return
            try:
                fields = json.loads(_read_at(file, size, offset))
                value = next(fields[name] for name in LABEL_NAMES if name in fields)
            except (ValueError, TypeError, StopIteration, RecursionError):
                continue
            if isinstance(value, int | str) and not isinstance(value, bool):
                self._classes[stem] = os.fsencode(str(value).strip()).replace(b"\0", b"?")

    def labels(self) -> list[bytes | None]:
        """Class of each image as text, found by the image's name or else by its key; None without a class."""
        classes, stems, of_key = self._classes, set(map(_stem, self.images)), dict[bytes, bytes | None]()
        if not classes:
            return [None] * len(self.images)
        for stem, text in classes.items():
            if stem not in stems:  # KEY.label.cls; several of them are ambiguous
                of_key[_key(stem)] = None if _key(stem) in of_key else text
        return [classes.get(_stem(name), classes.get(_key(name), of_key.get(_key(name)))) for name in self.images]

    def kinds(self) -> Counter[bytes]:
        """Count images by the ending after their key, such as "input.png", for keys with several images."""
        keys = Counter(map(_key, self.images))
        return Counter(_ending(name) for name in self.images if keys[_key(name)] > 1)


class IndexedMembers(Members):
    """The images of one shard by its line of an index, each with its CRC-32; `time`: a hash of the line, for servers
    without tags. Raises CheckpointError for another format, and ValueError, LookupError, TypeError."""

    def __init__(self, line: bytes, index: str) -> None:
        shard = json.loads(line)
        if not isinstance(shard, dict):
            raise ValueError("no object")
        check_format(shard.get("format"), index, "remove it, or make the shards again")
        names, *numbers, classes = zip(*shard["images"], strict=True) if shard["images"] else [()] * 5
        self.name, self.size, self.end = str(shard["shard"]), shard["bytes"], shard["end"]
        end = () if self.end is None else (self.end,)
        if not all(type(number) is int and 0 <= number < 2**63 for number in (self.size, *end, *sum(numbers, ()))):
            raise ValueError("a number that is no place, size or checksum")
        self.time = int.from_bytes(hashlib.blake2b(line, digest_size=8).digest(), "big") >> 1
        self.images = dict(zip(map(os.fsencode, names), zip(*numbers[:2], strict=True), strict=True))
        if any(offset + size > self.size for offset, size in self.images.values()):
            raise ValueError("an image beyond the end of its shard")
        self.checksums = array("q", numbers[2])
        texts = zip(self.images, classes, strict=True)
        self._classes = {_stem(name): os.fsencode(text) for name, text in texts if text is not None}
        self.others, self.problems = [], []

    def is_of(self, url: str, state: Sequence[int]) -> bool:
        """Whether a remote shard with this size and tag is as long as the line says, and ends where that says."""
        if state[0] != self.size or self.end is None:
            return state[0] == self.size
        with open_remote(Remote(), url, state, 0) as file:
            return _read_at(file, _BLOCK, self.end) == bytes(_BLOCK)


def index_line(path: Path, name: str) -> str:
    """The line of a shard in an index, as `IndexedMembers` reads it."""
    members = Members(str(path), None)
    with path.open("rb") as file:
        images = [
            [os.fsdecode(image), *span, zlib.crc32(_read_at(file, span[1], span[0])), text and os.fsdecode(text)]
            for (image, span), text in zip(members.images.items(), members.labels(), strict=True)
        ]
    facts = {"shard": name, "format": FORMAT, "bytes": members.size, "end": members.end, "images": images}
    return json.dumps(facts)


def _read_at(file: BinaryIO, size: int, offset: int) -> bytes:
    file.seek(offset)
    return file.read(size)


class _Headers:
    """A tar file for reading headers alone. Refuses long ones: a header may claim a length that fills the memory."""

    def __init__(self, file: BinaryIO) -> None:
        self.tell, self.seek, self._read = file.tell, file.seek, file.read

    def read(self, size: int) -> bytes:
        if size > 1 << 20:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._read(size)


def _key(name: bytes) -> bytes:
    """WebDataset's key: the path up to the first dot of the file's name."""
    folder, slash, base = name.rpartition(b"/")
    return folder + slash + base.partition(b".")[0]


def _ending(name: bytes) -> bytes:
    """The part of a member's name after its key and a dot."""
    return name[len(_key(name)) + 1 :]


def _stem(name: bytes) -> bytes:
    """The path up to the last dot of the file's name."""
    return name.rpartition(b".")[0]


def _after_zeros(file: BinaryIO, offset: int) -> int | None:
    """Offset of the first nonzero block in 64 MiB after an end mark, as in archives joined by cat; None without one."""
    for _ in range(64):
        part = _read_at(file, 1 << 20, offset)
        if rest := part.lstrip(b"\0"):
            return offset + (len(part) - len(rest)) // _BLOCK * _BLOCK
        offset += len(part)
    return None

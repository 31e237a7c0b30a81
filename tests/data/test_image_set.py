"""A checkpoint's description of its images: small, the same wherever they lie, and enough to count what has changed."""

from __future__ import annotations

import json
import random
import re
import tarfile
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

from dino_ds.basics.own_code import allow_code
from dino_ds.data.sources import ImageSet, build_source
from dino_ds.errors import DataError


@dataclass
class Names:
    """A source of names, with or without sizes of files."""

    names: list[str]
    sizes: dict[str, int] | None = None

    def __len__(self):
        return len(self.names)

    def name(self, index):
        return self.names[index]

    def __getattr__(self, key):
        if key == "file_bytes" and self.sizes is not None:
            return lambda index: self.sizes[self.names[index]]
        raise AttributeError(key)


def _set(names, sizes=None):
    return ImageSet.of(Names(list(names), sizes), None)


def _numbered(first, last):
    return [f"{i}.jpg" for i in range(first, last)]


def test_small_sets_are_compared_whole():
    old = _set(_numbered(0, 64))
    assert old.changes(_set(_numbered(0, 64))) == ""
    assert old.changes(_set(_numbered(8, 104))) == "64 -> 96 images: 40 added, 8 removed, 0 of another size"
    assert old.changes(_set(f"x{i}" for i in range(64))) == (
        "64 images as before: 64 added, 64 removed, 0 of another size"
    )
    assert old.changes(_set(reversed(_numbered(0, 64)))) == "64 images as before: the same names in another order"


def test_another_size_is_another_image():
    names = _numbered(0, 20)
    old, now = (_set(names, {name: 100 + grown * (i < 5) for i, name in enumerate(names)}) for grown in (0, 1))
    assert old.changes(now) == "20 images as before: 0 added, 0 removed, 5 of another size"


def test_large_sets_are_compared_by_the_same_part_of_both():
    names = _numbered(0, 30_000)
    random.Random(0).shuffle(names)
    old, now = _set(names), _set(names[3000:] + _numbered(30_000, 36_000))
    counts, _, rest = old.changes(now).partition(": ")
    compared, added, removed, resized = (int(word) for word in rest.replace(",", "").split() if word.isdigit())
    assert counts == "30000 -> 33000 images" and 1024 <= compared <= 1400 and resized == 0
    assert 0.05 < removed / compared < 0.15 and 0.1 < added / compared < 0.25
    assert len(json.dumps(old.to_json())) < 25_000


WRONG = (("sample", "ab"), ("contents", "ab"), ("sample", 3), ("count", "many"))


def test_it_comes_back_from_json_and_from_nothing_else():
    old = _set(_numbered(0, 9), dict.fromkeys(_numbered(0, 9), 7))
    saved = json.loads(json.dumps(old.to_json()))
    assert ImageSet.from_json(saved) == old
    for wrong in (
        None,
        {},
        {**saved, "sample": "ab"},
        {**saved, "contents": "ab"},
        {**saved, "sample": 3},
        {**saved, "count": "many"},
        [],
        "x",
    ):
        with pytest.raises(DataError, match="a description of images can't be used"):
            ImageSet.from_json(wrong)


@dataclass
class Files(Names):
    """A source of encoded files, the content of each its own."""

    contents: dict[str, bytes] | None = None

    def read(self, index):
        return self.contents[self.names[index]]


def _files(count, changed=()):
    names = _numbered(0, count)
    contents = {name: (b"new" if i in changed else b"old") + name.encode() for i, name in enumerate(names)}
    return ImageSet.of(Files(names, dict.fromkeys(names, 10), contents), None)


def test_other_contents_of_the_same_sizes_are_noticed():
    """64 images are read: sets of no more are compared whole, a twentieth of a large one is noticed."""
    assert _files(40).changes(_files(40)) == ""
    assert _files(40).changes(_files(40, {7})) == (
        "40 images as before: 0 added, 0 removed, 0 of another size, 1 of 40 that were read of other content"
    )
    changes = _files(3000).changes(_files(3000, range(0, 3000, 10)))
    assert re.search(r"0 of another size, \d+ of 64 that were read of other content$", changes)
    assert len(json.dumps(_files(3000).to_json())) < 30_000


def _bmp(path, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.mark.parametrize("form", ["folder", "list", "tar"])
def test_files_are_known_by_their_contents_in_every_form(tmp_path, form):
    found = []
    for place, seed in (("a", 0), ("b", 0), ("c", 1)):
        folder = tmp_path / place
        folder.mkdir()
        files = [folder / f"{i}.bmp" for i in range(5)]
        for number, file in enumerate(files):
            _bmp(file, seed + number)
        root = folder
        if form == "list":
            root = folder / "list.txt"
            root.write_text("".join(f"{file.name}\n" for file in files))
        if form == "tar":
            root = folder / "shard.tar"
            with tarfile.open(root, "w") as archive:
                for file in files:
                    archive.add(file, file.name)
        found.append(ImageSet.of(build_source("folder", str(root), "train", False), str(root)))
    assert found[0].changes(found[1]) == "" and found[0] == found[1]
    assert found[0].changes(found[2]).endswith("0 of another size, 5 of 5 that were read of other content")


class Own:
    """A user's own source, without sizes; names begin with the root. Attributes of its own mean nothing to us."""

    labels = classes = None
    place = path = "here"

    def __init__(self, root):
        self.root = root

    def __len__(self):
        return 5

    def load(self, index):
        raise NotImplementedError

    def name(self, index):
        return f"{self.root}/{index}"


def test_sources_without_files():
    source, roots = f"{__name__}:Own", ("/a", "/b/c")
    allow_code([source])
    one, other = (ImageSet.of(build_source(source, root, "train", False), root) for root in roots)
    assert one == other and one.count == len(build_source(source, roots[0], "train", False))
    assert set(one.sample.values()) == {-1}

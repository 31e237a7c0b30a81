"""What a checkpoint knows of its images: small, the same wherever they lie, and enough to count what has changed."""

from __future__ import annotations

import json
import random
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from dino_ds.data.image_set import ImageSet
from dino_ds.data.sources import build_source
from tests.training.harness import image_folder


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


def test_it_comes_back_from_json_and_from_nothing_else():
    old = _set(_numbered(0, 9), dict.fromkeys(_numbered(0, 9), 7))
    saved = json.loads(json.dumps(old.to_json()))
    assert ImageSet.from_json(saved) == old
    for wrong in (None, {}, {**saved, "sample": "ab"}, {**saved, "sample": 3}, {**saved, "count": "many"}, [], "x"):
        assert ImageSet.from_json(wrong) is None


def test_files_are_known_by_their_names_below_the_root_and_their_sizes(tmp_path):
    """A folder that has moved is the same; so is a list of it, and tar shards have sizes of their own."""
    root = image_folder(tmp_path / "images", 6)
    old = ImageSet.of(build_source("folder", str(root), "train", False), str(root))
    moved = Path(shutil.copytree(root, tmp_path / "moved"))
    now = ImageSet.of(build_source("folder", str(moved), "train", False), str(moved))
    assert old == now and all(size > 0 for size in old.sample.values())
    (moved / "list.txt").write_text("".join(f"{path.name}\n" for path in sorted(moved.glob("*.png"))))
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for path in sorted(moved.glob("*.png")):
            archive.add(path, path.name)
    for other in (moved / "list.txt", tmp_path / "shard.tar"):
        assert ImageSet.of(build_source("folder", str(other), "train", False), str(other)) == old


class Own:
    """A user's own source, without sizes; names begin with the root."""

    labels = classes = None

    def __init__(self, root):
        self.root = root

    def __len__(self):
        return 5

    def load(self, index):
        raise NotImplementedError

    def name(self, index):
        return f"{self.root}/{index}"


@pytest.mark.parametrize(
    ("source", "roots"), [("photos", (None, None)), ("tests.data.test_image_set:Own", ("/a", "/b/c"))]
)
@pytest.mark.slow
def test_sources_without_files(source, roots):
    one, other = (ImageSet.of(build_source(source, root, "train", False), root) for root in roots)
    assert one == other and one.count == len(build_source(source, roots[0], "train", False))
    assert set(one.sample.values()) == {-1}

"""Lists of images: cached, seen to change when the data does, small in memory and on the way to a worker."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from pathlib import Path

import pytest
from PIL import Image

from dino_ds.data import folder as folder_module
from dino_ds.data.folder import ImageFolder
from dino_ds.data.images import UnreadableImage
from dino_ds.data.listing import printable
from dino_ds.errors import DataError
from tests.data.files import members


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DINO_DS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tree(root: Path, *names: str) -> Path:
    """Images of another color each, in folders that have not been touched for a while."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(root / name)
    age(root)
    return root


def age(root: Path) -> None:
    for place, _, _ in os.walk(root):
        os.utime(place, (1e9, 1e9))


@pytest.fixture
def scans(monkeypatch) -> list[Path]:
    """The roots that were scanned."""
    found: list[Path] = []
    scan = folder_module._scan
    monkeypatch.setattr(folder_module, "_scan", lambda root: found.append(root) or scan(root))
    return found


def test_the_second_start_reads_no_folder(cache, tmp_path, scans):
    root = tree(tmp_path / "images", "cat/1.png", "dog/2.png", "dog/deep/3.png")
    first, second = ImageFolder(str(root)), ImageFolder(str(root))
    assert len(scans) == 1
    assert members(first) == members(second) == ["cat/1.png", "dog/2.png", "dog/deep/3.png"]
    assert second.labels == [0, 1, 1] and second.classes == ["cat", "dog"]
    assert second.load(2).getpixel((0, 0)) == (2, 0, 0)


CHANGES = {
    "add": lambda root: (root / "dog/deep/9.png").write_bytes((root / "cat/1.png").read_bytes()),
    "remove": lambda root: (root / "dog/deep/3.png").unlink(),
    "rename": lambda root: (root / "cat/1.png").rename(root / "cat/7.png"),
    "new folder": lambda root: tree(root / "eel", "5.png") and os.utime(root, (2e9, 2e9)),
    "remove folder": lambda root: shutil.rmtree(root / "owl"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_the_tree_is_seen(cache, tmp_path, scans, change):
    root = tree(tmp_path / "images", "cat/1.png", "dog/2.png", "dog/deep/3.png", "owl/4.png")
    ImageFolder(str(root))
    CHANGES[change](root)
    expected = sorted(str(path.relative_to(root)) for path in root.rglob("*.png"))
    assert members(ImageFolder(str(root))) == expected
    assert len(scans) == 2


def test_a_folder_that_has_just_changed_is_not_trusted(cache, tmp_path, scans, monkeypatch):
    """Two changes within one tick of the file system's clock leave one time."""
    monkeypatch.setattr(folder_module, "_FRESH_NANOSECONDS", 10**11)
    root = tree(tmp_path / "images", "a.png")
    now = time.time()
    os.utime(root, (now, now))
    ImageFolder(str(root))
    (root / "b.png").write_bytes((root / "a.png").read_bytes())
    os.utime(root, (now, now))
    assert members(ImageFolder(str(root))) == ["a.png", "b.png"]
    assert len(scans) == 2


def test_a_source_travels_as_a_path_and_outlives_a_new_listing(cache, tmp_path):
    root = tree(tmp_path / "images", *(f"c{i % 2}/{i:04d}.png" for i in range(300)))
    source = ImageFolder(str(root))
    sent = pickle.dumps(source)
    assert len(sent) < 1000
    (root / "c0/0000.png").unlink()
    assert len(ImageFolder(str(root))) == 299
    copy = pickle.loads(sent)
    assert len(copy) == 300 and members(copy) == members(source)
    assert copy.labels == source.labels and copy.classes == ["c0", "c1"]


def test_without_a_writable_cache_the_list_is_temporary(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DINO_DS_CACHE", str(tmp_path / "file/cache"))
    source = ImageFolder(str(tree(tmp_path / "images", "a.png")))
    assert members(pickle.loads(pickle.dumps(source))) == ["a.png"]


def test_a_list_that_is_gone_is_said(cache, tmp_path):
    source = ImageFolder(str(tree(tmp_path / "images", "a.png")))
    sent = pickle.dumps(source)
    for kept in cache.glob("*.safetensors"):
        kept.unlink()
    with pytest.raises(DataError, match=r"is gone .* start again"):
        pickle.loads(sent)


def test_the_order_is_that_of_whole_paths(cache, tmp_path):
    wanted = ["cat-x/1.png", "cat.png", "cat/1.png", "cat/a/2.png", "cat/a.png", "cat/a-.png", "cat0.png", "é/1.png"]
    root = tree(tmp_path / "images", *wanted)
    assert members(ImageFolder(str(root))) == sorted(wanted)


def test_any_bytes_may_be_a_name(cache, tmp_path):
    root = tree(tmp_path / "images", "good.png")
    image = (root / "good.png").read_bytes()
    for raw in (b"latin-\xe9.png", b"two\nlines.png", b"tab\there.png"):
        with open(os.path.join(os.fsencode(root), raw), "wb") as file:
            file.write(image)
    source = ImageFolder(str(root))
    shown = [Path(source.name(i)).name for i in range(len(source))]
    assert sorted(shown) == ["good.png", r"latin-\xe9.png", r"tab\there.png", r"two\nlines.png"]
    for index in range(4):
        source.load(index)
    assert printable("plain é") == "plain é"


def test_what_is_no_regular_file_is_unreadable_and_never_waited_for(cache, tmp_path):
    root = tree(tmp_path / "images", "0.png")
    os.mkfifo(root / "pipe.png")
    (root / "loop.png").symlink_to(root / "loop.png")
    (root / "dangling.png").symlink_to(root / "nowhere.png")
    (root / "self").symlink_to(root)
    (root / "empty.png").write_bytes(b"")
    source = ImageFolder(str(root))
    reasons = {}
    for index in range(len(source)):
        try:
            source.load(index)
        except UnreadableImage as error:
            reasons[Path(error.name).name] = error.reason
    assert reasons == {
        "dangling.png": "No such file or directory",
        "empty.png": "empty file",
        "loop.png": "Too many levels of symbolic links",
        "pipe.png": "it is not a regular file",
    }

"""Lists of images, of folders and in text files: cached, seen to change when the data does, small on their way."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from pathlib import Path

import pytest

from dino_ds.basics.files import MAX_LINE_BYTES, read_lines, read_object
from dino_ds.data import folder as folder_module
from dino_ds.data.folder import ImageFolder
from dino_ds.data.image_set import ImageSet
from dino_ds.data.images import UnreadableImage
from dino_ds.data.listing import printable
from dino_ds.errors import DataError
from tests.data import files
from tests.data.files import members, put, reds


def tree(root: Path, *names: str) -> Path:
    """Images of another color each, in folders that have not been touched for a while."""
    put(root, {name: number for number, name in enumerate(names)})
    for place, _, _ in os.walk(root):
        os.utime(place, (1e9, 1e9))
    return root


@pytest.fixture
def scans(monkeypatch) -> list[Path]:
    found: list[Path] = []
    scan = folder_module._scan
    monkeypatch.setattr(folder_module, "_scan", lambda root: found.append(root) or scan(root))
    return found


CHANGES = {
    "nothing": lambda root: None,
    "add": lambda root: (root / "dog/deep/9.png").write_bytes((root / "cat/1.png").read_bytes()),
    "remove": lambda root: (root / "dog/deep/3.png").unlink(),
    "new folder": lambda root: tree(root / "eel", "5.png") and os.utime(root, (2e9, 2e9)),
    "remove folder": lambda root: shutil.rmtree(root / "owl"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_folders_are_read_again_only_after_a_change(tmp_path, scans, change):
    root = tree(tmp_path / "images", "cat/1.png", "dog/2.png", "dog/deep/3.png", "owl/4.png")
    ImageFolder(str(root))
    CHANGES[change](root)
    expected = sorted(str(path.relative_to(root)) for path in root.rglob("*.png"))
    source = ImageFolder(str(root))
    assert members(source) == expected
    assert [source.classes[label] for label in source.labels] == [name.partition("/")[0] for name in expected]
    assert len(scans) == (1 if change == "nothing" else 2)


def test_a_folder_that_has_just_changed_is_not_trusted(tmp_path, scans, monkeypatch):
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


def test_a_source_travels_as_a_path_and_outlives_a_new_listing(tmp_path):
    root = tree(tmp_path / "images", *(f"c{i % 2}/{i:04d}.png" for i in range(300)))
    source = ImageFolder(str(root))
    sent = pickle.dumps(source)
    assert len(sent) < 1000
    (root / "c0/0000.png").unlink()
    assert len(ImageFolder(str(root))) == 299
    copy = pickle.loads(sent)
    assert len(copy) == 300 and members(copy) == members(source)
    assert copy.labels == source.labels and copy.classes == ["c0", "c1"]


def test_a_list_that_is_gone_is_said(cache, tmp_path):
    source = ImageFolder(str(tree(tmp_path / "images", "a.png")))
    sent = pickle.dumps(source)
    for kept in cache.glob("*.safetensors"):
        kept.unlink()
    with pytest.raises(DataError, match=r"is gone .* start again"):
        pickle.loads(sent)


def test_the_order_is_that_of_whole_paths(tmp_path):
    wanted = ["cat-x/1.png", "cat.png", "cat/1.png", "cat/a/2.png", "cat/a.png", "cat/a-.png", "cat0.png", "é/1.png"]
    assert members(ImageFolder(str(tree(tmp_path / "images", *wanted)))) == sorted(wanted)


def test_any_bytes_may_be_a_name(tmp_path):
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


def test_what_is_no_regular_file_is_unreadable_and_never_waited_for(tmp_path):
    root = tree(tmp_path / "images", "0.png")
    os.mkfifo(root / "pipe.png")
    (root / "loop.png").symlink_to(root / "loop.png")
    (root / "dangling.png").symlink_to(root / "nowhere.png")
    (root / "self").symlink_to(root)
    (root / "empty.png").write_bytes(b"")
    source = ImageFolder(str(root))
    assert members(source) == ["0.png", "dangling.png", "empty.png", "loop.png", "pipe.png"] and source.load(0)
    reasons = "No such file or directory", "empty file", "Too many levels of symbolic links", "it is not a regular file"
    for index, reason in enumerate(reasons, 1):
        with pytest.raises(UnreadableImage, match=f"{members(source)[index]} .{reason}"):
            source.load(index)


@pytest.fixture
def root(tmp_path) -> Path:
    return tree(tmp_path / "images", "a.png", "b b.png", "deep/#c.png", "é.png")


def read(path: Path, text: str | bytes):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return files.read(path)


def test_paths_are_relative_to_the_list_or_absolute(root, tmp_path):
    text = f"﻿deep/#c.png\r\n\n# a note\nb b.png\n{root}/a.png\n../images/é.png\na.png"
    source = read(root / "list.txt", text)
    assert reds(source) == [2, 1, 0, 3, 0]
    assert source.labels is None and source.classes is None
    assert source.name(2) == f"{root}/a.png" and source.name(1) == f"{root}/b b.png"
    assert reds(pickle.loads(pickle.dumps(source))) == reds(source)


def test_a_tab_and_a_class_give_labels(root):
    source = read(root / "list.TXT", "a.png\tdog\nb b.png\tcat \né.png\na.png\tdog\n")
    assert source.labels == [1, 0, -1, 1] and source.classes == ["cat", "dog"]
    assert read(root / "list.txt", "a.png\t10\nb b.png\t9\n").classes == ["9", "10"]


def test_lines_that_are_no_images_are_unreadable_one_by_one(root):
    source = read(root / "list.txt", b"a.png\nmissing.png\ndeep\n\xff.png\nnul\0.png\n")
    assert source.load(0)
    for index, reason in ((1, "No such file"), (2, "Is a directory"), (3, "No such file"), (4, "null byte")):
        with pytest.raises(UnreadableImage, match=reason) as caught:
            source.load(index)
        assert str(caught.value).isprintable()
    described = ImageSet.of(source, None)
    assert described.count == 5 and sorted(described.sample.values())[:3] == [-1, -1, -1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# only a note\n", "lists no images: it has no path in a line"),
        ("elsewhere/a.png\nelsewhere/b.png\n", r"none of 2 lines .*, such as .*/elsewhere/a\.png; a line is a path"),
        (".cache/a.png\n", r"lists no images: 1 lines are left out, such as \.cache/a\.png"),
        ("a.png\r\n".encode("utf-16"), r"list\.txt is UTF-16: save it as UTF-8"),  # as PowerShell writes it
    ],
)
def test_lists_of_nothing_are_an_error(root, text, said):
    with pytest.raises(DataError, match=said):
        read(root / "list.txt", text)


def test_a_line_without_an_end_is_cut(tmp_path):
    (tmp_path / "lines").write_bytes(b"first\n" + bytes(3 * MAX_LINE_BYTES) + b"\nlast")
    first, zeros, last = read_lines(tmp_path / "lines")
    assert (first, last) == (b"first\n", b"last") and zeros == bytes(MAX_LINE_BYTES)


def test_a_file_of_json_is_an_object_or_one_kind_of_error(tmp_path):
    put(tmp_path, {"list": b"[1]", "deep": b'{"a": ' * 100_000, "bytes": b"\xff{}"})
    os.mkfifo(tmp_path / "pipe")
    reasons = {"list": "is not a JSON object", "deep": "nested too deeply", "pipe": "not a regular file", "bytes": "."}
    for name, reason in (reasons | {"gone": "No such file"}).items():
        with pytest.raises((OSError, ValueError), match=reason):
            read_object(tmp_path / name)

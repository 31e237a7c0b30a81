"""A text file of paths."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from PIL import Image

from dino_ds.basics.files import MAX_LINE_BYTES, read_lines, read_object
from dino_ds.data.images import UnreadableImage
from dino_ds.data.sources import ImageSet
from dino_ds.errors import DataError
from tests.data import files
from tests.data.files import reds


@pytest.fixture
def root(tmp_path) -> Path:
    for number, name in enumerate(("a.png", "b b.png", "deep/#c.png", "é.png")):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
    return tmp_path / "images"


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


def test_a_list_as_powershell_writes_it_is_answered(root):
    with pytest.raises(DataError, match=r"list\.txt is UTF-16: save it as UTF-8"):
        read(root / "list.txt", "a.png\r\n".encode("utf-16"))


def test_a_changed_list_is_read_anew(root):
    assert len(read(root / "list.txt", "a.png\n")) == 1
    os.utime(root / "list.txt", (1, 1))
    assert len(read(root / "list.txt", "a.png\nb b.png\n")) == 2


def test_lines_that_are_no_images_are_unreadable_one_by_one(root):
    source = read(root / "list.txt", b"a.png\nmissing.png\ndeep\n\xff.png\nnul\0.png\n")
    assert source.load(0)
    for index, reason in ((1, "No such file"), (2, "Is a directory"), (3, "No such file"), (4, "null byte")):
        with pytest.raises(UnreadableImage, match=reason) as caught:
            source.load(index)
        assert str(caught.value).isprintable()
    described = ImageSet.of(source, None)
    assert described.count == 5 and sorted(described.sample.values())[:3] == [-1, -1, -1]


def test_lists_of_nothing_are_an_error(root, tmp_path):
    with pytest.raises(DataError, match="lists no images"):
        read(root / "list.txt", "# only a note\n")
    with pytest.raises(
        DataError, match=r"none of 2 lines .* is a file, such as .*/elsewhere/a\.png; a line is a path, abs"
    ):
        read(root / "list.txt", "elsewhere/a.png\nelsewhere/b.png\n")
    with pytest.raises(
        DataError, match=r"lists no images: 1 lines are left out, such as \.cache/a\.png: its name, or a"
    ):
        read(root / "list.txt", ".cache/a.png\n")


def test_a_line_without_an_end_is_cut(tmp_path):
    (tmp_path / "lines").write_bytes(b"first\n" + bytes(3 * MAX_LINE_BYTES) + b"\nlast")
    first, zeros, last = read_lines(tmp_path / "lines")
    assert (first, last) == (b"first\n", b"last") and zeros == bytes(MAX_LINE_BYTES)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.write_text('{"a": [1]}'), None),
        (lambda path: path.write_text("[1]"), "is not a JSON object"),
        (lambda path: path.write_text('{"a": ' * 100_000), "nested too deeply"),
        (lambda path: path.write_bytes(b"\xff{}"), ""),
        (os.mkfifo, "not a regular file"),
        (lambda path: None, "No such file"),
    ],
)
def test_a_file_of_json_is_an_object_or_one_kind_of_error(make, problem, tmp_path):
    make(path := tmp_path / "x.json")
    if problem is None:
        assert read_object(path) == {"a": [1]}
        return
    with pytest.raises((OSError, ValueError), match=problem):
        read_object(path)

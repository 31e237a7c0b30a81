"""Tar shards: the images of a folder under another roof; hostile and damaged archives cost only what is damaged."""

from __future__ import annotations

import os
import tarfile

import pytest

from dino_ds.data import shards as shards_module
from dino_ds.data.images import UnreadableImage
from dino_ds.data.root import expand
from dino_ds.errors import DataError
from tests.data.files import members, png, read, reds, tar


def test_a_folder_a_star_and_braces_are_the_same_shards(tmp_path):
    for number in range(12):
        tar(tmp_path / "set" / f"{number:03d}.tar", {f"{number}.png": number})
    for root in ("set", "set/*.tar", "set/{000..011}.tar", "{set}/0{0?,1?}.tar", "set/{00[0-9],01?}.tar"):
        if root.startswith("{set}"):
            (tmp_path / "{set}").symlink_to("set")  # braces without a comma are themselves
        assert reds(read(tmp_path / root)) == list(range(12)), root
    assert reds(read(tmp_path / "set/00{3,1}.tar")) == [3, 1]
    assert expand(f"{tmp_path}/set/{{011..009}}.tar") == [f"{tmp_path}/set/0{n}.tar" for n in ("11", "10", "09")]


def test_patterns_that_find_too_little_or_too_much_are_named(tmp_path):
    tar(tmp_path / "0.tar", {"a.png": 1})
    with pytest.raises(DataError, match=r"its file .*1\.tar is not there: fix the pattern or fetch it"):
        read(tmp_path / "{0..2}.tar")
    with pytest.raises(DataError, match=r"no file matches data\.root"):
        read(tmp_path / "*.tarr")
    with pytest.raises(DataError, match="not a local path"):
        read("pipe:cat a.tar")


def test_the_index_is_built_once_and_seen_to_be_old(tmp_path, monkeypatch):
    walked, find = list[str](), shards_module.Members
    monkeypatch.setattr(shards_module, "Members", lambda path, *rest: walked.append(path) or find(path, *rest))
    path = tar(tmp_path / "s/0.tar", {"a.png": 1})
    for _ in range(3):
        assert reds(read(tmp_path / "s")) == [1]
    assert len(walked) == 1
    tar(path, {"b.png": 2})  # the same size
    os.utime(path, (6, 6))
    assert members(read(tmp_path / "s")) == ["b.png"] and len(walked) == 2
    tar(tmp_path / "s/1.tar", {"c.png": 3})
    assert members(read(tmp_path / "s")) == ["b.png", "c.png"] and len(walked) == 4


def test_empty_and_broken_members_are_unreadable_one_by_one(tmp_path):
    source = read(tar(tmp_path / "a.tar", {"0.png": b"", "1.png": b"text", "2.png": png(2)[:45], "3.png": 3}))
    for index, reason in enumerate(("empty file", "not an image", "")):
        with pytest.raises(UnreadableImage, match=f"{tmp_path}/a.tar/{index}.png .{reason}"):
            source.load(index)
    assert source.load(3).getpixel((0, 0)) == (3, 0, 0)


def test_duplicate_names_are_said_and_the_first_counts(tmp_path):
    source = read(tar(tmp_path / "a.tar", ("a.png", 1), ("b.png", 2), ("a.png", 3)))
    assert reds(source) == [1, 2]
    assert "1 members like a.png are left out: they have the name of an earlier one" in source.notes[0]
    tar(tmp_path / "s/0.tar", {"a.png": 1})
    tar(tmp_path / "s/1.tar", {"a.png": 2})
    source = read(tmp_path / "s")
    assert reds(source) == [1, 2] and source.notes == []  # the same key in another shard is another image


@pytest.mark.parametrize("where", [0, 100, 512, 600, 2048, 4000, 5 * 1024 + 511, 5 * 1024 + 512])
def test_a_cut_shard_gives_what_is_whole_and_says_so(tmp_path, where):
    whole = tar(tmp_path / "whole.tar", {f"{i}.png": i for i in range(5)}, form=tarfile.USTAR_FORMAT).read_bytes()
    tar(tmp_path / "s/1.tar", {"good.png": 9})
    (tmp_path / "s/0.tar").write_bytes(whole[:where])
    source = read(tmp_path / "s")
    full = min(5, sum(512 + i * 1024 + len(png(i)) <= where for i in range(5)))
    assert reds(source) == [*range(full), 9]
    assert bool(source.notes) == (where < 5 * 1024 + 512)
    assert all(f"{full} images of it are used" in note and "0.tar" in note for note in source.notes)


def test_a_damaged_header_ends_a_shard_with_a_word(tmp_path):
    path = tar(tmp_path / "s/0.tar", {f"{i}.png": i for i in range(5)}, form=tarfile.USTAR_FORMAT)
    tar(tmp_path / "s/1.tar", {"good.png": 9})
    data = bytearray(path.read_bytes())
    data[2 * 1024 + 130] ^= 1
    path.write_bytes(data)
    source = read(tmp_path / "s")
    assert reds(source) == [0, 1, 9]
    assert source.notes == [f"{path}: damaged at byte 2048; 2 images of it are used"]


def test_what_is_no_tar_at_all(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"PK" + bytes(2000))
    with pytest.raises(DataError, match=r"no images in .*a\.tar; .*a\.tar: cut off or damaged.*; fix data\.root"):
        read(tmp_path / "a.tar")
    (tmp_path / "b.tar.gz").write_bytes(b"")
    with pytest.raises(DataError, match="unpack archives and compressed files"):
        read(tmp_path / "b.tar.gz")

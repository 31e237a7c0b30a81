"""The same images as a folder, a list, tar shards, Parquet and HDF5: the same names, classes, count and pixels, and a
word about all that is left out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from dino_ds.config.loading import load_recipe
from dino_ds.data.images import UnreadableImage
from dino_ds.data.root import with_own_images
from dino_ds.errors import DataError
from tests.data.files import encoded, members, photo, png, put, read, reds, tar
from tests.data.test_parquet import write

LONG = "dog/" + "long" * 40 + "/a b.png"
TREE = {"cat/1.png": 1, "cat/deep/2.v2.png": 2, "cat/é.png": 3, LONG: 4, "dog/3.png": 5}
HIDDEN = (".trash/7.png", "cat/.ipynb_checkpoints/1-checkpoint.png", "cat/._1.png", "lost+found/x.png")
CLASSES = [0, 0, 0, 1, 1]


@pytest.fixture
def tree(tmp_path) -> Path:
    return put(tmp_path / "tree", {name: TREE.get(name, 9) for name in (*TREE, *HIDDEN)})


def as_list(tree: Path) -> Path:
    lines = [f"./{name}\t{name.split('/')[0]}" for name in (*TREE, *HIDDEN)]
    (tree / "list.txt").write_text("\n".join([*lines[:2], *(f"{tree}/{line[2:]}" for line in lines[2:])]))
    return tree / "list.txt"


def as_parquet(tree: Path) -> Path:
    rows = [{"bytes": (tree / name).read_bytes(), "path": name} for name in TREE]
    return write(tree.with_suffix(".parquet"), {"image": rows, "label": [name.split("/")[0] for name in TREE]})


def as_hdf5(tree: Path) -> Path:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tree.with_suffix(".h5"), "w") as file:
        files = file.create_dataset("files", (len(TREE),), h5py.vlen_dtype(np.uint8))
        for i, name in enumerate(TREE):
            files[i] = np.frombuffer((tree / name).read_bytes(), np.uint8)
        file["label"] = np.array(CLASSES).reshape(-1, 1, 1, 1)
    return tree.with_suffix(".h5")


def by_gnu_tar(tree: Path, form: str) -> Path:
    archive = tree.with_suffix(".tar")
    subprocess.run(["tar", "-C", tree, "--sort=name", f"--format={form}", "-cf", archive, "."], check=True)
    return archive


def webdataset(ending: str, content):
    def write(tree: Path) -> Path:
        files = dict[str, bytes]()
        for name in (*TREE, *HIDDEN):
            files |= {name: (tree / name).read_bytes(), name.replace("png", ending): content(name.split("/")[0])}
        return tar(tree.with_suffix(".tar"), files)

    return write


FORMS = {
    "folder": lambda tree: tree,
    "list": as_list,
    "tar, GNU": lambda tree: by_gnu_tar(tree, "gnu"),
    "tar, pax": lambda tree: by_gnu_tar(tree, "posix"),
    "webdataset, cls": webdataset("cls", str.encode),
    "webdataset, json": webdataset("json", lambda label: json.dumps({"width": 4, "label": label}).encode()),
    "Parquet": as_parquet,
    "HDF5": as_hdf5,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_images(tree, form):
    source = read(FORMS[form](tree))
    assert sorted(reds(source)) == [1, 2, 3, 4, 5]
    labels = {red: source.classes[label] for red, label in zip(reds(source), source.labels, strict=True)}
    names = ["0", "1"] if form == "HDF5" else ["cat", "dog"]
    assert labels == {red: names[label] for red, label in zip(TREE.values(), CLASSES, strict=True)}
    if form not in ("Parquet", "HDF5"):  # which have rows
        found = [os.path.relpath(os.path.join(tree, name), tree) for name in members(source)]
        assert dict(zip(found, reds(source), strict=True)) == TREE
    hidden = f"4 lines are left out, such as {tree}/.trash/7.png: its name, or a folder's, begins with a dot"
    assert getattr(source, "notes", []) == ([hidden] if form == "list" else [])


def test_links_and_files_with_holes_are_counted(tmp_path):
    files = (
        ("a/0.png", tarfile.SYMTYPE, "../b/2.png"), ("a/1.png", 1), ("b/1.png", tarfile.LNKTYPE, "a/1.png"),
        ("c.png", tarfile.SYMTYPE, "/etc/passwd"), ("d", tarfile.SYMTYPE, "a"), ("e.png", tarfile.FIFOTYPE, ""),
        ("f", b"x"), ("g.png", 2),
    )  # fmt: skip
    source = read(tar(tmp_path / "x.tar", *files))
    assert dict(zip(members(source), reds(source), strict=True)) == {"a/1.png": 1, "g.png": 2}
    left_out, links = source.notes
    assert left_out.startswith("1 files that can't be read are left out, such as f: convert images to JPEG")
    assert "5 members like a/0.png are left out: they are links, have holes or are no files" in links
    with open(tmp_path / "0.png", "wb") as file:
        file.truncate(1 << 16)
    for form in ("gnu", "posix", "oldgnu"):
        words = ["tar", "-C", tmp_path, f"--format={form}", "-S", "-cf", tmp_path / "y.tar", "0.png"]
        subprocess.run(words, check=True)
        with pytest.raises(DataError, match=r"no images in .* 1 members like 0\.png are left out"):
            read(tmp_path / "y.tar")


def test_archives_joined_by_cat_are_one(tmp_path):
    parts = [tar(tmp_path / f"{i}.part", (f"{i}.png", i), form=i % 3) for i in range(4)]
    joined = b"".join(part.read_bytes() for part in parts)
    (tmp_path / "x.tar").write_bytes(joined)
    source = read(tmp_path / "x.tar")
    assert reds(source) == [0, 1, 2, 3] and not source.notes
    (tmp_path / "x.tar").write_bytes(joined + b"more" * 200)
    assert "what follows its end mark at byte" in read(tmp_path / "x.tar").notes[0]


def test_keys_with_dots_have_their_own_classes(tmp_path):
    files = ({f"scan.00{i}.png": i, f"scan.00{i}.cls": b"%d" % (i % 2)} for i in range(4))
    source = read(tar(tmp_path / "a.tar", *files))
    assert [source.classes[label] for label in source.labels] == ["0", "1", "0", "1"] and not source.notes
    pairs = ({f"{i}.in.png": i, f"{i}.mask.png": 9, f"{i}.y.cls": b"%d" % i} for i in range(3))
    source = read(tar(tmp_path / "b.tar", *pairs))
    assert [source.classes[label] for label in source.labels] == ["0", "0", "1", "1", "2", "2"]
    assert source.notes == [
        "several images have the same key (in.png of 3, mask.png of 3), and all of them are images of the set, masks "
        "too: FILE.tar:in.png takes one kind"
    ]
    one = read(f"{tmp_path}/b.tar:in.png")
    assert reds(one) == [0, 1, 2] and list(one.labels) == [0, 1, 2] and not one.notes


def test_json_without_a_class_gives_no_labels(tmp_path):
    odd = {"0.png": 0, "0.json": b'{"label": [1]}', "1.png": 1, "1.json": b"{", "2.png": 2, "2.json": b"[]"}
    assert read(tar(tmp_path / "b.tar", odd)).labels is None


def test_other_kinds_are_counted(tmp_path):
    names = [f"x{end}" for end in (".rw2", ".tar.gz", ".zip", ".xyz", "", ".json", ".txt")]
    put(tmp_path / "d", dict.fromkeys(names, b"x"))
    said = "5 files that can't be read are left out, such as x: convert images to JPEG, PNG or TIFF, unpack archives"
    with pytest.raises(DataError, match=f"no images under .*; {said}"):
        read(tmp_path / "d")
    (tmp_path / "d/ok.jpe").write_bytes(png(1))
    os.utime(tmp_path / "d", (1, 1))
    notes = [read(tmp_path / "d").notes for _ in range(2)]  # the second time from the cache
    [note] = notes[0]
    assert notes[1] == [note] and note.startswith(said)
    assert read(tar(tmp_path / "s/a.tar", ("ok.png", 1), *((name, b"x") for name in names))).notes == [note]
    (tmp_path / "s/b.tar.gz").write_bytes(b"")
    assert read(tmp_path / "s").notes[-1] == note.replace("5 files", "1 files").replace("as x:", "as b.tar.gz:")


WITHOUT_ENDING = {
    "JPEG": encoded(photo(), "JPEG"),
    "1.2.840.113619.2": b"\0" * 128 + b"DICM",
    "IM0001": b"\x08\0\x05\0CS",
    "npy": b"\x93NUMPY\1\0",
    "big.tif.7": b"MM\0+",
    **{form: encoded(photo(), form) for form in ("PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000")},
}
OTHERS = {
    "notes": b"P2P notes, BM, GIF",
    "empty": b"",
    "DICOMDIR": b"\0" * 128 + b"DICM",
    "raw.nef": b"II*\0",
    "x.png~": WITHOUT_ENDING["PNG"],
}


def test_files_without_an_ending_are_images_by_their_content(tmp_path):
    files = {**WITHOUT_ENDING, **OTHERS, "a.png": WITHOUT_ENDING["PNG"]}
    put(tmp_path / "d", files)
    os.mkfifo(tmp_path / "d/pipe")  # would wait for a writer
    shard = tar(tmp_path / "s/a.tar", *files.items())
    for root, left_out in ((tmp_path / "d", 5), (shard, 4)):
        source = read(root)
        assert set(members(source)) == {*WITHOUT_ENDING, "a.png"}
        [note] = source.notes
        assert note.startswith(f"{left_out} files that can't be read are left out, such as empty: ")
    assert with_own_images(load_recipe("cifar10", {"data.root": str(tmp_path / "d")}), ["data.root"], []).data.own_files


def test_a_folder_of_save_to_disk_is_answered_with_what_to_type(tmp_path):
    names = "data-00000-of-00001.arrow", "state.json", "dataset_info.json"
    for root, place in ((tmp_path / "set", "set/SPLIT"), (tmp_path / "set/train", "set/train")):
        put(tmp_path / "set", dict.fromkeys([*(f"train/{name}" for name in names), "dataset_dict.json"], b"{}"))
        said = f"load_from_disk('{tmp_path}/{place}').to_parquet('images.parquet')\", then give images.parquet"
        with pytest.raises(DataError, match=re.escape(said)):
            read(root)


PLACEHOLDERS = {
    "a pointer of Git LFS in place of the file: git lfs pull": b"version https://git-lfs.github.com/spec/v1\noid",
    "a web page in place of the file: download it again": b"\n<!DOCTYPE html><html><title>404</title>",
}


@pytest.mark.parametrize("said", PLACEHOLDERS)
@pytest.mark.parametrize("ending", ["png", "tif", "tar", "parquet", "h5"])
def test_what_stands_in_a_file_s_place_is_said(tmp_path, ending, said):
    path = tmp_path / f"x.{ending}"
    path.write_bytes(PLACEHOLDERS[said])
    archive = ending in ("tar", "parquet", "h5")
    with pytest.raises(DataError if archive else UnreadableImage, match=said):
        read(path if archive else tmp_path).load(0)

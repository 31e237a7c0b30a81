"""Parquet files with a column of images."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import pytest

from dino_ds.data import parquet
from dino_ds.data.images import UnreadableImage
from dino_ds.errors import ConfigError, DataError
from tests.data.files import png, read, reds


def write(path: Path, columns: dict, names: list[str] | None = None, rows: int = 3) -> Path:
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(columns)
    if names:
        features = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({b"huggingface": json.dumps(features).encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_table(table, path, row_group_size=rows)
    return path


def struct(values) -> list[dict]:
    return [{"bytes": png(value), "path": f"{value}.png"} for value in values]


def test_hugging_face_files_by_pattern_and_as_a_folder(tmp_path):
    names = ["owl", "cat", "dog"]
    write(tmp_path / "d/train-0.parquet", {"image": struct(range(7)), "label": [2, 0, 2, 0, 2, 0, -1]}, names)
    write(tmp_path / "d/train-1.parquet", {"image": struct([7, 8]), "label": [0, None]}, names)
    for root in (tmp_path / "d", tmp_path / "d/train-*.parquet"):
        source = read(root)
        assert reds(source) == list(range(9))
        assert source.labels == [2, 0, 2, 0, 2, 0, -1, 0, -1] and source.classes == names
    assert source.name(8) == f"{tmp_path}/d/train-1.parquet/1"
    assert source.member(8) == "train-1/000000001"
    assert source.read(3) == png(3)
    assert reds(pickle.loads(pickle.dumps(source))) == list(range(9))


def test_labels_of_any_kind_of_whole_numbers_and_texts(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string())):
        labels = pyarrow.array(["dog", "cat"], kind)
        source = read(write(tmp_path / "a.parquet", {"x": [1, 2], "jpeg": [png(5), png(6)], "label": labels}))
        assert reds(source) == [5, 6] and source.labels == [1, 0] and source.classes == ["cat", "dog"]
        assert source.notes == []
    source = read(write(tmp_path / "a.parquet", {"image": struct(range(2)), "label": [0.5, None]}))
    note = "the column label (double) of the Parquet files is not read as classes: it must be whole numbers or texts"
    assert source.labels is None and source.notes == [note]
    write(tmp_path / "d/a.parquet", {"image": struct(range(2)), "label": [0, 1]})
    for columns, said in (
        ({"image": struct([2])}, "has no column label"),
        ({"image": struct([2]), "label": ["a"]}, "has another type in the column label, string"),
        ({"img": struct([2]), "label": [1]}, "has no column image"),
    ):
        write(tmp_path / "d/b.parquet", columns)
        with pytest.raises(DataError, match=rf"d/b\.parquet {said}, unlike .*d/a\.parquet: write all files alike"):
            read(tmp_path / "d")


def test_rows_without_an_image_are_unreadable_one_by_one(tmp_path):
    images = [{"bytes": None, "path": "x.png"}, None, {"bytes": b"", "path": None}, *struct([4])]
    source = read(write(tmp_path / "a.parquet", {"image": images}))
    for index, reason in enumerate(("no bytes in this row", "no bytes in this row", "empty file")):
        with pytest.raises(UnreadableImage, match=reason):
            source.load(index)
    assert source.load(3)


def test_columns_that_hold_no_images_or_leave_a_choice_are_refused(tmp_path):
    """As datasets writes them with embed_external_files=False; one row with bytes is a row with bytes."""
    pyarrow = pytest.importorskip("pyarrow")
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    paths = [{"bytes": None, "path": f"{i}.png"} for i in range(5)]
    texts = [row["path"] for row in paths]
    for columns, said in (
        ({"image": pyarrow.array(paths, kind)}, r"has no bytes in its column image: .* a \.txt list"),
        ({"image": texts}, "has no column of image files; .* image: string; paths in a column of texts"),
        ({"left": [b"1"], "right": [b"2"]}, r"several columns of bytes \(left, right\), none called image"),
    ):
        with pytest.raises(DataError, match=said):
            read(write(tmp_path / "a.parquet", columns))
    assert len(read(write(tmp_path / "a.parquet", {"image": [*paths, *struct([4])]}))) == 6


def test_a_file_that_is_none_is_named(tmp_path):
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"b\.parquet cannot be read as Parquet"):
        read(tmp_path / "b.parquet")


def test_a_group_too_large_is_refused_before_it_is_read_and_rows_that_repeat_while_they_are(tmp_path, monkeypatch):
    """17 kB can stand for any number of rows of half a gigabyte, which the footer counts once."""
    sizes = [300_000, 300_001, 300_002, 300_003]
    repeated, whole = [bytes(400_000)] * 4, [bytes(size) for size in sizes]
    monkeypatch.setattr(parquet, "_MOST_BYTES", 1_000_000)
    source = read(write(tmp_path / "repeated.parquet", {"image": repeated, "label": [0, 1, 0, 1]}, rows=4))
    with pytest.raises(UnreadableImage, match="more than 0 MiB in the column image of row group 0"):
        source.read(3)
    path = write(tmp_path / "whole.parquet", {"image": whole}, rows=4)
    with pytest.raises(DataError, match=r"row group 0 of .*whole.parquet holds .*: write groups of 100"):
        read(path)
    with pytest.raises(DataError, match="more than 0 MiB in the column label of row group 0"):
        read(write(tmp_path / "labels.parquet", {"image": [b"1"] * 4, "label": ["x" * 400_000] * 4}, rows=4))
    monkeypatch.setattr(parquet, "_MOST_BYTES", 1_300_000)
    source = read(path)
    assert [source.read(index) for index in range(4)] == whole


def test_without_pyarrow_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pip install 'dino_ds\[parquet\]'"):
        read(tmp_path / "a.parquet")

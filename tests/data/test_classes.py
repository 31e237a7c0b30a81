"""Class numbers are matched by name wherever two files of images meet, in every form and for every consumer."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from dino_ds.commands.embedding_parts import _named
from dino_ds.commands.find import Embedded
from dino_ds.config.sections import DataSection
from dino_ds.data.listing import join_classes
from dino_ds.data.root import open_files
from dino_ds.data.sources import recipe_images
from dino_ds.errors import DataError
from dino_ds.evals.context import EvalContext, Settings
from tests.data.files import put, read, reds, tar
from tests.data.servers import serving
from tests.data.test_parquet import struct, write
from tests.evals.tiny import Colors
from tests.sample import sampled

REDS = {"cat": 10, "dog": 20, "horse": 30, "owl": 40}
"""The color of each class's images."""
SETS = {"a": ["cat", "dog", "owl"], "b": ["horse", "owl", "cat"]}
"""Classes of two sets, in the order of their numbers; the images are in the same order."""


def as_folder(place: Path, names: list[str]) -> Path:
    return put(place, {f"{name}/0.png": REDS[name] for name in names})


def as_list(place: Path, names: list[str]) -> Path:
    as_folder(place, names)
    (place / "list.txt").write_text("".join(f"{name}/0.png\t{name}\n" for name in names))
    return place / "list.txt"


def as_tar(place: Path, names: list[str]) -> Path:
    put(place, {"classes.txt": "".join(f"{name}\n" for name in names).encode()})
    return tar(place / "0.tar", *({f"{i}.png": REDS[name], f"{i}.cls": b"%d" % i} for i, name in enumerate(names)))


def as_parquet(place: Path, names: list[str]) -> Path:
    columns = {"image": struct(REDS[name] for name in names), "label": list(range(len(names)))}
    return write(place / "0.parquet", columns, names)


def as_partitions(place: Path, names: list[str]) -> Path:
    for name in names:
        write(place / f"label={name}/0.parquet", {"image": struct([REDS[name]])})
    return place


FORMS = {"folder": as_folder, "list": as_list, "tar": as_tar, "Parquet": as_parquet, "partitions": as_partitions}


def colors(source) -> dict[int, str]:
    return {red: source.classes[label] for red, label in zip(reds(source), source.labels, strict=True)}


WANTED = {red: name for name, red in REDS.items()}
PATTERNS = {"tar": "{a,b}/*.tar", "Parquet": "{a,b}/*.parquet", "partitions": "{a,b}/*/*.parquet"}


@pytest.mark.parametrize("form", [*PATTERNS, "tar, remote", "Parquet, remote"])
def test_files_of_one_pattern(tmp_path, form):
    kind, _, remote = form.partition(", ")
    for name, classes in SETS.items():
        FORMS[kind](tmp_path / name, classes)
    with serving(tmp_path) as server:
        place = f"{server.url}/{PATTERNS[kind].replace('*', '0')}" if remote else f"{tmp_path}/{PATTERNS[kind]}"
        source = open_files(place)
        assert colors(source) == WANTED
    if not remote:  # what is written for others: rows of embed, lists of curate
        names = [WANTED[red] for red in reds(source)]
        assert [_named(source, i)[2] for i in range(len(source))] == names
        lists = Embedded(np.zeros((len(source), 1)), source, {}, 1, []).listed(range(len(source)))
        assert lists[0] == ".csv"


@pytest.mark.parametrize(("one", "other"), sampled(itertools.product(FORMS, FORMS)))
def test_parts_of_a_mixture_and_training_and_test_images(tmp_path, one, other):
    roots = [FORMS[form](tmp_path / name, SETS[name]) for form, name in ((one, "a"), (other, "b"))]
    mixture = recipe_images(DataSection(source="folder", mixture=tuple(f"{root}=0.5" for root in roots)))
    assert colors(mixture) == WANTED
    assert not mixture.notes
    test = FORMS[other](tmp_path / "test", ["owl", "cat"])
    how = Settings(workers=0), torch.device("cpu"), lambda: (mixture, read(test))
    context = EvalContext(Colors(), *how, progress=False)
    names = [mixture.classes[label] for label in context.test.labels.tolist()]
    assert names == [WANTED[red] for red in reds(read(test))]


def test_two_classes_of_one_name_stay_two():
    classes, numbers = join_classes([["crane", "dog", "crane"], ["crane", "crane"]])
    assert classes == ["crane", "dog", "crane"]
    assert [one.tolist() for one in numbers] == [[0, 1, 2, -1], [0, 2, -1]]


@pytest.mark.parametrize("form", ["tar", "Parquet", "HDF5"])
def test_numbers_without_names_are_refused_beside_names_and_else_said(tmp_path, form):
    def unnamed(name: str) -> Path:
        if form == "tar":
            return tar(tmp_path / name / "0.tar", ("0.png", 1), ("0.cls", b"0"))
        if form == "Parquet":
            return write(tmp_path / name / "0.parquet", {"image": struct([1]), "label": [0]})
        with pytest.importorskip("h5py").File(tmp_path / f"{name}.h5", "w") as file:
            file["images"], file["label"] = np.full((1, 8, 8, 3), 1, np.uint8), np.zeros(1, int)
        (tmp_path / name).mkdir()
        return (tmp_path / f"{name}.h5").rename(tmp_path / f"{name}/0.h5")

    roots = [unnamed("u"), unnamed("v")]
    ending = roots[0].suffix
    mixture = DataSection(source="folder", mixture=tuple(f"{root}=0.5" for root in roots))
    for source in (read(f"{tmp_path}/{{u,v}}/*{ending}"), recipe_images(mixture)):
        assert "are numbers without names: equal numbers are taken for the same class" in source.notes[0]
    assert read(roots[0]).notes == []
    if form == "HDF5":
        return  # has no names
    FORMS[form](tmp_path / "a", SETS["a"])
    with pytest.raises(DataError, match=r"without names.*or give .* as parts of data\.mixture"):
        read(f"{tmp_path}/{{a,u}}/*{ending}")
    if form == "tar":  # not as it was first read
        (tmp_path / "u/classes.txt").write_text("owl\n")
        assert read(f"{tmp_path}/{{a,u}}/*.tar").classes == SETS["a"]


def test_an_hdf5_file_without_labels_costs_the_others_none(tmp_path):
    h5py = pytest.importorskip("h5py")
    for name in "ab":
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["images"] = np.zeros((2, 8, 8, 3), np.uint8)
            file.update({"label": np.array([3, 5])} if name == "b" else {})
    source = read(tmp_path)
    assert list(source.labels) == [-1, -1, 0, 1] and source.classes == ["3", "5"]


def test_partitions(tmp_path):
    """Folders KEY=VALUE, as a whole; names are unquoted, empty ones are none, and keys of no label are said."""
    for part, label in ((0, "a%20b"), (1, "a%20b"), (0, "c"), (0, "__HIVE_DEFAULT_PARTITION__")):
        write(tmp_path / f"x/part={part}/label={label}/0.parquet", {"image": struct([1, 2])})
        write(tmp_path / f"y/part={part}/species={label}/0.parquet", {"image": struct([1])})
    source = read(tmp_path / "x")
    assert source.classes == ["a b", "c"] and sorted(source.labels) == [-1] * 2 + [0] * 4 + [1] * 2 and not source.notes
    other = read(tmp_path / "y")
    assert other.labels is None and other.notes == ["folders part=…, species=… give no classes: call them label=…"]

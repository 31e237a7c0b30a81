"""Images held out of training by a hash of their names."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
from pathlib import Path

import pytest

from dino_ds.config.sections import DataSection
from dino_ds.data.sources import Part, build_source, split_off, training_images
from dino_ds.errors import ConfigError, DataError
from tests.data.files import png
from tests.data.test_changed_files import WRITERS
from tests.run.harness import image_folder


def _members(part: Part) -> set[str]:
    return {part.member(index) for index in range(len(part))}


def test_no_image_is_on_both_sides_and_none_changes_sides(tmp_path):
    roots = [image_folder(tmp_path / name, count, 2) for name, count in (("a", 60), ("b", 90))]
    wholes = [build_source("folder", str(root), "train", False) for root in roots]
    (train, held_out), (more, more_out) = (
        split_off(whole, str(root), 0.3) for whole, root in zip(wholes, roots, strict=True)
    )
    assert not _members(train) & _members(held_out) and len(train) + len(held_out) == 60
    assert 9 <= len(held_out) <= 27  # 18, four deviations
    assert _members(train) < _members(more) and _members(held_out) < _members(more_out)
    there = pickle.loads(pickle.dumps(held_out))
    place = next(i for i in range(60) if wholes[0].member(i) == there.member(0))
    assert there.read(0) == wholes[0].read(place) and there.name(0) == wholes[0].name(place)
    assert there.labels[0] == wholes[0].labels[place] and there.load(0).size == wholes[0].load(place).size


def test_the_spelling_of_a_list_s_lines_holds_out_the_same_images(tmp_path):
    home = tmp_path / "home"
    (tmp_path / "link").symlink_to(home)

    def held_out(folder, *prefixes, beside=""):
        (folder / beside).mkdir(exist_ok=True)
        text = "".join(f"{prefixes[i % len(prefixes)]}a/{i:03d}.png\n" for i in range(40))
        (folder / beside / "list.txt").write_text(text)
        part = split_off(build_source("folder", str(folder / beside / "list.txt"), "train", False), None, 0.3)[1]
        return {part.name(i).rpartition("/")[2] for i in range(len(part))}

    image_folder(home / "a", 40)
    wanted = held_out(home, "")
    assert 4 < len(wanted) < 20
    for prefixes in (("./",), ("a/../",), (f"{home}/",), (f"{tmp_path}/link/",), ("", f"{home}//./")):
        assert held_out(home, *prefixes) == wanted, prefixes
    outside = held_out(home, "../", beside="lists")
    assert held_out(home, f"{home}/", beside="others") == held_out(home, "../../link/", beside="c") == outside
    moved = shutil.copytree(home / "a", tmp_path / "moved/a").parent
    assert held_out(moved, "") == held_out(moved, f"{moved}/") == wanted


def test_training_does_not_see_what_is_held_out(tmp_path):
    root = str(image_folder(tmp_path / "images", 40))
    assert isinstance(training_images(DataSection(root=root), 0.3), Part)
    with pytest.raises(DataError, match="holds 0 out and leaves 40"):
        training_images(DataSection(root=root), 1e-6)


@pytest.mark.parametrize(
    "more", [{"balance": "classes"}, {"mixture": ("a=0.5", "b=0.5")}], ids=lambda more: next(iter(more))
)
def test_a_share_of_what_is_not_drawn_equally_often_is_refused(more, tmp_path):
    with pytest.raises(ConfigError, match=f"data.{next(iter(more))}: give eval.val_root"):
        training_images(DataSection(root=str(tmp_path), **more), 0.3)


def _linked_files(link):
    def make(home: Path) -> Path:
        (home / "b").mkdir()
        for path in (home / "a").iterdir():
            link(path, home / "b" / f"other {path.name}")
        return home / "b"

    return make


def _archive(form: str, link):
    def make(home: Path) -> Path:
        shutil.rmtree(home / "a")
        for name in "ab":
            (home / name).mkdir()
        WRITERS[f"0.{form}"](home / f"a/x.{form}", {f"{i}.png": png(i) for i in range(40)})
        link(home / f"a/x.{form}", home / f"b/y.{form}")
        return home / "b"

    return make


SECOND_NAMES = {
    "links of files": _linked_files(lambda path, link: link.symlink_to(path)),
    "hard links": _linked_files(os.link),
    "a link of the folder": lambda home: (home / "b").symlink_to(home / "a") or home / "b",
    "a detour": lambda home: home / "c/../a",
    "tar": _archive("tar", os.link),
    "parquet": _archive("parquet", os.link),
    "h5": _archive("h5", os.symlink),
}


@pytest.fixture(params=SECOND_NAMES)
def named_twice(request, tmp_path):
    """A folder of 40 images, another name of it or of all its files, and the ending of a pattern of archives."""
    home = tmp_path / "home"
    image_folder(home / "a", 40)
    (home / "c").mkdir()
    second = SECOND_NAMES[request.param](home)
    return home / "a", second, request.param if len(os.listdir(home / "a")) == 1 else ""


def _listed(*folders: Path) -> str:
    paths = [f"{folder}/{name}" for folder in folders for name in sorted(os.listdir(folder))]
    (folders[0].parent / "list.txt").write_text("".join(f"{path}\n" for path in paths))
    return str(folders[0].parent / "list.txt")


def _keys(*parts: Part) -> list[set[int]]:
    return [set(part.file_keys().tolist()) for part in parts]


def test_all_names_of_a_file_are_on_its_side(named_twice, tmp_path):
    first, second, archives = named_twice

    def sides(*folders: Path) -> tuple[Part, Part]:
        names = ",".join(folder.name for folder in folders)
        root = f"{first.parent}/{{{names}}}/*.{archives}" if archives else _listed(*folders)
        return split_off(build_source("folder", root, "train", False), None, 0.3)

    for folders in itertools.permutations((first, second)):
        train, held_out = _keys(*sides(*folders))
        assert not train & held_out and len(train | held_out) == 40 and 4 <= len(held_out) <= 20
        assert sum(map(len, sides(*folders))) == 80
        links = os.path.realpath(second) != str(second) or all(path.is_symlink() for path in second.iterdir())
        if not archives and (folders[0] == first or links):
            assert _keys(*sides(first)) == [train, held_out]


def test_a_mixture_of_both_names_is_refused(named_twice):
    data = DataSection(source="folder", mixture=tuple(f"{folder}=0.5" for folder in named_twice[:2]))
    with pytest.raises(ConfigError, match=r"a and .* are the same place or images: give it once"):
        training_images(data, 0.0)

"""Images held out of training by a hash of their names."""

from __future__ import annotations

import pickle
import shutil

import pytest

from dino_ds.config.sections import DataSection
from dino_ds.data.sources import Part, build_source, split_off, training_images
from dino_ds.errors import ConfigError, DataError
from tests.run.harness import image_folder


def _members(part: Part) -> set[str]:
    return {part.member(index) for index in range(len(part))}


def test_no_image_is_on_both_sides_and_none_changes_sides(tmp_path):
    """Whatever is added, and wherever the folder lies; each side can do what the whole source can."""
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
    """Relative, whole, with detours, through links, in a list that lies elsewhere, and after the folder has moved."""
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
    train = training_images(DataSection(root=root), 0.3)
    assert isinstance(train, Part) and not _members(train) & _members(train.others)
    assert len(training_images(DataSection(root=root), 0.0)) == 40
    with pytest.raises(DataError, match="holds 0 out and leaves 40"):
        training_images(DataSection(root=root), 1e-6)


@pytest.mark.parametrize(
    "more", [{"balance": "classes"}, {"mixture": ("a=0.5", "b=0.5")}], ids=lambda more: next(iter(more))
)
def test_a_share_of_what_is_not_drawn_equally_often_is_refused(more, tmp_path):
    with pytest.raises(ConfigError, match=f"data.{next(iter(more))}: give eval.val_root"):
        training_images(DataSection(root=str(tmp_path), **more), 0.3)

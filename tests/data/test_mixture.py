"""data.mixture and data.balance: several sources as one, what an epoch draws, what is refused or noticed later."""

from __future__ import annotations

import itertools
import shutil
import tarfile
from contextlib import closing
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dino_ds.config.crops import all_crops
from dino_ds.config.loading import change_recipe, dump_recipe, load_recipe
from dino_ds.config.sections import parse_mixture
from dino_ds.data.batches import LoaderOptions
from dino_ds.data.feed import Position
from dino_ds.data.image_set import ImageSet
from dino_ds.data.loader import Loader
from dino_ds.data.mixture import Draws
from dino_ds.data.normalization import with_image_settings
from dino_ds.data.sources import training_images
from dino_ds.errors import ConfigError, DataError
from tests.data.test_loader import CROPS
from tests.run.harness import image_folder


def recipe_with(root, mixture, **data):
    values = {"data.root": str(root), "data.mixture": mixture} | {f"data.{key}": value for key, value in data.items()}
    return load_recipe("vits16", values)


def source_with(root, mixture, **data):
    return training_images(recipe_with(root, mixture, **data).data, 0.0)


def loaded(source, count, **options):
    options = LoaderOptions(global_batch=6, micro_batch=6, seed=1, **options)
    with closing(Loader(source, CROPS, options, Position())) as loader:
        return list(itertools.islice(loader, count))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """mine: 4 images in 2 classes; theirs: 12 in 3, of which 2 are called as mine; plain: 5 without classes."""
    place = tmp_path_factory.mktemp("root")
    image_folder(place / "mine", 4, classes=2, seed=1)
    image_folder(place / "theirs", 12, classes=3, seed=2)
    image_folder(place / "plain", 5, seed=3)
    return place


def test_command_line_and_yaml_say_the_same(root, tmp_path):
    line = recipe_with(root, "mine=0.7,theirs=0.3")
    assert line.data.mixture == ("mine=0.7", "theirs=0.3")
    for text in ("{mine: 0.7, theirs: 0.3}", "[mine=0.7, theirs=0.3]", "mine=0.7, theirs=0.3"):
        (tmp_path / "own.yaml").write_text(f"data:\n  root: {root}\n  mixture: {text}\n")
        assert load_recipe(f"vits16,{tmp_path / 'own.yaml'}", {}).data == line.data
    (tmp_path / "dumped.yaml").write_text(dump_recipe(line))
    assert load_recipe(str(tmp_path / "dumped.yaml"), {}) == line == change_recipe(line, {"data.workers": "none"})


def test_places_may_hold_what_separates_entries():
    places = ["/a/{x,y}-{000..010}.tar", "/b=c/d", "e f", "/h.h5:/images"]
    parts = parse_mixture([f"{place}=0.25" for place in places])
    assert [part.place for part in parts] == places
    text = ",".join(f"{place}=0.25" for place in places)
    assert load_recipe("vits16", {"data.mixture": text}).data.parts == parts


@pytest.mark.parametrize(
    ("mixture", "said"),
    [
        ("mine=0.7,theirs=0.2", "the shares add up to 0.9, and must add up to 1"),
        ("mine=0.5,mine=0.5", "mine is named twice"),
        ("mine=1", "there is one source; name it as data.root instead"),
        ("mine=0.5,theirs=-0.5", "'theirs=-0.5' is not PLACE=SHARE"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_with_the_recipe(root, mixture, said):
    with pytest.raises(ConfigError) as error:
        recipe_with(root, mixture)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_sources_that_do_not_fit_are_refused_by_name(root, tmp_path):
    def refused(mixture, below=root, **data):
        with pytest.raises((ConfigError, DataError)) as error:
            source_with(below, mixture, **data)
        assert "\n" not in str(error.value)
        return str(error.value)

    (root / "empty").mkdir(exist_ok=True)
    (root / "link").unlink(missing_ok=True)
    (root / "link").symlink_to(root / "mine")
    assert "mine and link are the same place" in refused("mine=0.5,link=0.5")
    (root / "list.txt").write_text(f"plain/000.png\n{root}/link/class0/000.png\n")
    (root / "tars").mkdir(exist_ok=True)
    for name in ("a", "b"):
        with tarfile.open(root / f"tars/{name}.tar", "w") as archive:
            archive.add(root / "plain/000.png", f"{name}.png")
    for mixture, inner, outer in (
        ("mine/class0=0.5,link=0.5", "mine/class0", "link"),
        ("list.txt=0.5,mine=0.5", "list.txt", "mine"),
        ("tars/a.tar=0.5,tars=0.5", "tars/a.tar", "tars"),
    ):
        assert f"images of {inner} lie in {outer} too" in refused(mixture), mixture
    assert "both" in refused("tars/{a,b}.tar=0.5,tars/b.tar=0.5")
    assert len(source_with(root, "tars=0.5,list.txt=0.5")) == 4
    assert "data.mixture: empty: no images under data.root" in refused("mine=0.5,empty=0.5")
    assert "data.mixture: gone: " in refused("mine=0.5,gone=0.5")
    assert "data.source is cifar10: set it to folder" in refused("mine=0.5,theirs=0.5", source="cifar10")
    assert "mine is relative: give --data.root" in refused("mine=0.5,theirs=0.5", below="none")
    bands = tmp_path / "bands"
    bands.mkdir()
    np.save(bands / "0.npy", np.zeros((40, 40, 5), np.uint8))
    recipe = recipe_with(root, f"mine=0.5,{bands}=0.5")
    with pytest.raises(ConfigError, match=f"data.mixture: {bands}: model.in_chans is 3, and images .* have 5 channels"):
        with_image_settings(recipe, training_images(recipe.data, 0.0))


def test_a_share_of_no_image_is_refused(root):
    with pytest.raises(ConfigError, match=r"plain with a share of 0\.01 gives none of the 9 images of an epoch"):
        source_with(root, "mine=0.99,plain=0.01")


def test_classes_of_one_name_are_one(root):
    source = source_with(root, "mine=0.5,theirs=0.3,plain=0.2")
    assert source.classes == ["class0", "class1", "class2"]
    assert list(source.labels) == [0, 0, 1, 1, *[0] * 4, *[1] * 4, *[2] * 4, *[-1] * 5]
    first = root / "theirs/class0/000.png"
    assert (source.name(4), source.read(4)) == (str(first), first.read_bytes())


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_repeats_of_an_image_have_crops_of_their_own(root, workers):
    source = source_with(root, "mine=0.9,theirs=0.1")
    rows = {
        (name, int(index)): all_crops(batch.crops)[0][row].flatten().tolist()
        for batch in loaded(source, 2, workers=workers)
        for row, (name, index) in enumerate(zip(batch.names, batch.indices, strict=True))
    }
    assert sum("/mine/" in name for name, _ in rows) == 11  # 10.8 of 12
    assert len({name for name, _ in rows}) < len(rows) == 12
    assert len({tuple(crop) for crop in rows.values()}) == 12


def test_an_unreadable_image_gives_way_to_one_of_its_source(root, tmp_path):
    mixed = shutil.copytree(root, tmp_path / "root", symlinks=True)
    for name in ("class0/000", "class0/002", "class1/001"):
        (mixed / f"mine/{name}.png").write_bytes(b"")
    names = [name for batch in loaded(source_with(mixed, "mine=0.5,theirs=0.5"), 4) for name in batch.names]
    assert {name for name in names if "/mine/" in name} == {f"{mixed}/mine/class1/003.png"}
    assert sum("/mine/" in name for name in names) == 12


def test_other_classes_are_named_by_source(root, tmp_path):
    mixed = shutil.copytree(root, tmp_path / "root", symlinks=True)
    before, again = (
        ImageSet.of(source_with(at, "mine=0.5,theirs=0.5", balance="classes"), None) for at in (root, mixed)
    )
    assert before.changes(again) == "" and ImageSet.from_json(before.to_json()) == before
    (mixed / "theirs/class1").rename(mixed / "theirs/class9")
    renamed = ImageSet.of(source_with(mixed, "mine=0.5,theirs=0.5", balance="classes"), None)
    assert "theirs: 12 images as before" in before.changes(renamed)


def _drawn(source, images):
    return [name for batch in loaded(source, images // 6) for name in batch.names]


def test_classes_are_drawn_equally_often(tmp_path):
    """Within each source of a mixture."""
    image_folder(tmp_path / "a/common", 23)
    image_folder(tmp_path / "a/rare", 1, seed=1)
    image_folder(tmp_path / "b", 12, classes=3)
    both = _drawn(source_with(tmp_path, "a=0.5,b=0.5", balance="classes"), 36)
    counts = [sum(part in name for name in both) for part in ("/rare/", "/common/", "class0", "class1", "class2")]
    assert counts == [9, 9, 6, 6, 6]


def test_clusters_come_from_a_file(tmp_path):
    folder, file = image_folder(tmp_path / "images", 12), tmp_path / "clusters.csv"
    rows = [f"{folder}/{i:03d}.png,0,{'' if i == 11 else min(i, 2)}" for i in range(12)]

    def source(lines, head="name,label,cluster"):
        file.write_text("\n".join([head, *lines]) + "\n")
        return source_with(folder, "", balance=f"clusters:{file}")

    names = _drawn(balanced := source(rows), 12)
    assert sum(name.endswith(("000.png", "001.png")) for name in names) == 8
    assert not any(name.endswith("011.png") for name in names)
    assert "data.balance clusters: 1 images have none, and are never drawn" in balanced.notes
    moved = [row.replace(str(folder), "/elsewhere") for row in rows]
    assert _drawn(source(moved), 12) == names
    for lines, head, said in (
        (rows[:-1], "name,label,cluster", "has 11 rows, and there are 12 images"),
        ([rows[1], rows[0], *rows[2:]], "name,label,cluster", r"row 1 .*001.png, .* 1 .*000.png"),
        (rows, "name,label,class", "does not name the columns name and cluster"),
    ):
        with pytest.raises(DataError, match=said):
            source(lines, head)
    source(rows)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # as Excel writes UTF-8
    assert _drawn(source_with(folder, "", balance=f"clusters:{file}"), 12) == names
    file.write_bytes(b"name,cluster\n\xff\xfe")
    for balance, said in (
        (f"clusters:{file}", r"is no \.csv in UTF-8"),
        (f"clusters:{tmp_path}/gone.csv", "cannot be read: No such file"),
        ("classes", "the images have no classes"),
        ("cluster", "is not none, classes, or clusters:FILE"),
    ):
        with pytest.raises((ConfigError, DataError), match=said):
            source_with(folder, "", balance=balance)


def made(sizes, shares):
    parts = np.repeat(np.arange(len(sizes)), [sum(part) for part in sizes])
    flat = [size for part in sizes for size in part]
    groups = np.repeat(np.arange(len(flat)), flat)
    return Draws(shares, parts, groups), parts, groups


SIZES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.lists(st.integers(1, 20), min_size=4, max_size=4), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_sources_and_groups_get_their_number_of_each_epoch(sizes, weights, epoch, seed):
    """To one image: of each source its share of the epoch, of each group an equal part of its source's."""
    weights = weights[: len(sizes)]
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    draws, parts, groups = made(sizes, shares)
    length = len(parts) - len(parts) % 3 or 1
    order = draws.epoch(seed, epoch, length).numpy()
    assert len(set(order.tolist())) == len(order) == length  # repeats differ, so that their crops do
    of_part = np.bincount(parts[order % len(parts)], minlength=len(sizes))
    assert all(abs(found - share * length) < 1 for found, share in zip(of_part, shares, strict=True))
    of_group, first = np.bincount(groups[order % len(parts)], minlength=groups.max() + 1), 0
    for part, inner in enumerate(sizes):
        own = of_group[first : first + len(inner)]
        assert own.sum() == of_part[part] and own.max() - own.min() <= 1
        first += len(inner)


def test_the_images_of_a_group_are_drawn_equally_often():
    """To one, after any number of epochs: a pass through a group goes on in the next epoch."""
    draws, parts, groups = made([[5, 2], [11]], [Fraction(7, 10), Fraction(3, 10)])
    total = np.zeros(len(parts), int)
    for epoch in range(9):
        total += np.bincount(draws.epoch(0, epoch, 17).numpy() % len(parts), minlength=len(parts))
        for group in range(3):
            own = total[groups == group]
            assert own.max() - own.min() <= 1
    assert total.sum() == 9 * 17

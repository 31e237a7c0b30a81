"""Sources by name and folders of images; what is missing is one line; what a checkpoint says of its images."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dino_ds.data
from dino_ds.basics.own_code import allow_code
from dino_ds.config.fields import SOURCES
from dino_ds.config.loading import load_recipe
from dino_ds.data import sources
from dino_ds.data.image_set import ImageSet
from dino_ds.data.images import UnreadableImage
from dino_ds.data.sources import build_source
from dino_ds.errors import ConfigError, DataError, UserError
from tests.data.files import ORANGE, put, read, tar
from tests.data.test_loader import batches
from tests.run.harness import image_folder


def save(path: Path, color: tuple[int, int, int] = ORANGE, size: tuple[int, int] = (12, 8)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return path


@pytest.mark.parametrize("places", [("", ""), ("cat", ""), ("one", "one"), ("train", "val")])
def test_a_tree_without_classes_has_no_labels(tmp_path, places):
    for number, place in enumerate(places):
        save(tmp_path / place / f"{number}.png")
    source = read(tmp_path)
    assert len(source) == 2 and source.labels is None and source.classes is None


def test_links_are_followed_once_and_loops_end(tmp_path):
    save(tmp_path / "elsewhere/x.png")
    root = tmp_path / "root"
    save(root / "zebra/a.png")
    (root / "alias").symlink_to(root / "zebra")
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "zebra/loop").symlink_to(root)
    source = read(root)
    assert [os.path.relpath(source.name(i), root) for i in range(len(source))] == ["linked/x.png", "zebra/a.png"]


def test_what_is_no_folder_is_said_with_the_nearest(tmp_path):
    (tmp_path / "images").mkdir()
    save(tmp_path / "one.png")
    save(tmp_path / "run/checkpoints/step_00000002/map.png")
    for name in ("features.npy", "features.npy.json"):
        (tmp_path / name).write_text("{}")
    for name, said in (
        ("imagse", f"{tmp_path}/imagse does not exist. Did you mean {tmp_path}/images?"),
        ("zzz/zzz", f"{tmp_path}/zzz/zzz does not exist (its part {tmp_path} does)"),
        ("one.png", "one.png is a single image: give the folder"),
        ("features.npy", "features.npy is a file of features: give the folder of the images"),
        ("run", "is the folder of a run: give the folder of the images"),
    ):
        with pytest.raises(DataError, match=re.escape(said)):
            read(tmp_path / name)


def test_folder_without_images_says_what_was_looked_at(tmp_path):
    put(tmp_path / "x", {f"{name}/notes.txt": b"" for name in "abc"})
    said = r"no images under .* \(looked for .jpg .* in 3 files, 3 folders: a b c; a .txt list may .*$"
    with pytest.raises(DataError, match=said):
        read(tmp_path / "x")


def test_train_and_test_patches_share_no_pixel(monkeypatch):
    columns = np.broadcast_to((np.arange(200) * 255 // 199).astype(np.uint8), (256, 200))
    monkeypatch.setattr(sources, "_load_photos", lambda: iter([("ramp", Image.fromarray(columns).convert("RGB"))]))
    monkeypatch.setattr(sources, "_SIDES", (40, 56))
    train, test = sources.PhotoPatches("train"), sources.PhotoPatches("test")
    assert max(np.asarray(train.load(i)).max() for i in range(len(train))) <= 0.6 * 255
    assert min(np.asarray(test.load(i)).min() for i in range(len(test))) >= 0.7 * 255 - 1


def test_every_photo_is_in_the_notice():
    here = Path(dino_ds.data.__file__).parent / "photos"
    notice = (here / "NOTICE.md").read_text()
    assert all(f"| {file.name} |" in notice for file in here.glob("*.jpg"))


def test_unknown_sources_and_missing_images_are_refused(tmp_path):
    assert set(SOURCES) == {"folder", "photos", *sources.TORCHVISION_SETS}  # named without importing torchvision
    for source, root, said in (
        ("cifar11", None, r"'cifar11' is unknown; allowed are folder, photos, .*Did you mean cifar10"),
        ("photos", str(tmp_path), r"--data\.source folder"),
        *((source, None, r"--data\.root DIR") for source in set(SOURCES) - {"photos"}),
        *((source, str(tmp_path), f"{source} is not under .*--data.download") for source in sources.TORCHVISION_SETS),
    ):
        with pytest.raises(UserError, match=said) as caught:
            build_source(source, root, "train", False)
        assert "\n" not in str(caught.value)


def test_cifar10_by_name(tmp_path, monkeypatch):
    """Against files in CIFAR's own layout; torchvision's check of their MD5 is switched off."""
    from torchvision.datasets import CIFAR10

    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(CIFAR10, "_load_meta", lambda self: setattr(self, "classes", [*"abcdefghij"]))
    (tmp_path / CIFAR10.base_folder).mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (4, 3072), dtype=np.uint8)
    for name, _ in CIFAR10.train_list + CIFAR10.test_list:
        content = pickle.dumps({"data": pixels, "labels": [3, 1, 4, 1]})
        (tmp_path / CIFAR10.base_folder / name).write_bytes(content)
    source = build_source("cifar10", str(tmp_path), "train", False)
    assert len(source) == 20 and source.name(17) == "cifar10/train/17"
    assert source.labels == [3, 1, 4, 1] * 5 and source.classes == [*"abcdefghij"]
    np.testing.assert_array_equal(np.asarray(source.load(1)), pixels[1].reshape(3, 32, 32).transpose(1, 2, 0))
    assert len(build_source("cifar10", str(tmp_path), "test", False)) == 4


def test_download_happens_only_where_asked_for_and_needed(tmp_path, monkeypatch):
    calls = []

    class Fake(list):
        targets = (0, 1)
        classes = ("a", ("b", "bee"))

    def build(datasets, dataset, root, split, download):
        calls.append(download)
        if not download:
            raise RuntimeError("Dataset not found.\nYou can use download=True to download it")
        return [Fake([(Image.new("L", (4, 4), 9), 0), (None, 1)])]

    monkeypatch.setattr(sources, "_build", build)
    with pytest.raises(DataError, match=r"--data\.download true; for .*--data\.source folder \(.*Dataset not found"):
        build_source("cifar10", str(tmp_path), "train", False)
    assert calls == [False]
    source = build_source("cifar10", str(tmp_path), "train", True)
    assert calls[-1] is True and source.classes == ["a", "b"]
    assert source.load(0).getpixel((0, 0)) == (9, 9, 9)
    with pytest.raises(UnreadableImage, match="cifar10/train/1"):
        source.load(1)


DOCS = Path(__file__).parent.parent.parent / "docs/data.md"
GOOD = "def __len__(self): return 3\n    def load(self, i): pass\n    def name(self, i): return str(i)\n"
A = f"class A:\n    def __init__(self, r): pass\n    {GOOD}"


def test_the_example_of_the_docs_runs(write_module, tmp_path):
    (code,) = re.findall(r"```python\n# (?:my_module\.py)\n(.*?)```", DOCS.read_text(), re.S)
    write_module("my_module", code)
    root = image_folder(tmp_path / "images", 8, classes=2)
    turned, broken = sorted(root.rglob("*.png"))[2:4]
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.effect_noise((20, 10), 99).convert("RGB").save(turned, exif=exif)
    broken.write_bytes(b"broken")
    recipe = load_recipe(None, {"data.source": "my_module:MySource", "data.root": str(root)})
    source = build_source(recipe.data.source, recipe.data.root, "train", recipe.data.download)
    assert len(source) == 8 and source.labels is None and source.classes is None
    folder = build_source("folder", str(root), "train", False)
    assert np.array_equal(source.load(2), folder.load(2)) and source.load(2).size == (10, 20)
    [batch] = batches(1, source=source)
    assert sorted(batch.indices.tolist()) == list(range(8))
    assert batch.bad and all(str(broken) in text for text in batch.bad)


@pytest.mark.parametrize(
    ("source", "text", "message"),
    [
        ("absent_module:A", None, r"there is no absent_module on Python's path or in .*set PYTHONPATH"),
        ("mod:A", "import absent_thing", r"it needs absent_thing, which is not installed"),
        ("mod:A", "1 / 0", r"importing mod fails: ZeroDivisionError: division by zero"),
        ("mod:Imagse", "class Images: pass", r"has no class Imagse\. Did you mean Images\?"),
        ("mod:A", "class A:\n    def load(self, i): pass", r"it lacks __len__, name"),
        ("subprocess:Popen", None, r"Popen is not a source of images: it lacks __len__, load, name"),
        ("mod:A", A.replace(", r", ""), r"can't be built from data\.root R: TypeError"),
        ("mod:A", A.replace("return 3", "return 0"), "no images"),
        ("mod:A", A.replace("str(i)", "None"), r"mod:A\.name gave None; it must give a text"),
        ("mod:A", A.replace("str(i)", "('a', 'b')[i]"), r"from data\.root R: IndexError: tuple index"),
        ("mod:A", A.replace(": pass", ": self.f = open(__file__)", 1), r"open files .* in load"),
        ("mod:A", A.replace(":", ":\n    labels = [0]", 1), r"3 images and 1 labels"),
        ("mod:A", A.replace(":", ":\n    labels, classes = [-1, 1, 2], 'ab'", 1), r"A\.labels must be .* \(0 to 1\)"),
        ("mod:A", A.replace(":", ":\n    labels, classes = [*'aba'], 'ab'", 1), r"labels must be whole numbers"),
    ],
)
def test_what_is_wrong_with_a_class_is_one_line(write_module, source, text, message):
    if text is not None:
        write_module("mod", text)
    allow_code([source])
    with pytest.raises(UserError, match=message) as caught:
        build_source(source, "R", "train", False)
    assert "\n" not in str(caught.value) and isinstance(caught.value, ConfigError | DataError)


@pytest.mark.parametrize("source", ["mod:", ":A", "mod:A:B", "a b:C", "mod.A", "../mod:A", "mod:A()"])
def test_the_recipe_refuses_what_is_no_name(source):
    with pytest.raises(ConfigError, match="nor a class of yours as module:Class"):
        load_recipe(None, {"data.source": source})


def test_a_class_of_a_notebook_is_refused(monkeypatch):
    """Loader processes could not import it; one of a main script they can."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "Mine", Own, raising=False)
    allow_code(["__main__:Mine"])
    assert len(build_source("__main__:Mine", "train", "train", False)) > 0
    monkeypatch.setattr(main, "__file__", "<stdin>")
    with pytest.raises(ConfigError, match=r"data\.source __main__:Mine: .* put it into a .py file"):
        build_source("__main__:Mine", "train", "train", False)


class Names(list):
    name = list.__getitem__


def _set(names, sizes=None, contents=None):
    """Description of a source of names, with or without sizes and contents of its files."""
    source = Names(names)
    if sizes:
        source.file_bytes = lambda index: sizes[source[index]]
    if contents:
        source.read = lambda index: contents[source[index]]
    return ImageSet.of(source, None)


def _numbered(first, last):
    return [f"{i}.jpg" for i in range(first, last)]


def test_small_sets_are_compared_whole():
    old = _set(_numbered(0, 64))
    assert old.changes(_set(_numbered(0, 64))) == ""
    assert old.changes(_set(_numbered(8, 104))) == "64 -> 96 images: 40 added, 8 removed, 0 of another size"
    assert "as before: 64 added, 64 removed, 0" in old.changes(_set(f"x{i}" for i in range(64)))
    assert old.changes(_set(reversed(_numbered(0, 64)))) == "64 images as before: the same names in another order"
    names = _numbered(0, 20)
    old, now = (_set(names, {name: 100 + grown * (i < 5) for i, name in enumerate(names)}) for grown in (0, 1))
    assert old.changes(now) == "20 images as before: 0 added, 0 removed, 5 of another size"


def test_large_sets_are_compared_by_the_same_part_of_both():
    names = random.Random(0).sample(_numbered(0, 30_000), 30_000)
    old, now = _set(names), _set(names[3000:] + _numbered(30_000, 36_000))
    counts, _, rest = old.changes(now).partition(": ")
    compared, added, removed, resized = (int(word) for word in rest.replace(",", "").split() if word.isdigit())
    assert counts == "30000 -> 33000 images" and 1024 <= compared <= 1400 and resized == 0
    assert 0.05 < removed / compared < 0.15 and 0.1 < added / compared < 0.25
    assert len(json.dumps(old.to_json())) < 25_000


def test_it_comes_back_from_json_and_from_nothing_else():
    old = _set(_numbered(0, 9), dict.fromkeys(_numbered(0, 9), 7))
    saved = json.loads(json.dumps(old.to_json()))
    assert ImageSet.from_json(saved) == old
    changes = {"sample": "ab"}, {"contents": "ab"}, {"sample": 3}, {"count": "many"}
    for wrong in (None, {}, [], "x", *(saved | change for change in changes)):
        with pytest.raises(DataError, match="a description of images can't be used"):
            ImageSet.from_json(wrong)


def _files(count, changed=()):
    names = _numbered(0, count)
    contents = {name: (b"new" if i in changed else b"old") + name.encode() for i, name in enumerate(names)}
    return _set(names, dict.fromkeys(names, 10), contents)


def test_other_contents_of_the_same_sizes_are_noticed():
    """64 images are read: sets of no more are compared whole, a twentieth of a large one is noticed."""
    assert _files(40).changes(_files(40)) == ""
    assert "0 of another size, 1 of 40 that were read of other" in _files(40).changes(_files(40, {7}))
    changes = _files(3000).changes(_files(3000, range(0, 3000, 10)))
    assert re.search(r"0 of another size, \d+ of 64 that were read of other content$", changes)
    assert len(json.dumps(_files(3000).to_json())) < 30_000


@pytest.mark.parametrize("form", ["", "list.txt", "shard.tar"])
def test_files_are_known_by_their_contents_in_every_form(tmp_path, form):
    found = []
    for place, first in (("a", 0), ("b", 0), ("c", 1)):
        root, names = tmp_path / place / form, [f"{i}.bmp" for i in range(5)]
        for number, name in enumerate(names):
            save(tmp_path / place / name, (first + number, 0, 0))
        if form == "list.txt":
            root.write_text("\n".join(names))
        if form == "shard.tar":
            tar(root, {name: (tmp_path / place / name).read_bytes() for name in names})
        found.append(ImageSet.of(read(root), str(root)))
    assert found[0].changes(found[1]) == "" and found[0] == found[1]
    assert found[0].changes(found[2]).endswith("0 of another size, 5 of 5 that were read of other content")


class Own(Names):
    """A user's own source, without sizes; names begin with the root. Attributes of its own mean nothing to us."""

    labels = classes = None
    place = path = "here"
    load = list.__getitem__

    def __init__(self, root):
        super().__init__(f"{root}/{number}" for number in range(5))


def test_sources_without_files():
    source, roots = f"{__name__}:Own", ("/a", "/b/c")
    allow_code([source])
    one, other = (ImageSet.of(build_source(source, root, "train", False), root) for root in roots)
    assert one == other and one.count == len(build_source(source, roots[0], "train", False))
    assert set(one.sample.values()) == {-1}

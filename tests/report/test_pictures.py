"""`dino-ds pictures` on a small folder, and the pictures of a run: a file of each kind, and bad input."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from dino_ds.config.loading import load_recipe
from dino_ds.data.sources import build_source
from dino_ds.errors import ConfigError, DataError
from dino_ds.options.definition import PicturesOptions
from dino_ds.report import draw
from dino_ds.report.pictures import KINDS, PeriodicPictures, PictureFiles, run, shown_kinds, side_of
from dino_ds.weights.export import FORMATS
from tests.run.harness import image_folder
from tests.weights.test_weights import _backbone


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures")
    FORMATS["safetensors"][0](_backbone(), path / "teacher.safetensors")
    image_folder(path / "images", 12, 3)
    (path / "images/class0/000.png").write_bytes(b"broken")
    return path


def _run(place, only=None, root="images", **changes):
    values = {"model": str(place), "root": root and str(place / root), **changes}
    return run(PicturesOptions(**values, only=only and only.split(","))).data


@pytest.mark.slow
def test_one_picture_of_each_kind(place):
    written = _run(place)["pictures"]
    assert written == [str(place / f"pictures/{kind}.png") for kind in ("pca", "map", "neighbors")]
    assert all(Image.open(path).size[0] > 200 for path in written)
    _run(place, only="attention")
    assert {path.stem for path in (place / "pictures").iterdir()} == set(KINDS)


def test_neighbors_have_their_class_and_no_image_is_its_own(place, tmp_path, monkeypatch):
    shown, plain = [], draw.draw_neighbors
    monkeypatch.setattr(draw, "draw_neighbors", lambda *given: shown.extend(given) or plain(*given))
    _run(place, only="neighbors", out=str(tmp_path))
    queries, found, captions, same_class = shown
    assert len(queries) == 6 and [len(row) for row in found] == [6] * 6
    for query, row, texts, same in zip(queries, found, captions, same_class, strict=True):
        assert same == [text.split()[1] == texts[0] for text in texts[1:]]
        assert not any(np.array_equal(query, picture) for picture in row)


def test_bad_input_is_one_line(place, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "one/a.png").write_bytes((place / "images/class1/001.png").read_bytes())
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/a.png").write_bytes(b"broken")
    for changes, error, words in (
        ({"root": None}, ConfigError, "name images"),
        ({"root": str(tmp_path / "one"), "only": "map"}, DataError, "one image alone has no neighbors and no map"),
        ({"root": str(tmp_path / "bad"), "only": "pca"}, DataError, "none of 1 images can be read"),
        # Before the weights are read.
        ({"model": "nowhere.pth", "out": str(tmp_path / "file/out")}, ConfigError, "name another folder with --out"),
    ):
        with pytest.raises((error, DataError), match=words):
            _run(place, **{"out": str(tmp_path / "out"), **changes})
    assert not (tmp_path / "out").exists()


def test_which_pictures_say_something_and_how_large_their_images_are():
    """Attention of patches of 16 pixels at most, in images of 100 at least; twice the native side within 16 and 30
    patches, or the native one of a network that takes no other."""

    def model(stride, patches, **more):
        network = SimpleNamespace(check_image=more.pop("check", lambda *_: None))
        values = {"is_vit": True, "has_patches": True, "stride": stride, "image_size": stride * patches}
        return SimpleNamespace(**{**values, **more}, network=network)

    assert "attention" in shown_kinds(model(16, 14)) and "attention" in shown_kinds(model(8, 10))
    assert not any("attention" in shown_kinds(one) for one in (model(8, 4), model(32, 14), model(16, 14, is_vit=False)))
    assert shown_kinds(model(16, 14, is_vit=False, has_patches=False)) == ["map", "neighbors"]
    for native, wanted in {4: 16, 10: 20, 20: 30, 40: 40}.items():
        assert side_of(model(8, native)) == 8 * wanted

    def refuse(*_):
        raise ConfigError("")

    assert side_of(model(8, 4, check=refuse)) == 32


def test_a_run_has_pictures_six_times_unless_its_recipe_says_how_often(place):
    source = build_source("folder", str(place / "images"), "train", False)
    due = {}
    for every in ("auto", "30 steps"):
        recipe = load_recipe(None, {"length": "101 steps", "eval.pictures_every": every})
        album = PeriodicPictures.build(recipe, source, 5)
        due[every] = [step for step in range(102) if album.due(step, last=step == 101)]
    assert due == {"auto": [0, 21, 42, 63, 84, 101], "30 steps": [0, 30, 60, 90, 101]}


def test_a_folder_at_home_is_found(tmp_path, monkeypatch):
    """As --out=~/pictures comes: the shell leaves it as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    PictureFiles("a.safetensors", "~/pictures", ()).add("empty", np.zeros((1, 1, 3), dtype=np.uint8))
    assert [path.name for path in tmp_path.rglob("*.png")] == ["empty.png"] and not (tmp_path / "~").exists()

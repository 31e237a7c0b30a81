"""`dino-ds pictures` on a small folder: a file of each kind, images and patches that are picked, and bad input."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dino_ds.data.cutting import EvalCrop
from dino_ds.data.encoded import NamedFiles
from dino_ds.data.normalisation import IMAGENET
from dino_ds.errors import ConfigError, DataError
from dino_ds.options.model import PicturesOptions
from dino_ds.report import draw
from dino_ds.report import draw_pictures as pictures
from dino_ds.report.draw_pictures import KINDS, PictureFiles, run, side_of
from dino_ds.report.model_options import choose
from dino_ds.weights.export import FORMATS
from tests.run.harness import image_folder
from tests.weights.test_weights import _backbone


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures")
    FORMATS["safetensors"][0](_backbone(), path / "teacher.safetensors")
    image_folder(path / "images", 12, 3)
    (path / "images/class0/000.png").write_bytes(b"broken")
    image_folder(path / "more", 3)
    return path


@pytest.fixture
def shown(monkeypatch):
    """What was drawn: the function's name -> its arguments; the drawing itself takes no time."""
    calls = {}

    def note(name):
        def instead(*given):
            calls[name] = given
            return plain(torch.zeros(1, 8, 8, 3), torch.zeros(1, 2, 2, 4))

        return instead

    plain = draw.draw_pca
    for name in ("draw_attention", "draw_pca", "draw_neighbors", "draw_map"):
        monkeypatch.setattr(draw, name, note(name))
    return calls


def _run(place, **changes):
    values = {"model": str(place), "source": None, "root": str(place / "images"), "out": str(place / "out")}
    images = None if changes.get("only") in ("curves", "neighbors") else "3"
    values |= {"only": None, "images": images, "foreground": False, "map": None}
    values = {**values, "bank": None, "size": None, "json": True, **changes}
    run(PicturesOptions(**{**values, "only": values["only"] and values["only"].split(",")}))


@pytest.mark.slow
def test_one_picture_of_each_kind(place, tmp_path, capsys):
    _run(place, out=str(tmp_path))
    written = json.loads(capsys.readouterr().out)["pictures"]
    assert written == [str(tmp_path / f"{kind}.png") for kind in KINDS[:-1]]  # no run, no curves
    assert all(Image.open(path).size[0] > 200 for path in written)


@pytest.mark.slow
def test_curves_want_neither_images_nor_weights_and_are_on_tensorboard_too(tmp_path, capsys):
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "teacher.json").write_text('{"step": 30}')
    record = {"step": 1, "loss": 3.0, "teacher_entropy": 2.0, "kl": 1.0, "lr": 0.1, "weight_decay": 0.0}
    record |= {"images_per_second": 9.0, "teacher_temp": 0.04, "teacher_momentum": 0.99}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    _run(tmp_path, root=None, only="curves", out=None, json=False)
    assert capsys.readouterr().out.strip() == str(tmp_path / "pictures/curves.png")
    (image,) = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Images("pictures/curves")
    assert image.step == 30


def test_a_line_that_is_cut_off_leaves_the_curves(tmp_path, monkeypatch):
    """A run that goes on may be writing it."""
    drawn = []
    monkeypatch.setattr(pictures, "draw_curves", lambda metrics: drawn.append(metrics) or draw.Sheet(1, 1).figure)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n[1]\n{"step": 2, "lo')
    _run(tmp_path, root=None, only="curves", out=str(tmp_path / "out"))
    assert (drawn[0].lines, drawn[0].broken, drawn[0]["loss"].y.tolist()) == (1, 2, [2.0])
    (tmp_path / "metrics.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no line of metrics: leave curves out"):
        _run(tmp_path, root=None, only="curves", out=str(tmp_path / "out"))


def test_chosen_images_are_those_that_are_shown(place, tmp_path, shown):
    """Numbers count the images of --root as they are sorted; without --root those chosen are the bank."""
    out = str(tmp_path)
    _run(place, out=out, only="attention,pca", images=f"4,{place}/images/class2/005.png", foreground=True, size=64)
    files = NamedFiles([f"{place}/images/class1/001.png", f"{place}/images/class2/005.png"])
    cuts = [EvalCrop(64, IMAGENET)(files.load(i)) for i in range(2)]
    expected = draw.picture_of(torch.stack(cuts), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    torch.testing.assert_close(shown["draw_attention"][0], expected)
    assert shown["draw_pca"][2] is shown["draw_attention"][1] and set(shown) == {"draw_attention", "draw_pca"}
    _run(place, out=out, root=None, images=f"{place}/more", only="map,pca", map="pca", size=32)
    assert len(shown["draw_map"][1]) == 3 and shown["draw_pca"][2] is None
    assert "PCA of 3" in shown["draw_map"][3]
    assert len(choose(f"{place}/more, {place}/more/000.png", "images", lambda: files)) == 4


def test_neighbors_of_some_images(place, tmp_path, shown):
    """Captions have the class of each; a query is not its own neighbor."""
    _run(place, out=str(tmp_path), only="neighbors")
    queries, found, captions, same_class = shown["draw_neighbors"]
    assert len(queries) == 6 and [len(row) for row in found] == [6] * 6
    for query, row, texts, same in zip(queries, found, captions, same_class, strict=True):
        assert same == [text.split()[1] == texts[0] for text in texts[1:]]
        assert not any(np.array_equal(query, picture) for picture in row)


def test_bad_input_is_one_line(place):
    some, broken = f"{place}/more/000.png", f"{place}/images/class0/000.png"
    for changes, error, words in (
        ({"size": 33}, ConfigError, "use 32"),
        ({"root": None}, ConfigError, "name images"),
        ({"images": "0"}, ConfigError, "from 1 to 100"),
        ({"images": "500000"}, ConfigError, "from 1 to 100"),
        ({"images": "1,77"}, ConfigError, "12 images, 0 to 11"),
        ({"images": "cat.jpg"}, ConfigError, "'cat.jpg': there is no such file"),
        ({"images": broken}, DataError, "--images: .*not an image"),
        ({"images": some, "root": None, "only": "map"}, DataError, "1 of 1 images.* two or more"),
        ({"only": "curves"}, ConfigError, "metrics.jsonl does not exist"),
        ({"only": "map", "images": None, "foreground": True}, ConfigError, "it is for pca"),
        ({"only": "pca", "bank": 9}, ConfigError, "--bank changes nothing of pca: it is for neighbors, map"),
        ({"only": "map"}, ConfigError, "--images changes nothing of map"),
        ({"only": "pca", "images": some}, ConfigError, "names files: no image of --root is looked at"),
    ):
        with pytest.raises(error, match=words):
            _run(place, **changes)
    assert not (place / "out").exists()


def test_a_folder_that_cant_be_written(place, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is not a writable folder; name another folder with --out"):
        _run(place, model="nowhere.pth", only="pca", out=str(tmp_path / "file/out"))  # before the weights are read


def test_patches_are_shown_at_twice_the_native_side_within_16_and_30():
    sides = {4: 16, 10: 20, 20: 30, 40: 40}
    for native, wanted in sides.items():
        network = SimpleNamespace(check_image=lambda *_: None)
        assert side_of(SimpleNamespace(stride=8, image_size=8 * native, network=network), None) == 8 * wanted


def test_a_folder_at_home_is_found(tmp_path, monkeypatch):
    """As --out=~/pictures comes: the shell leaves it as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    PictureFiles("a.safetensors", "~/pictures").add("empty", Figure(figsize=(1, 1)))
    assert [path.name for path in tmp_path.rglob("*.png")] == ["empty.png"] and not (tmp_path / "~").exists()

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

from dino_ds.data.encoded import NamedFiles
from dino_ds.data.eval_crops import EvalCrop
from dino_ds.data.normalisation import IMAGENET
from dino_ds.errors import ConfigError, DataError
from dino_ds.options.model import PicturesOptions
from dino_ds.report import draw_pictures as pictures
from dino_ds.report.chosen_images import choose, find_patches, read_cuts
from dino_ds.report.draw_pictures import KINDS, PictureFiles, run, side_of
from dino_ds.report.pictures import draw
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
    for name in ("draw_attention", "draw_pca", "draw_similarity", "draw_neighbours"):
        monkeypatch.setattr(draw, name, note(name))
    monkeypatch.setattr(pictures, "draw_map", note("draw_map"))
    return calls


def _run(place, **changes):
    values = {"model": str(place), "source": None, "root": str(place / "images"), "out": str(place / "out")}
    images = None if changes.get("only") in ("curves", "neighbours") else "3"
    values |= {"only": None, "images": images, "queries": None, "patch": None, "foreground": False, "map": None}
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


def test_neighbours_of_chosen_images(place, tmp_path, shown):
    """By number and by file: captions have their class; a query is not its own neighbour, by whatever path."""
    files = f"5,{place}/images/../images/class2/002.png"
    _run(place, out=str(tmp_path), only="neighbours", queries=files)
    queries, found, captions, same_class = shown["draw_neighbours"]
    assert same_class[0] == [text.endswith("class1") for text in captions[0][1:]]
    assert set(same_class[1]) == {None}  # a file alone has no class
    assert len(queries) == 2 and [len(row) for row in found] == [6, 6]
    assert captions[0][0] == "class1" and all("class" in text for text in captions[1][1:])
    for query, row in zip(queries, found, strict=True):
        assert not any(np.array_equal(query, picture) for picture in row)


def test_a_patch_is_the_one_under_the_pixel(place, tmp_path, shown):
    """A white dot in a black image of other sides than the network's: its patch is where the dot is after the cut."""
    x, y = 130, 52
    picture = np.zeros((120, 200, 3), dtype=np.uint8)
    picture[y - 1 : y + 2, x - 1 : x + 2] = 255
    Image.fromarray(picture).save(tmp_path / "dot.png")
    crop = EvalCrop(64, IMAGENET)
    cuts = list(read_cuts(choose(str(tmp_path / "dot.png"), "images", lambda: None), crop, "images", None))
    (image, row, column) = find_patches(f"{x},{y}", cuts, crop, 8)[0]
    brightest = int(cuts[0].pixels.sum(dim=0).argmax())
    assert (image, row, column) == (0, brightest // 64 // 8, brightest % 64 // 8)
    left, top, right, bottom = crop.box(200, 120)
    assert abs((right - left) - (bottom - top)) < 1 and (left, top) > (0, 0)
    files = f"{place}/more/000.png,{place}/more/001.png"
    _run(place, out=str(tmp_path), root=None, images=files, only="similarity", patch="10,10 2:24,20", size=32)
    assert [patch[0] for patch in shown["draw_similarity"][2]] == [0, 1]


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
        ({"queries": f"{some},{broken}", "only": "neighbours"}, DataError, "--queries: .*not an image"),
        ({"images": some, "root": None, "only": "map"}, DataError, "1 of 1 images.* two or more"),
        ({"images": some, "patch": "5"}, ConfigError, "'5' is not X,Y"),
        ({"images": some, "patch": "2:5,5"}, ConfigError, "1 images are shown, 1 to 1"),
        ({"images": some, "patch": "50,5"}, ConfigError, r"image 1 \(000.png\) has 48 x 40 pixels, so X is 0 to 47"),
        ({"images": some, "patch": "0,0", "size": 32}, ConfigError, "without its borders: X "),
        ({"only": "curves"}, ConfigError, "metrics.jsonl does not exist"),
        ({"only": "map", "images": None, "foreground": True}, ConfigError, "it is for pca"),
        ({"only": "pca", "bank": 9}, ConfigError, "--bank changes nothing of pca: it is for neighbours, map"),
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

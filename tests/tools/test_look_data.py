"""`look-data`: the sheet shows the crops of a run, the statistics are those of the files, mistakes are named."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

from dino_ds.config.crops import all_crops, dino_groups
from dino_ds.config.loading import load_recipe
from dino_ds.data.batches import LoaderOptions
from dino_ds.data.feed import Position
from dino_ds.data.loader import Loader
from dino_ds.data.multicrop import MultiCrop
from dino_ds.data.normalisation import IMAGENET
from dino_ds.data.prefetcher import DevicePrefetcher
from dino_ds.data.sources import build_source
from dino_ds.errors import ConfigError, DataError
from dino_ds.options.data import LookDataOptions
from dino_ds.tools import look_data
from dino_ds.tools.data_statistics import look_at
from dino_ds.tools.sheet import _font, describe
from tests.data.files import tiff

SMALL = {
    "data.workers": "0",
    "crops.global_size": "32",
    "crops.local_size": "16",
    "crops.num_local": "3",
}


def recipe_for(root, **more):
    return load_recipe(None, {"data.root": str(root), **SMALL, **more})


def noise(seed: int, width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def folder(tmp_path):
    """Two classes, three formats and modes, a copy, an image on its side, and two files that are no images."""
    for name in ("cats", "dogs"):
        (tmp_path / "images" / name).mkdir(parents=True)
    cats, dogs = tmp_path / "images/cats", tmp_path / "images/dogs"
    noise(0, 40, 30).save(cats / "a.png")
    noise(0, 40, 30).save(cats / "copy_of_a.png")
    noise(1, 100, 50).convert("L").save(cats / "grey.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    noise(2, 90, 60).save(dogs / "turned.jpg", exif=exif)
    noise(3, 64, 64).convert("P").save(dogs / "palette.gif")
    (dogs / "empty.jpg").touch()
    (dogs / "words<b>.png").write_text("not an image")
    return tmp_path / "images"


def look(folder, tmp_path, capsys, images=3, sample=0, json_too=True, **more):
    look_data.run(
        LookDataOptions(images=images, sample=sample, out=str(tmp_path / "look.png"), json=json_too),
        recipe=recipe_for(folder, **more),
    )
    out = capsys.readouterr().out
    return json.loads(out) if json_too else out


def test_statistics_are_those_of_the_files(folder, tmp_path, capsys):
    found = look(folder, tmp_path, capsys)
    assert (found["images"], found["looked_at"]) == (7, 7)
    assert found["unreadable"]["count"] == 2
    assert {file["name"] for file in found["unreadable"]["files"]} == {
        str(folder / "dogs/empty.jpg"),
        str(folder / "dogs/words<b>.png"),
    }
    assert found["unreadable"]["reasons"] == {"empty file": 1, "not an image": 1}
    assert found["modes"] == {"RGB": 3, "L": 1, "P": 1}
    assert found["formats"] == {"PNG": 2, "JPEG": 2, "GIF": 1}
    # Upright: 90 x 60 on its side is 60 x 90.
    assert found["width"] == {"min": 40, "median": 60, "max": 100}
    assert found["height"] == {"min": 30, "median": 50, "max": 90}
    assert [(b["from"], b["below"], b["images"]) for b in found["shorter_side"]["histogram"]] == [
        (0, 32, 2),
        (32, 64, 2),
        (64, 96, 1),
    ]
    assert found["aspect_ratio"]["max"] == 2 and found["aspect_ratio"]["min"] == 0.6667
    sizes = sorted((folder / name).stat().st_size for name in ("cats/a.png", "cats/grey.jpg", "dogs/turned.jpg"))
    assert found["file_bytes"]["min"] <= sizes[0] and found["file_bytes"]["max"] >= sizes[-1]
    assert found["classes"]["counts"] == {"cats": 3, "dogs": 4}
    near = found["near_duplicates"]
    assert (near["groups"], near["images"], near["surplus"]) == (1, 2, 1)
    assert near["largest"][0]["names"] == [str(folder / "cats/a.png"), str(folder / "cats/copy_of_a.png")]


@pytest.mark.slow
def test_workers_find_the_same(folder, tmp_path, capsys):
    alone = look(folder, tmp_path, capsys)
    assert look(folder, tmp_path, capsys, **{"data.workers": "1"}) == alone


def test_text_names_what_the_json_names(folder, tmp_path, capsys):
    text = look(folder, tmp_path, capsys, json_too=False)
    for words in (
        "empty.jpg (empty file)",
        "words<b>.png (not an image)",
        "cats 3",
        "1 group of images",
        "32 to 64",
        "look.png",
    ):
        assert words in text, words


@pytest.mark.slow
def test_a_sample_is_named_and_has_its_size(folder, tmp_path, capsys):
    found = look(folder, tmp_path, capsys, sample=5)
    assert (found["images"], found["looked_at"]) == (7, 5)
    text = look(folder, tmp_path, capsys, sample=5, json_too=False)
    assert "5 of them, drawn at random" in text and "(among those looked at)" in text


@pytest.mark.slow
def test_enlarged_crops_are_those_with_fewer_pixels(tmp_path, capsys):
    """Images of 40 x 40 and crops of 0.4 to 1 of them: none has 41 x 41 pixels, all have 25 x 25, and half 33 x 33."""
    for number in range(300):
        noise(number, 40, 40).save(tmp_path / f"{number}.png")
    patch = {"model.patch_size": "1", "crops.num_local": "0"}
    for size, low, high in ((41, 1, 1), (25, 0, 0), (33, 0.3, 0.7)):
        found = look(tmp_path, tmp_path, capsys, **patch, **{"crops.global_size": str(size)})
        assert low <= found["enlarged_crops"]["global"]["fraction"] <= high


@pytest.mark.parametrize("augment", ["device", "worker"])
def test_the_sheet_shows_what_a_run_trains_on(folder, augment):
    """Images, order and pixels of the first batch of a loader; unreadable images are left out."""
    recipe = recipe_for(folder, **{"data.augment": augment})
    source = build_source("folder", str(folder), "train", False)
    rows = list(look_data._seen(source, recipe))
    crops = MultiCrop(recipe.groups, recipe.crops.augment)
    prefetcher = DevicePrefetcher(
        Loader(source, crops, LoaderOptions(global_batch=7, micro_batch=7, augment=augment), Position()),
        torch.device("cpu"),
    )
    batch = next(prefetcher)
    prefetcher.close()
    replaced = {text.partition(" (")[0] for text in batch.bad}
    order = [source.name(index) for index in batch.indices.tolist()]
    assert [row.name for row in rows] == [name for name in order if name not in replaced]
    for row in rows:
        place = order.index(row.name)
        assert len(row.crops) == len(row.sampled) == 5
        for shown, crop in zip(row.crops, all_crops(batch.crops), strict=True):
            # A batch of 7 may be summed in another order than one of 1.
            levels = (IMAGENET.undone(crop[place]) * 255).round().clamp(0, 255).permute(1, 2, 0)
            assert (levels - torch.from_numpy(np.array(shown)).float()).abs().max() <= 1


@pytest.mark.slow
def test_the_sheet_has_boxes_crops_and_room_for_each_image(folder, tmp_path, capsys):
    look(folder, tmp_path, capsys, images=1)
    one = Image.open(tmp_path / "look.png")
    look(folder, tmp_path, capsys, images=3)
    three = Image.open(tmp_path / "look.png")
    assert three.width == one.width and one.height < three.height < 3 * one.height
    colours = {colour for _, colour in three.getcolors(1 << 24)}
    assert three.mode == "RGB" and {(232, 89, 12), (28, 126, 214)} <= colours


def test_names_beyond_ascii_can_be_read():
    font = _font(11)
    missing = bytes(font.getmask("\uffff"))
    assert all(bytes(font.getmask(letter)) != missing for letter in "äéøčЖλ")


@pytest.mark.slow
def test_no_local_crops(folder, tmp_path, capsys):
    found = look(folder, tmp_path, capsys, **{"crops.num_local": "0"})
    assert "local" not in found["enlarged_crops"]
    assert "local crops" not in look(folder, tmp_path, capsys, json_too=False, **{"crops.num_local": "0"})


def test_the_page_is_one_file_with_all_in_it(folder, tmp_path, capsys):
    look(folder, tmp_path, capsys)
    page = (tmp_path / "look.html").read_text()
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)
    parser.feed(page)
    assert tags.count("section") == 3 and tags.count("rect") == 15 and tags.count("img") == 3 + 15
    assert not re.search(r'(src|href)="(?!data:)', page)
    # Crops of 32 and 16 pixels are shown at 128, as they are.
    assert page.count('width="128" height="128"') == 15 and "image-rendering: pixelated" in page
    assert "words<b>" not in page and "words&lt;b&gt;.png (not an image)" in page


@pytest.mark.slow
def test_fewer_images_than_asked_for_is_said(folder, tmp_path, capsys):
    look_data.run(
        LookDataOptions(images=50, sample=0, out=str(tmp_path / "a.png"), json=False), recipe=recipe_for(folder)
    )
    assert "5 images on the sheet, 50 were asked for" in capsys.readouterr().err


def test_embedded_photos_have_neither_files_nor_formats(tmp_path, capsys):
    recipe = load_recipe("quickstart", {"data.workers": "0"})
    look_data.run(LookDataOptions(images=2, sample=40, out=str(tmp_path / "a.png"), json=True), recipe=recipe)
    found = json.loads(capsys.readouterr().out)
    assert found["file_bytes"] is None and found["formats"] == {"none": 40} and found["looked_at"] == 40
    assert found["classes"]["count"] == 18


class Volume:
    """Images with two channels, which only a source of one's own has."""

    labels = None
    classes = None

    def __len__(self):
        return 3

    def load(self, index):
        return np.random.default_rng(index).integers(0, 255, (20, 30, 2), dtype=np.uint8)

    def name(self, index):
        return f"volume/{index}"


def test_images_of_other_channels_are_described():
    facts = list(look_at(Volume(), [0, 2], 0, 10_000))
    assert [(fact.index, fact.width, fact.height, fact.mode, fact.problem) for fact in facts] == [
        (0, 30, 20, "2 channels", None),
        (2, 30, 20, "2 channels", None),
    ]
    assert facts[0].hash != facts[1].hash


def test_images_beyond_the_limit_of_pixels_are_unreadable(folder, tmp_path, capsys):
    found = look(folder, tmp_path, capsys, **{"data.max_pixels": "4000"})
    assert found["unreadable"]["count"] == 5
    assert found["width"]["max"] <= 64


@pytest.mark.parametrize("images", [0, -1, 1000])
def test_impossible_numbers_of_images(folder, tmp_path, images):
    with pytest.raises(ConfigError, match=f"--images {images}: a sheet has 1 to 200"):
        look_data.run(
            LookDataOptions(images=images, sample=0, out=str(tmp_path / "a.png"), json=False), recipe=recipe_for(folder)
        )


@pytest.mark.parametrize(
    "out,words", [("sheet.jpg", "must end in .png"), ("nowhere/sheet.png", "nowhere is not a writable folder")]
)
def test_impossible_places(folder, tmp_path, out, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        look_data.run(
            LookDataOptions(images=1, sample=0, out=str(tmp_path / out), json=False), recipe=recipe_for(folder)
        )


def test_nothing_to_look_at(tmp_path):
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    empty.mkdir()
    broken.mkdir()
    (broken / "a.jpg").touch()
    for root, words in ((empty, "no images under"), (broken, r"none of the 1 images .*a\.jpg \(empty file\)")):
        with pytest.raises(DataError, match=words):
            look_data.run(
                LookDataOptions(images=1, sample=0, out=str(tmp_path / "a.png"), json=False), recipe=recipe_for(root)
            )
    assert list(tmp_path.glob("*a.png*")) == []


def test_descriptions_of_crops_name_every_operation():
    crops = MultiCrop(dino_groups(32, (0.4, 1.0), 16, (0.05, 0.4), 3), "dino")
    text = " ".join(describe(view) for seed in range(50) for view in crops.sample(90, 60, seed))
    for word in ("mirrored", "brightness x", "contrast x", "saturation x", "hue ", "grey", "blur", "solarized"):
        assert word in text


@pytest.mark.parametrize(
    ("kind", "text"), [("uint16", "data.value_range 0,4095"), ("int16", "give --data.value_range 0,")]
)
def test_deep_images_are_shown_with_their_values(tmp_path, capsys, kind, text):
    """Also where training wants to be told the range."""
    values = (np.arange(2000).reshape(40, 50) * 2).astype(kind)
    (tmp_path / "images").mkdir()
    (tmp_path / "images/deep.tif").write_bytes(tiff(values))
    noise(0, 50, 40).save(tmp_path / "images/shallow.png")
    said = look(tmp_path / "images", tmp_path, capsys, images=2, json_too=False)
    name = "uint16" if kind == "uint16" else "int32"
    assert f"values        {name} in 1: 0 to 3998\n" in said and text in said
    found = look(tmp_path / "images", tmp_path, capsys, images=2)
    assert found["values"] == {name: {"images": 1, "min": 0, "max": 3998}, "uint8": {"images": 1}}


def test_files_of_other_channels_are_those_that_training_skips(folder, tmp_path, capsys):
    np.save(folder / "cats/six.npy", np.zeros((20, 30, 6), np.uint8))
    found = look(folder, tmp_path, capsys)
    reasons = {entry["name"]: entry["reason"] for entry in found["unreadable"]["files"]}
    assert reasons[str(folder / "cats/six.npy")] == "6 channels, 3 are wanted" and len(reasons) == 3
    assert "6 channels" not in found["modes"]


def test_the_mean_and_deviation_of_the_channels_are_measured(tmp_path, capsys):
    """As the flags that a run takes; a slow reference over all pixels, to the 4 digits that are shown."""
    (tmp_path / "images").mkdir()
    shades = (np.random.default_rng(0).random((3, 40, 50, 3)) * (250, 120, 60)).astype(np.uint8)
    for i, shade in enumerate(shades):
        Image.fromarray(shade).save(tmp_path / f"images/{i}.png")
    deep = np.linspace(0, 4095, 2000).astype(np.uint16).reshape(40, 50)
    (tmp_path / "images/deep.tif").write_bytes(tiff(deep))
    found = look(tmp_path / "images", tmp_path, capsys, images=2)["channels"]
    unit = np.concatenate([shades / 255, np.repeat(deep[None, :, :, None], 3, axis=3) / 4095])
    np.testing.assert_allclose(found["mean"], unit.mean((0, 1, 2)), atol=6e-5)
    np.testing.assert_allclose(found["std"], unit.std((0, 1, 2)), atol=6e-5)
    said = look(tmp_path / "images", tmp_path, capsys, images=2, json_too=False)
    (flags,) = re.findall(r"channels +(--data.mean \S+ --data.std \S+)\n", said)
    words = flags.split()
    recipe = load_recipe(None, {words[0][2:]: words[1], words[2][2:]: words[3]})
    assert list(recipe.data.mean) == found["mean"] and list(recipe.data.std) == found["std"]


def test_hidden_patches_are_grey(folder):
    """Those of the same crops without masks, in the mean colour."""
    masked = {"crops.mask": "dinov2", "crops.mask_share": "1", "objective.ibot_weight": "1", "model.patch_size": "4"}
    recipes = [recipe_for(folder, **{"data.augment": "device"}, **more) for more in ({}, masked)]
    source = build_source("folder", str(folder), "train", False)
    for plain, hidden in zip(*(look_data._seen(source, recipe) for recipe in recipes), strict=True):
        for number, (a, b) in enumerate(zip(plain.crops, hidden.crops, strict=True)):
            changed = np.any(np.array(a) != np.array(b), axis=2)
            assert changed.any() == (number < 2)
            assert (np.array(b)[changed] == [124, 116, 104]).all()
    assert look_data._title(recipes[1]).endswith("masks dinov2") and "masks" not in look_data._title(recipes[0])

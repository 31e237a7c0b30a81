"""`look-data`: the sheet shows the crops of a run, mistakes are named; and what outputs of commands are called."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dino_ds.basics.files import free_stem
from dino_ds.commands import look_data
from dino_ds.commands.look_data import report
from dino_ds.config.crops import all_crops
from dino_ds.config.loading import load_recipe
from dino_ds.data import batches, feed, multicrop, normalization, sources
from dino_ds.data.loader import DevicePrefetcher, Loader
from dino_ds.errors import ConfigError, DataError
from dino_ds.options.commands import COMMANDS, LookDataOptions
from tests.data.files import tiff
from tests.hostile.guard import run_command

SMALL = {"data.workers": "0", "crops.global_size": "32", "crops.local_size": "16", "crops.num_local": "3"}


def recipe_for(root, **more):
    return load_recipe(None, {"data.root": str(root), **SMALL, **more})


def noise(seed: int, width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes, three formats and modes, a copy, an image on its side, and two files that are no images."""
    root = tmp_path_factory.mktemp("images")
    cats, dogs = root / "cats", root / "dogs"
    cats.mkdir()
    dogs.mkdir()
    noise(0, 40, 30).save(cats / "a.png")
    noise(0, 40, 30).save(cats / "copy_of_a.png")
    noise(1, 100, 50).convert("L").save(cats / "gray.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    noise(2, 90, 60).save(dogs / "turned.jpg", exif=exif)
    noise(3, 64, 64).convert("P").save(dogs / "palette.gif")
    (dogs / "empty.jpg").touch()
    (dogs / "words<b>.png").write_text("not an image")
    return root


def look(folder, out, images=3, sample=0, as_json=True, **more):
    options = LookDataOptions(images=images, sample=sample, out=str(out / "look.png"))
    result = look_data.run(options, recipe=recipe_for(folder, **more))
    return result.data if as_json else result.page


@pytest.fixture(scope="module")
def looked(folder, tmp_path_factory):
    """(what was found, the folder of the sheet)"""
    out = tmp_path_factory.mktemp("looked")
    return look(folder, out), out


def test_statistics_are_those_of_the_files(folder, looked):
    found, _ = looked
    assert (found["images"], found["looked_at"]) == (7, 7)
    assert found["unreadable"]["count"] == 2
    assert {Path(file["name"]).name for file in found["unreadable"]["files"]} == {"empty.jpg", "words<b>.png"}
    # Upright: 90 x 60 on its side is 60 x 90.
    assert found["width"] == {"min": 40, "median": 60, "max": 100}
    assert found["height"] == {"min": 30, "median": 50, "max": 90}
    assert found["classes"]["counts"] == {"cats": 3, "dogs": 4}
    assert "words<b>.png (not an image)" in report(found)


@pytest.mark.parametrize("augment", ["device", "worker"])
def test_the_sheet_shows_what_a_run_trains_on(folder, augment):
    recipe = recipe_for(folder, **{"data.augment": augment})
    source = sources.build_source("folder", str(folder), "train", False)
    rows = list(look_data._sheet_rows(source, recipe))
    crops = multicrop.MultiCrop(recipe.groups, recipe.crops.augment)
    prefetcher = DevicePrefetcher(
        Loader(source, crops, batches.LoaderOptions(global_batch=7, micro_batch=7, augment=augment), feed.Position()),
        torch.device("cpu"),
    )
    batch = next(prefetcher)
    prefetcher.close()
    replaced = {text.partition(" (")[0] for text in batch.bad}
    order = [source.name(index) for index in batch.indices.tolist()]
    assert [row.name for row in rows] == [name for name in order if name not in replaced]
    for row in rows:
        place = order.index(row.name)
        assert len(row.crops) == len(row.boxes) == 5
        for shown, crop in zip(row.crops, all_crops(batch.crops), strict=True):
            # A batch of 7 may be summed in another order than one of 1.
            levels = (normalization.IMAGENET.undone(crop[place]) * 255).round().clamp(0, 255).permute(1, 2, 0)
            assert (levels - torch.from_numpy(np.array(shown)).float()).abs().max() <= 1


def test_nothing_to_look_at_and_no_place_for_the_sheet(folder, tmp_path):
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    empty.mkdir()
    broken.mkdir()
    (broken / "a.jpg").touch()
    for root, words in ((empty, "no images under"), (broken, r"none of the 1 images .*a\.jpg \(empty file\)")):
        with pytest.raises(DataError, match=words):
            look(root, tmp_path)
    assert list(tmp_path.glob("*look*")) == []
    for out, words in (("sheet.jpg", "must end in .png"), ("nowhere/sheet.png", "nowhere is not a writable folder")):
        with pytest.raises(ConfigError, match=words):
            look_data.run(LookDataOptions(out=str(tmp_path / out)), recipe=recipe_for(folder))


def test_files_beyond_the_range_or_of_other_channels_are_those_that_training_skips(tmp_path):
    """Of the images looked at, which may be more than those that the range was sought in."""
    (tmp_path / "images").mkdir()
    for number, top in enumerate((4000, 60000, 3000, 20)):
        values = np.linspace(0, top, 2000).astype(np.uint16).reshape(40, 50)
        (tmp_path / f"images/{number}.tif").write_bytes(tiff(values))
    np.save(tmp_path / "images/six.npy", np.zeros((20, 30, 6), np.uint8))
    found = look(tmp_path / "images", tmp_path, images=2, **{"data.value_range": "0,4095"})
    reason = "uint16 values, 0 to 60000: beyond data.value_range 0,4095"
    assert found["unreadable"]["files"] == [
        {"name": str(tmp_path / "images/1.tif"), "reason": reason},
        {"name": str(tmp_path / "images/six.npy"), "reason": "6 channels, 3 are wanted"},
    ]
    assert found["values"] == {"uint16": {"images": 3, "min": 0, "max": 4000}}
    assert "that are deeper than 8 bits use less than 1% of data.value_range 0,4095" in report(found)


def test_the_mean_and_deviation_of_the_channels_are_measured(tmp_path):
    (tmp_path / "images").mkdir()
    shades = (np.random.default_rng(0).random((3, 40, 50, 3)) * (250, 120, 60)).astype(np.uint8)
    for i, shade in enumerate(shades):
        Image.fromarray(shade).save(tmp_path / f"images/{i}.png")
    deep = np.linspace(0, 4095, 2000).astype(np.uint16).reshape(40, 50)
    (tmp_path / "images/deep.tif").write_bytes(tiff(deep))
    found = look(tmp_path / "images", tmp_path, images=2)
    said, found = report(found), found["channels"]
    unit = np.concatenate([shades / 255, np.repeat(deep[None, :, :, None], 3, axis=3) / 4095])
    np.testing.assert_allclose(found["mean"], unit.mean((0, 1, 2)), atol=6e-5)
    np.testing.assert_allclose(found["std"], unit.std((0, 1, 2)), atol=6e-5)
    (flags,) = re.findall(r"channels +(--data.mean \S+ --data.std \S+)\n", said)
    words = flags.split()
    recipe = load_recipe(None, {words[0][2:]: words[1], words[2][2:]: words[3]})
    assert recipe.data.mean == found["mean"] and recipe.data.std == found["std"]


WRITING = {
    ("train", "--config quickstart --print out.yaml"): "out.yaml",
    ("train", "--config quickstart --run_dir out"): "out/config.yaml",
    ("plan", "--config vitti16 --write out.json"): "out.json",
    ("report", "run --out out.html"): "out.html",
    ("look-data", "--config quickstart --out out.png"): "out.png",
    ("eval", "weights --out out.json"): "out.json",
    ("embed", "weights --out out.npy"): "out.npy",
    ("embed", "weights --out out.parquet"): "out.parquet.json",
    ("find", "x.npy 0 --out out"): "out.csv",
    ("curate", "x.npy --clusters 3 --out out"): "out/clusters.csv",
    ("pictures", "weights --only map --out out"): "out/map.png",
    ("export", "weights --format safetensors --out out.safetensors"): "out.json",
    ("export", "weights --format timm --out out"): "out/model.safetensors",
    ("shard", "--root images --out out"): "out/0.tar",
    ("bench tune", "--config vitti16 --out out.html"): "out.json",
    ("bench step", "--profile out"): "out/trace.json",
}
THERE = '{"knn": {}}'
"""The content of the file that is there: results of an evaluation too, to which another one's may be added."""
PRINTING = {"advise", "bench inference", "bench ladder", "doctor"}
"""Commands that write no file."""


def test_every_command_is_here():
    assert {command for command, _ in WRITING} == COMMANDS.keys() - PRINTING


@pytest.mark.parametrize(("command", "words"), WRITING)
def test_what_is_there_stays_and_the_command_says_so(tmp_path, monkeypatch, command, words):
    monkeypatch.chdir(tmp_path)
    file = Path(WRITING[command, words])
    file.parent.mkdir(exist_ok=True)
    file.write_text(THERE)
    Path("images").mkdir()
    for features in ("images/a.png", "x.npy", "x.npy.json"):
        Path(features).touch()
    before = sorted(tmp_path.rglob("*"))
    code, lines = run_command([*command.split(), *words.split()])
    assert code == 2 and str(file.parts[0]) in lines[-1] and not any("Traceback" in line for line in lines)
    assert file.read_text() == THERE and sorted(tmp_path.rglob("*")) == before


def test_a_default_name_that_is_taken_gets_a_number(tmp_path):
    """By any of its files; a name that the user gives is refused."""
    stem, endings = tmp_path / "x-found", (".txt", ".png")
    assert free_stem(None, stem, endings) == str(stem)
    (tmp_path / "x-found.png").touch()
    (tmp_path / "x-found-2.txt").symlink_to("nowhere")
    assert free_stem(None, stem, endings) == f"{stem}-3"
    with pytest.raises(ConfigError, match=r"x-found-2.txt is there already: remove it, or name another with --out"):
        free_stem(f"{stem}-2", stem, endings)

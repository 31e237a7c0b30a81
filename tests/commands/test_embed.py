"""`dino-ds embed`: every form holds what `dino_ds.load` computes, on one rank and two, interrupted too; bad input."""

from __future__ import annotations

import csv
import dataclasses
import errno
import json
import os
import shutil
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

import dino_ds
from dino_ds.commands import embed, embedding_parts
from dino_ds.data import normalization, sources
from dino_ds.errors import ConfigError, DataError, StorageError
from dino_ds.evals.features import range_for
from dino_ds.options.definition import EmbedOptions
from dino_ds.weights import export, sidecar
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder
from tests.weights.test_weights import _backbone

# FP32 sums of another batch, in another order: a few roundings of numbers near 1.
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
IMAGES, BAD = 150, 70


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("embed")
    export.FORMATS["safetensors"](_backbone(), path / "teacher.safetensors")
    image_folder(path / "images", IMAGES, 2)
    name = sources.build_source("folder", str(path / "images"), "train", False).name(BAD)
    (path / "images" / name).write_bytes(b"broken")
    return path


@pytest.fixture(scope="module")
def expected(place):
    """What a loop over the images with `dino_ds.load` gives: features, means of patches, maps; NaN for the bad one."""
    model = dino_ds.load(place / "teacher.safetensors")
    source = sources.build_source("folder", str(place / "images"), "train", False)
    rows = []
    for index in range(len(source)):
        image = model.preprocess(source.load(index if index != BAD else 0))[None] * (1 if index != BAD else torch.nan)
        rows.append((model.features(image)[0], model.patch_tokens(image)[0]))
    features, maps = (torch.stack(found) for found in zip(*rows, strict=True))
    return {"cls": features, "mean": maps.mean(dim=(1, 2)), "patches": maps}


def _options(place, out, **changes):
    options = EmbedOptions(
        model=str(place / "teacher.safetensors"), root=str(place / "images"), out=str(out), workers=0
    )
    return dataclasses.replace(options, **changes)


def _check(found, wanted):
    torch.testing.assert_close(torch.as_tensor(found), wanted, **CLOSE, equal_nan=True)


@pytest.mark.slow
def test_every_form_has_every_image_in_order(place, expected, tmp_path):
    source = sources.build_source("folder", str(place / "images"), "train", False)
    names = [source.name(i) for i in range(len(source))]
    for form in ("npy", "parquet"):
        result = embed.run(_options(place, tmp_path / form / f"x.{form}", batch=37))
    assert "1 images can't be read, their rows are NaN: " + names[BAD] in "".join(result.notes)
    _check(np.load(tmp_path / "npy/x.npy"), expected["cls"])
    with (tmp_path / "npy/x.csv").open() as file:
        head, *lines = csv.reader(file)
    assert head == ["name", "label", "class"] and [line[0] for line in lines] == names
    assert [int(line[1]) for line in lines] == list(source.labels)
    assert [line[2] for line in lines] == [source.classes[label] for label in source.labels]
    parquet = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "parquet/x.parquet")
    assert parquet["name"].to_pylist() == names and parquet["class"].to_pylist() == [line[2] for line in lines]
    _check(np.array(parquet["features"].to_pylist(), np.float32), expected["cls"])
    assert not list(tmp_path.glob("*/*.parts"))


def test_means_maps_and_16_bits(place, expected, tmp_path):
    result = embed.run(_options(place, tmp_path / "mean.npy", what="mean"))
    assert result.data["shape"] == [IMAGES, 64]
    _check(np.load(tmp_path / "mean.npy"), expected["mean"])
    embed.run(_options(place, tmp_path / "maps.npy", what="patches", half=True))
    maps = np.load(tmp_path / "maps.npy")
    assert maps.dtype == np.float16 and maps.shape == expected["patches"].shape
    torch.testing.assert_close(torch.tensor(maps), expected["patches"].half(), rtol=2e-3, atol=1e-3, equal_nan=True)


def test_two_ranks_write_the_same_and_share_the_work(place, expected, tmp_path):
    run_on_ranks(embed.run, _options(place, tmp_path / "x.npy"))
    _check(np.load(tmp_path / "x.npy"), expected["cls"])


@pytest.fixture
def interrupted(place, tmp_path):
    """Options of an embedding of 150 images of which one part of 64 is there; images and weights are own copies."""
    shutil.copytree(place, tmp_path / "place")
    options, plain, done = _options(tmp_path / "place", tmp_path / "x.npy"), embed.describing, list[int]()

    def stopping(model, what):
        def describe(images):
            done.append(len(images))
            if len(done) == 2:
                raise KeyboardInterrupt
            return plain(model, what)(images)

        return describe

    with mock.patch.object(embed, "describing", stopping), pytest.raises(KeyboardInterrupt):
        embed.run(options)
    assert [path.name for path in (tmp_path / "x.npy.parts").glob("0*")] == ["00000000.json"]
    return options


def test_an_interrupted_embedding_goes_on(interrupted, expected, tmp_path, monkeypatch):
    """With what is there: also after a disk that was full at the end."""
    plain, computed = embed.describing, list[int]()

    def counting(model, what):
        return lambda images: computed.append(len(images)) or plain(model, what)(images)

    assert not (tmp_path / "x.npy").exists()
    with pytest.raises(ConfigError, match=r"x\.npy\.parts holds parts of another embedding"):
        embed.run(dataclasses.replace(interrupted, what="mean"))
    monkeypatch.setattr(embed, "describing", counting)
    full = mock.patch.object(embedding_parts, "_write_npy", side_effect=OSError(errno.ENOSPC, "full"))
    with full, pytest.raises(StorageError, match=r"x\.npy can't be written: .*give another --out"):
        embed.run(interrupted)
    killed = mock.patch.object(shutil, "rmtree", side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):  # when the array has its final name, and the folder is still there
        embed.run(interrupted)
    assert (tmp_path / "x.npy").exists() and (tmp_path / "x.npy.parts").is_dir()
    embed.run(interrupted)
    assert sum(computed) == IMAGES - 64 - 1  # a part of 64 was there, and one image can't be read
    _check(np.load(tmp_path / "x.npy"), expected["cls"])


def _other_images(place, parts):
    """Other contents of the same sizes and times."""
    for path in (place / "images").rglob("*.png"):
        time, content = path.stat().st_mtime_ns, path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        os.utime(path, ns=(time, time))


def _other_range(place, _):
    about = sidecar.read_sidecar(place / "teacher.safetensors") | {"value_range": [0, 4095]}
    (place / "teacher.json").write_text(json.dumps(about))


CONTINUED_WITH_OTHERS = {
    "images": (_other_images, "0 of another size, 64 of 64 that were read of other content"),
    "one more": (lambda place, _: image_folder(place / "images/more", 1), "150 -> 151 images: "),
    "range": (_other_range, r"value_range .* -> \[0.0, 4095.0\]"),
}


@pytest.mark.parametrize("what", CONTINUED_WITH_OTHERS)
def test_an_embedding_is_not_continued_with_others(interrupted, tmp_path, what):
    """What the rows depend on is compared with what was begun with, and refused with what differs."""
    change, said = CONTINUED_WITH_OTHERS[what]
    change(tmp_path / "place", tmp_path / "x.npy.parts")
    with pytest.raises(ConfigError, match=rf"holds parts of another embedding \(.*{said}.*\): remove it, or name"):
        embed.run(interrupted)
    assert not (tmp_path / "x.npy").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": "x.txt"}, r"--out x\.txt must end in \.npy .* or \.parquet"),
        ({"size": 33}, r"images of 33 x 33 pixels: wanted are h and w that are multiples of the patch size 8"),
        ({"root": None}, "name images, --root PLACE"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(place, tmp_path, changes, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, DataError), match=message):
        embed.run(_options(place, **{"out": "x.npy", **changes}))
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_is_not_overwritten_and_nothing_is_left_of_unreadable_images(place, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"broken")
    with pytest.raises(DataError, match="none of 1 images can be read"):
        embed.run(_options(place, tmp_path / "x.npy", root=str(tmp_path / "images")))
    assert not list(tmp_path.glob("x.npy*"))
    (tmp_path / "x.csv").write_text("mine")
    with pytest.raises(ConfigError, match=r"x\.csv is there already"):
        embed.check(_options(place, tmp_path / "x.npy"))  # x.csv has the names of its rows


def test_images_that_all_look_the_same_to_a_model_of_deeper_ones_are_said(tmp_path):
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.random.default_rng(number).random((20, 30), np.float32))
    source = sources.build_source("folder", str(tmp_path), "train", False)
    for value_range, warned in (((0.0, 4095.0), True), ((-1.0, 2.0), False)):
        backbone: Any = SimpleNamespace(value_range=value_range, normalization=normalization.IMAGENET)
        found, notes = range_for(backbone, [source])
        assert found == value_range and len(notes) == warned
        assert all(note.startswith("WARNING: 3 of 3 images") and "as the training images" in note for note in notes)


def test_a_model_of_other_channels_than_the_images_is_refused_before_they_are_read(place, tmp_path):
    (tmp_path / "bands").mkdir()
    np.save(tmp_path / "bands" / "a.npy", np.zeros((40, 40, 6), np.uint8))
    (tmp_path / "bands" / "c.heic").touch()
    given = _options(place, tmp_path / "x.npy", root=str(tmp_path / "bands"))
    told = r"takes images of 3 channels, and those looked at have 6, such as .*a\.npy: give images of 3 channels, or a"
    with pytest.raises(ConfigError, match=told):
        embed.run(given)
    assert not list(tmp_path.glob("x.npy*"))
    Image.new("RGB", (40, 40)).save(tmp_path / "bands" / "b.jpg")  # one that fits, of those not opened here
    assert embed.run(given).notes[0].startswith("1 files that can't be read are left out")
    assert np.isfinite(np.load(tmp_path / "x.npy")).all(axis=1).tolist() == [False, True]

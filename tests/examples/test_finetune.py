"""The programs of docs/features.md: each learns from a few images, and says in one line what is wrong with them."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file

from dino_ds.data.named_sets import PhotoPatches
from dino_ds.examples import finetune_classification, finetune_segmentation
from dino_ds.weights.sidecar import read_sidecar

NAMES = ("background", "disc", "box")
QUICK = ("--workers", "0", "--batch", "16")


def _draw(source, number):
    """A photograph with a shape on it, (image, mask, class)."""
    kind = 1 + number % 2
    image = source.load(97 * number % len(source)).convert("RGB").resize((48, 40))
    mask = Image.new("L", image.size)
    left, top = 3 + 5 * number % 20, 2 + 7 * number % 14
    for canvas, fill in ((image, (250, 20, 20) if kind == 1 else (20, 40, 250)), (mask, kind)):
        draw = ImageDraw.Draw(canvas)
        (draw.ellipse if kind == 1 else draw.rectangle)((left, top, left + 22, top + 22), fill=fill)
    mask.putpixel((0, 0), finetune_segmentation.UNKNOWN)
    return image, mask, NAMES[kind]


def draw_images(path):
    """Photographs with shapes, of classes and with masks, for training and tests."""
    source = PhotoPatches("train")
    for part, numbers in (("train", range(48)), ("test", range(48, 64))):
        for number in numbers:
            image, mask, name = _draw(source, number)
            for folder, picture in (
                (f"masked/{part}/images", image),
                (f"masked/{part}/masks", mask),
                (f"{part}/{name}", image),
            ):
                (path / folder).mkdir(parents=True, exist_ok=True)
                picture.save(path / folder / f"{number:03d}.png")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A teacher's file, and images as both programs want them."""
    path = tmp_path_factory.mktemp("finetune")
    torch.manual_seed(0)
    arguments = {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2, "img_size": 32, "num_classes": 0}
    name = "vit_tiny_patch16_224"
    save_file(timm.create_model(name, **arguments).state_dict(), path / "teacher.safetensors")
    about = {"timm_name": name, "timm_arguments": arguments, "mean": [0.5] * 3, "std": [0.25] * 3}
    (path / "teacher.json").write_text(json.dumps(about))
    draw_images(path)
    return path


def _classify(place, out, *more):
    parts = ("--train", place / "train", "--test", place / "test", "--out", out)
    return finetune_classification.main([str(word) for word in (place / "teacher.safetensors", *parts, *QUICK, *more)])


def _segment(place, out, *more):
    parts = ("--train", place / "masked/train", "--test", place / "masked/test", "--out", out)
    words = (place / "teacher.safetensors", *parts, "--classes", ",".join(NAMES), *QUICK, *more)
    return finetune_segmentation.main([str(word) for word in words])


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [(), ("--frozen",)])
def test_classes_are_learned_and_the_best_weights_load_in_timm(place, tmp_path, capsys, frozen):
    best = _classify(place, tmp_path, "--epochs", "8", "--lr", "3e-3", *frozen)
    assert best > 80  # chance 50
    about = json.loads((tmp_path / "best.json").read_text())
    network = timm.create_model(about["timm_name"], **about["timm_arguments"])
    weights = load_file(tmp_path / "best.safetensors")
    network.load_state_dict(weights)
    assert [*about["classes"]] == ["box", "disc"] and about["best"] == best
    assert f"best {best:.2f} %: box" in capsys.readouterr().out
    before = load_file(place / "teacher.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items()) == bool(frozen)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [(), ("--frozen",)])
def test_masks_are_learned_and_drawn(place, tmp_path, frozen):
    """Background everywhere would have a third of its own IoU, about 25 %."""
    best = _segment(place, tmp_path, "--epochs", "10", "--lr", "1e-2", *frozen)
    assert best > 45
    classes = json.loads((tmp_path / "best.json").read_text())["classes"]
    assert [*classes] == [*NAMES] and np.mean([*classes.values()]) == pytest.approx(best, abs=0.01)
    assert Image.open(tmp_path / "overlay.png").size == (3 * 320, 4 * 240)
    weights, before = load_file(tmp_path / "best.safetensors"), load_file(place / "teacher.safetensors")
    assert all(torch.equal(weights[f"backbone.{name}"], tensor) for name, tensor in before.items()) == bool(frozen)


@pytest.mark.slow
def test_any_size_is_taken_and_names_of_timm_build_the_network_again(place):
    for name in (str(place / "teacher.safetensors"), "vit_tiny_patch16_224.augreg_in21k", "resnet18"):
        network, about = finetune_classification.load_teacher(name, 3, random=True)
        assert network.eval()(torch.zeros(2, 3, 48, 48)).shape == (2, 3)
        again = timm.create_model(about["timm_name"], **about["timm_arguments"])
        again.load_state_dict(network.state_dict())


def test_images_deeper_than_8_bits_are_refused_and_not_cut_off(place, tmp_path, capsys):
    Image.fromarray(np.full((4, 4), 4000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(ValueError, match="more than 8 bits"):
        finetune_classification.open_upright(tmp_path / "deep.png")
    for name in NAMES[1:]:
        (tmp_path / "train" / name).mkdir(parents=True)
        shutil.copy(tmp_path / "deep.png", tmp_path / "train" / name)
    with pytest.raises(ValueError, match="more than 8 bits"):
        _classify(place, tmp_path / "out", "--train", tmp_path / "train")
    about = read_sidecar(place / "teacher.safetensors") | {"value_range": [0.0, 4095.0]}
    (tmp_path / "teacher.json").write_text(json.dumps(about))
    shutil.copy(place / "teacher.safetensors", tmp_path)
    with pytest.raises(SystemExit, match="2"):
        finetune_classification.load_teacher(str(tmp_path), 2)
    assert "takes images of more than 8 bits" in capsys.readouterr().err


def test_a_size_that_patches_do_not_divide_is_one_line(place, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        _classify(place, tmp_path / "out", "--size", "50")
    assert capsys.readouterr().err == "--size 50 is not a multiple of the patch size: give 48\n"
    assert not (tmp_path / "out").exists()


def test_photographs_are_turned_as_their_exif_says(tmp_path):
    image = Image.new("RGB", (40, 30))
    image.getexif()[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=image.getexif())
    assert finetune_classification.open_upright(tmp_path / "turned.jpg").size == (30, 40)


SPOILT = {
    "has no mask": lambda folder: _a_mask(folder).unlink(),
    "is (9, 9) of mode L, and its image wants (48, 40)": lambda folder: Image.new("L", (9, 9)).save(_a_mask(folder)),
    "has class 7: --classes names 0 to 2": lambda folder: Image.new("L", (48, 40), 7).save(_a_mask(folder)),
    "of mode RGB": lambda folder: Image.new("RGB", (48, 40)).save(_a_mask(folder)),
    "no images in": lambda folder: shutil.rmtree(folder / "images"),
}


def _a_mask(folder):
    return min((folder / "masks").iterdir())


@pytest.mark.parametrize("message", SPOILT)
def test_masks_that_do_not_fit_are_one_line(place, tmp_path, capsys, message):
    shutil.copytree(place / "masked/test", tmp_path / "test")
    SPOILT[message](tmp_path / "test")
    with pytest.raises(SystemExit, match="2"):
        finetune_segmentation.Masked(tmp_path / "test", 3, None)
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("model", "train", "code", "message"),
    [
        ("teacher.safetensors", "masked", 2, "they must be the same"),
        ("nothing.safetensors", "train", 3, "is missing: give a run folder"),
        ("vit_of_nobody", "train", 3, "nor a name of timm's"),
        ("masked", "train", 3, "is missing: give a run folder"),
    ],
)
def test_a_model_or_classes_that_do_not_fit_are_one_line(
    place, tmp_path, monkeypatch, capsys, model, train, code, message
):
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit) as stopped:
        finetune_classification.main([model, "--train", train, "--test", "test", "--out", str(tmp_path / "out")])
    assert stopped.value.code == code and message in capsys.readouterr().err and not (tmp_path / "out").exists()

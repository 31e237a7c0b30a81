"""The programs of docs/features.md: each learns from a few images, and says in one line what is wrong with them."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from dino_ds.data.images import UnreadableImage
from dino_ds.data.sources import PhotoPatches
from dino_ds.examples import finetune_classification, finetune_segmentation
from dino_ds.models.foreign import build_backbone
from dino_ds.models.specs.backbones import VITS
from dino_ds.weights.export import export_timm
from dino_ds.weights.load import Backbone

NAMES = ("background", "disc", "box")


def _draw(source, number):
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
    source = PhotoPatches("train")
    for part, numbers in (("train", range(96)), ("test", range(96, 144))):
        for number in numbers:
            image, mask, name = _draw(source, number)
            pictures = {f"masked/{part}/images": image, f"masked/{part}/masks": mask, f"{part}/{name}": image}
            for folder, picture in pictures.items():
                (path / folder).mkdir(parents=True, exist_ok=True)
                picture.save(path / folder / f"{number:03d}.png")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("finetune")
    torch.manual_seed(0)
    spec = dataclasses.replace(VITS["vit_tiny_patch16_224"], patch_size=8, width=48, depth=2, heads=2)
    backbone = Backbone(build_backbone(spec, 32), 32, "a test", {"mean": [0.5] * 3, "std": [0.25] * 3})
    export_timm(backbone, path / "model")
    draw_images(path)
    return path


def _run(program, place, images, out, *more):
    parts = (place / "model", "--train", images / "train", "--test", images / "test", "--out", out)
    return program.main([str(word) for word in (*parts, "--workers", "0", "--batch", "16", *more)])


def _classify(place, out, *more):
    return _run(finetune_classification, place, place, out, *more)


def _segment(place, out, *more):
    return _run(finetune_segmentation, place, place / "masked", out, "--classes", ",".join(NAMES), *more)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [(), ("--frozen",)])
def test_classes_are_learned_and_the_best_weights_load_in_timm(place, tmp_path, capsys, frozen):
    best = _classify(place, tmp_path, "--epochs", "6", "--lr", "1e-2", *frozen)
    assert best > 80  # chance 50
    network = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    weights = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in network.state_dict().items())
    assert network.pretrained_cfg["label_names"] == ["box", "disc"] and network.num_classes == 2
    assert f"test images: {best:.2f} %" in capsys.readouterr().out
    before = load_file(place / "model/model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items()) == bool(frozen)


@pytest.mark.slow
@pytest.mark.parametrize("more", [("--size", "40"), ("--frozen",)])
def test_masks_are_learned_and_drawn(place, tmp_path, capsys, more):
    """Background everywhere would have a third of its own IoU, about 25 %."""
    best = _segment(place, tmp_path, "--epochs", "6", "--lr", "1e-2", *more)
    assert best > 45 and "; epoch 6: loss" in capsys.readouterr().out
    assert Image.open(tmp_path / "overlay.png").size == (3 * 320, 4 * 240)
    weights, before = (load_file(folder / "model.safetensors") for folder in (tmp_path, place / "model"))
    is_same = all(torch.equal(weights[f"backbone.{name}"], tensor) for name, tensor in before.items())
    assert is_same == ("--frozen" in more)


def test_images_are_read_as_the_teacher_saw_them(tmp_path):
    image = Image.new("RGB", (40, 30))
    image.getexif()[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=image.getexif())
    assert finetune_classification.open_upright(tmp_path / "turned.jpg").size == (30, 40)
    Image.fromarray(np.full((4, 4), 4000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(UnreadableImage, match="deeper than 8 bits"):
        finetune_classification.open_upright(tmp_path / "deep.png")
    gray = finetune_classification.open_upright(tmp_path / "deep.png", (0, 8000), 1)
    assert gray.shape == (1, 4, 4) and gray.unique().tolist() == [0.5]


@pytest.mark.slow
@pytest.mark.parametrize("program", [_classify, _segment])
def test_broken_images_are_left_out_and_test_images_choose_no_epoch(place, tmp_path, capsys, program):
    for part in ("train", "test"):
        for folder in ("box", f"../masked/{part}/images"):
            (place / part / folder / "broken.png").write_bytes(b"broken")
    program(place, tmp_path / "a", "--epochs", "1")
    told = capsys.readouterr()
    assert told.err.count("left out: ") == 2 and "broken.png" in told.err
    assert "is chosen, by" in told.out and "test images: " in told.out.splitlines()[-1]
    swapped = ("--test", place / ("train" if program is _classify else "masked/train"))
    program(place, tmp_path / "b", "--epochs", "1", *swapped)
    chosen = [line for line in told.out.splitlines() if "epoch " in line]
    assert [line for line in capsys.readouterr().out.splitlines() if "epoch " in line] == chosen
    with pytest.raises(SystemExit, match="2"):
        program(place, tmp_path / "b", "--epochs", "1")
    assert "is there already" in capsys.readouterr().err
    for broken in place.rglob("broken.png"):
        broken.unlink()


SPOILT = {
    "missing": lambda mask: mask.unlink(),
    "size": lambda mask: Image.new("L", (9, 9)).save(mask),
    "class": lambda mask: Image.new("L", (48, 40), 7).save(mask),
    "channels": lambda mask: Image.new("RGB", (48, 40)).save(mask),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_masks_that_do_not_fit_are_one_line(place, tmp_path, fault):
    shutil.copytree(place / "masked/test", tmp_path / "test")
    SPOILT[fault](min((tmp_path / "test/masks").iterdir()))
    with pytest.raises(SystemExit, match=r"wants a mask .* of its size, one channel of classes 0 to 2 or 255"):
        finetune_segmentation.Masked(tmp_path / "test", 3, None)


def test_a_model_or_classes_that_do_not_fit_are_one_line(place, tmp_path, capsys):
    with pytest.raises(SystemExit, match="has the class folders"):
        _classify(place, tmp_path / "out", "--train", place / "masked")
    with pytest.raises(SystemExit, match="2"):
        finetune_classification.main([str(place / "train"), "--train", "a", "--test", "b", "--out", "c"])
    assert "has no config.json: give a folder of dino-ds export" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

"""`dino-ds advise` as people meet it: the command that it prints is one that `train` takes; mistakes are one line."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from dino_ds.cli.main import main, parse, prepare
from dino_ds.errors import ConfigError
from dino_ds.options.commands import COMMANDS, TRAIN
from dino_ds.options.flags import parse_flags, read
from dino_ds.planning import advise
from tests.run.harness import REPOSITORY, image_folder


def _advise(capsys, *words):
    main(["advise", *words, "--sample", "20", "--json"])
    return json.loads(capsys.readouterr().out)


def _accepted(command):
    """The recipe that `train` reads from a printed command."""
    words = shlex.split(command)
    start = 2 if words[0] == "dino-ds" else words.index("--module") + 2
    assert words[start - 1] in ("train", "dino_ds.train")
    return read(TRAIN, parse_flags(TRAIN, words[start:]))[1]["recipe"]


def _photographs(place, count=100, side=100):
    for file in image_folder(place, count, classes=2).rglob("*.png"):
        Image.open(file).resize((side, side)).save(file)
    return place


NOISE = """
import numpy as np
class Noise:
    def __init__(self, root): self.images, self.shape = int(root.split("_")[0]), tuple(map(int, root.split("_")[1:]))
    def __len__(self): return self.images
    def name(self, index): return str(index)
    def load(self, index):
        image = np.random.default_rng(index).integers(0, 255, (self.shape[0], *self.shape), np.uint8)
        return image if self.shape[1] > 1 else image[..., 0]
"""


def test_fifty_thousand_photographs_on_one_card_are_a_page_whose_command_a_shell_reads(tmp_path, capsys):
    lines = [str(file) for file in sorted(_photographs(tmp_path, 20, 300).rglob("*.png"))]
    (tmp_path / "list.txt").write_text("\n".join(lines * 2500))
    found = _advise(capsys, str(tmp_path / "list.txt"), "--gpus", "1")
    assert found["decisive"] == {"images": 50_000, "side": 300, "channels": 3, "gpus": 1}
    start = f"--config continue --data.root {tmp_path}/list.txt --model.init_from vit_small_patch16_224.dino"
    assert found["command"] == f"dino-ds train {start}" and _accepted(found["command"]).data.global_batch == 64
    many = _advise(capsys, str(tmp_path / "list.txt"), "--gpus", "8")
    assert (
        "deepspeed --num_gpus 8 --module dino_ds.train --config" in many["command"]
        and _accepted(many["command"]).data.global_batch % 8 == 0
    )
    (tmp_path / "list.txt").write_text("\n".join(lines * 15))
    main(["advise", str(tmp_path / "list.txt"), "--gpus", "1", "--sample", "20"])
    page, said = capsys.readouterr()
    assert len(page.splitlines()) < 60
    assert all(len(line) <= 120 or line.strip().startswith("dino-ds ") for line in page.splitlines())
    assert "rule of thumb" in page and "looking at 20 of 300 images" in said
    start = page.index("dino-ds train")
    _accepted(page[start : page.index("\n", start)])


def test_small_images_and_other_channels_are_trained_from_scratch(tmp_path, monkeypatch, capsys):
    (tmp_path / "advised_noise.py").write_text(NOISE)
    monkeypatch.chdir(tmp_path)
    found = _advise(capsys, "--source", "advised_noise:Noise", "--root", "4000_120_6", "--gpus", "1")
    recipe = _accepted(found["command"])
    assert recipe.model.in_chans == 6 and recipe.model.init_from is None and recipe.crops.global_size == 112
    assert any("look-data --data.source advised_noise:Noise" in note for note in found["notes"])
    found = _advise(capsys, "--source", "photos", "--gpus", "1")
    recipe = _accepted(found["command"])
    assert recipe.data.source == "photos" and recipe.model.init_from is None and recipe.crops.augment == "low_res"


def test_a_folder_of_tests_beside_the_training_images_is_named_and_not_trained_on(tmp_path, capsys):
    place = tmp_path / "my images"
    _photographs(place / "train")
    image_folder(place / "val", 4, classes=2)
    found = _advise(capsys, str(place / "train"), "--gpus", "1")
    assert _accepted(found["command"]).eval.root == str(place / "val") and found["found"]["classes"] == 2
    with pytest.raises(SystemExit) as stopped:
        main(["advise", str(place)])
    says = (
        f"holds train/ and val/: name the images to train on, {place}/train (for train, labeled test images: "
        f"--eval.root {place}"
    )
    assert stopped.value.code == 2 and says in capsys.readouterr().err
    words = ["train", "--config", "small", "--data.root", str(place), "--run_dir", str(tmp_path / "run")]
    with pytest.raises(ConfigError, match=re.escape(says)):
        prepare(*parse(words))
    (tmp_path / "run/checkpoints/step_1").mkdir(parents=True)  # a run that began with both goes on with both
    (tmp_path / "run/config.yaml").write_text("format: 1\n")
    prepare(*parse([*words, "--resume"]))


def test_frozen_features_are_named_without_a_gpu_too(tmp_path, capsys):
    notes = _advise(capsys, str(_photographs(tmp_path)))["notes"]
    command = f"dino-ds embed vit_small_patch14_dinov2.lvd142m --size 224 --root {tmp_path} --out"
    assert any(command in note for note in notes)


def test_without_a_gpu_the_ways_are_compared_each_with_a_command_that_runs(tmp_path, capsys):
    found = _advise(capsys, str(_photographs(tmp_path / "my images", side=40)))
    as_they_are, *trained = found["ways"]
    words = shlex.split(as_they_are["command"])
    options = read(COMMANDS["embed"], parse_flags(COMMANDS["embed"], words[2:]))[0]
    assert words[1] == "embed" and str(tmp_path / "my images") in str(options.root)
    recipes = [_accepted(way["command"]) for way in trained]
    assert {recipe.data.root for recipe in recipes} == {str(tmp_path / "my images")}
    assert recipes[0].model.init_from and recipes[1].teacher.source and trained[1]["command"] == found["command"]
    main(["advise", str(tmp_path / "my images"), "--sample", "20"])
    page = capsys.readouterr().out
    assert all(way["command"] in page and " ".join(way["gave"].split()[:3]) in page for way in found["ways"])


def test_what_is_wrong_with_the_images_is_said(tmp_path, capsys):
    image_folder(tmp_path, 100)
    for number in range(30):
        (tmp_path / f"{number:03d}.png").write_bytes(b"broken")
    for number in range(40, 60):
        Image.fromarray(np.full((60, 60), 1000 * number, np.uint16)).save(tmp_path / f"{number:03d}.png")
    main(["advise", str(tmp_path), "--json"])
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert "30.0% of the images can't be read" in " ".join(notes)
    (deep,) = [note for note in notes if "uint16, uint8" in note]
    assert deep.splitlines()[-1] == f"  dino-ds look-data --data.root {tmp_path}"


@pytest.mark.slow
def test_advise_waits_for_torch_alone():
    """DeepSpeed and torchvision take longer to load than all that advise does."""
    code = "import sys, dino_ds.planning.advise; print({'deepspeed', 'timm', 'torchvision'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout == "set()\n" and not COMMANDS["advise"].loads_torch


def test_slow_images_are_looked_at_for_three_seconds(monkeypatch):
    monkeypatch.setattr(advise, "open_image", lambda *_: time.sleep(0.01) or Image.new("RGB", (50, 50)))
    monkeypatch.setattr(advise, "_SECONDS", 0.05)
    monkeypatch.setattr(Image.Image, "values", lambda image: np.asarray(image), raising=False)
    monkeypatch.setattr(Image.Image, "channels", 3, raising=False)

    class Many(list):
        classes = None

    assert advise._look_at(Many(range(1000)), 500)["looked_at"] == 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no images are given: dino-ds advise DIR"),
        (["{seven}"], "take released features, dino-ds embed vit_small_patch14_dinov2.lvd142m --size 224 --root"),
        (["{six}"], "7 images are too few to learn from (LightlyTrain recommends several thousand): released weights"),
        (["{broken}"], "none of the 20 images looked at can be read"),
        (["--data.root", "{seven}"], "write --root"),
        (["{seven}", "--workers", "3"], "--workers: unknown option"),
    ],
)
def test_mistakes_are_one_line(tmp_path, words, message, capsys):
    places = {name: tmp_path / name for name in ("seven", "six", "broken")}
    image_folder(places["seven"], 7)
    for name in ("six", "broken"):
        places[name].mkdir()
    for number in range(7):
        np.save(places["six"] / f"{number}.npy", np.full((20, 20, 6), number, np.uint8))
    for number in range(100):
        (places["broken"] / f"{number}.jpg").write_text("text")
    with pytest.raises(SystemExit) as stopped:
        main(["advise", *(word.format(**places) for word in words), *(["--sample", "20"] if words else [])])
    assert stopped.value.code != 0
    said = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(said) == 1 and message in said[0]

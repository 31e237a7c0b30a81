"""`dino-ds advise` as people meet it: the command that it prints is one that `train` takes; mistakes are one line."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex

import numpy as np
import pytest
from PIL import Image

from dino_ds.cli.main import main
from dino_ds.options.commands import COMMANDS, TRAIN
from dino_ds.options.flags import parse_flags
from dino_ds.options.reading import read
from tests.run.harness import image_folder
from tests.sample import sampled

QUICK = ("--workers", "0", "--sample", "20")


def _advise(capsys, *words):
    main(["advise", *words, *QUICK, "--json"])
    return json.loads(capsys.readouterr().out)


def _accepted(command):
    """The recipe that `train` reads from a printed command."""
    words = shlex.split(command)
    assert words[:2] in (["dino-ds", "train"], ["dino-ds", "launch"])
    if words[1] == "train":
        return read(TRAIN, parse_flags(TRAIN, words[2:]))[1]["recipe"]
    return read(COMMANDS["launch"], parse_flags(COMMANDS["launch"], words[2:]))[1]["train"]["recipe"]


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Lists of 50,000 images, of 300 and of 7: the same 20 files, many times; and a folder of files that are broken."""
    path = tmp_path_factory.mktemp("advise")
    files = image_folder(path / "train", 20, classes=2).rglob("*.png")
    for file in [*files]:
        Image.open(file).resize((400, 300)).save(file)
    lines = [str(file) for file in sorted((path / "train").rglob("*.png"))]
    (path / "list.txt").write_text("\n".join(lines * 2500))
    (path / "few.txt").write_text("\n".join(lines * 15))
    (path / "seven.txt").write_text("\n".join(lines[:7]))
    (path / "six").mkdir()
    for number in range(7):
        np.save(path / f"six/{number}.npy", np.full((20, 20, 6), number, np.uint8))
    (path / "broken").mkdir()
    for number in range(100):
        (path / f"broken/{number}.jpg").write_text("text")
    return path


IMAGES, SIDES, CHANNELS = (100, 120, 1000, 10_000, 100_000, 1_300_000), (32, 64, 375, 1024), (1, 4)
CARDS = ("none", "1 rtx3080-12g", "8 rtx3080-12g", "1 rtx4090-24g", "8 rtx4090-24g", "1 a100-80g", "8 a100-80g")
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


@pytest.mark.parametrize(
    ("images", "side", "channels", "card"), sampled(itertools.product(IMAGES, SIDES, CHANNELS, CARDS))
)
def test_every_advice_holds_together(images, side, channels, card, tmp_path, monkeypatch, capsys):
    """Settings follow from the images, `train` takes them, and each reason speaks of the value beside it."""
    (tmp_path / "advised_noise.py").write_text(NOISE)
    monkeypatch.chdir(tmp_path)
    offered, _, gpu = card.partition(" ")
    words = ["--gpu", gpu, "--gpus", offered] if gpu else []
    source = [
        "--source",
        "advised_noise:Noise",
        "--root",
        f"{images}_{side}_{channels}",
        "--sample",
        "2",
        "--workers",
        "0",
    ]
    main(["advise", *source, *words, "--json"])
    found = json.loads(capsys.readouterr().out)
    recipe, rows = _accepted(found["command"]), {row["setting"]: row for row in found["advice"]}
    recipe.check_learning_rates()
    recipe.check_batch()
    crops, batch, gpus = recipe.crops, recipe.data.global_batch, max(1, found["gpus"])
    assert crops.local_size < crops.global_size <= side and crops.global_size >= min(side, 224) / 8
    assert rows["crops"]["value"] == f"2 x {crops.global_size} + {crops.num_local} x {crops.local_size} px"
    assert batch % gpus == 0 and batch // gpus >= 32 and batch <= images
    ranks = re.findall(r"--ranks (\d+)", found["command"])
    assert ranks == ([str(gpus)] if gpus > 1 else []) and gpus <= int(offered if gpu else 1)
    if found["gpus"] < (int(offered) if gpu else 0):
        assert rows["GPUs"]["value"] == f"{gpus} of {offered}" and rows["GPUs"]["why"].startswith(f"{batch} images")
    if gpu:
        assert images // batch >= 3 and math.isfinite(found["prediction"]["hours"]) and found["prediction"]["hours"] > 0
        assert rows["batch"]["value"] == str(batch) and "35.2" not in rows["batch"]["why"]
        assert ("fewer than 8 steps" in rows["batch"]["why"]) <= (images // batch >= 8 > images // (2 * batch))
        assert _number(r"leaves (\d+) steps", rows["batch"]["why"]) in (None, images // batch)
        epochs = _number(r"(\d+) epochs = ", rows["length"]["value"])
        assert epochs is None or _number(r"= ([\d,]+) steps", rows["length"]["value"]) == images // batch * epochs
    if "prototypes" in rows:
        assert rows["prototypes"]["value"] == f"{recipe.head.prototypes:,}"
        assert ("16 images or more" in rows["prototypes"]["why"]) == (16 * recipe.head.prototypes <= images)


def _number(pattern, text):
    found = re.search(pattern, text)
    return found and int(found[1].replace(",", ""))


@pytest.mark.slow
def test_fifty_thousand_photographs_on_one_card_of_24_gb(photographs, capsys):
    found = _advise(capsys, str(photographs / "list.txt"), "--gpu", "rtx4090-24g")
    assert found["decisive"] == {"images": 50_000, "side": 300, "channels": 3}
    recipe = _accepted(found["command"])
    start = f"--config continue --data.root {recipe.data.root} --model.init_from vit_small_patch16_224.dino"
    assert found["command"] == f"dino-ds train {start}" and recipe.data.global_batch == 256
    assert recipe.data.root == str(photographs / "list.txt")
    prediction = found["prediction"]
    seconds = recipe.length.in_steps(256, 50_000 // 256) * 256 / prediction["images_per_second"]
    assert prediction["hours"] == pytest.approx(seconds / 3600) and 0 < prediction["memory_gib"] < 24
    assert all(row["why"] for row in found["advice"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("images", "words"),
    [
        ("few.txt", ("--gpu", "h100-80g", "--gpus", "8")),
        ("few.txt", ()),
        ("list.txt", ("--memory_gib", "8", "--nodes", "2")),
    ],
)
def test_the_printed_command_is_one_that_train_takes(photographs, words, images, capsys):
    found = _advise(capsys, str(photographs / images), *words)
    recipe = _accepted(found["command"])
    assert recipe.data.source == "folder" and recipe.data.root == str(photographs / images)
    assert recipe.data.global_batch <= found["decisive"]["images"]
    assert bool(found["prediction"]) == bool(words)


@pytest.mark.slow
def test_a_page_of_one_screen_whose_command_a_shell_reads(photographs, capsys):
    main(["advise", str(photographs / "few.txt"), "--gpu", "rtx4090-24g", *QUICK])
    page = capsys.readouterr().out
    lines = page.splitlines()
    assert len(lines) < 60 and max(map(len, lines)) <= 120
    assert "not verified on a GPU" in page and "300 images are few" in page and "rule of thumb" in page
    start = page.index("dino-ds train")
    _accepted(page[start : page.index("\n\n", start)].replace("\\\n", " "))


@pytest.mark.slow
def test_small_images_and_other_channels_are_trained_from_scratch(tmp_path, monkeypatch, capsys):
    (tmp_path / "sixfold.py").write_text(
        "import numpy as np\n"
        "class Six:\n"
        "    def __init__(self, root): pass\n"
        "    def __len__(self): return 4000\n"
        "    def name(self, index): return str(index)\n"
        "    def load(self, index): return np.full((120, 140, 6), index % 256, np.uint8)\n"
    )
    monkeypatch.chdir(tmp_path)
    found = _advise(capsys, "--source", "sixfold:Six", "--gpu", "t4-16g")
    recipe = _accepted(found["command"])
    assert recipe.model.in_chans == 6 and recipe.model.init_from is None and recipe.crops.global_size == 112
    assert any("look-data --data.source sixfold:Six --model.in_chans 6" in note for note in found["notes"])
    found = _advise(capsys, "--source", "photos", "--gpu", "t4-16g")
    recipe = _accepted(found["command"])
    assert recipe.data.source == "photos" and recipe.model.init_from is None and recipe.crops.augment == "low_res"
    assert any("bench workers --data.source photos" in note for note in found["notes"])


def test_a_folder_of_tests_beside_the_training_images_is_named(tmp_path, capsys):
    place = tmp_path / "my images"
    for file in image_folder(place / "train", 100, classes=2).rglob("*.png"):
        Image.open(file).resize((100, 100)).save(file)
    image_folder(place / "test", 4, classes=2)
    found = _advise(capsys, str(place / "train"), "--gpu", "t4-16g")
    assert _accepted(found["command"]).eval.root == str(place / "test")
    assert found["found"]["classes"]["count"] == 2
    (command,) = [line for note in found["notes"] for line in note.splitlines() if "dino-ds eval" in line]
    assert shlex.split(command)[-3:] == [str(place / "train"), "--test_root", str(place / "test")]


def test_frozen_features_are_named_without_a_gpu_too(tmp_path, capsys):
    for file in image_folder(tmp_path, 100).rglob("*.png"):
        Image.open(file).resize((100, 100)).save(file)
    notes = _advise(capsys, str(tmp_path))["notes"]
    assert any(f"dino-ds embed vit_small_patch16_224.dino --root {tmp_path} --out" in note for note in notes)
    assert not any("distil" in note for note in notes)


def test_what_is_wrong_with_the_images_is_said(tmp_path, capsys):
    image_folder(tmp_path, 100)
    for number in range(30):
        (tmp_path / f"{number:03d}.png").write_bytes(b"broken")
    for number in range(40, 60):
        Image.fromarray(np.full((60, 60), 1000 * number, np.uint16)).save(tmp_path / f"{number:03d}.png")
    main(["advise", str(tmp_path), "--workers", "0", "--json"])
    notes = " ".join(json.loads(capsys.readouterr().out)["notes"])
    assert "30.0% of the images can't be read" in notes and "uint16" in notes and "look the same" in notes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no images are given: dino-ds advise DIR"),
        (["{seven}"], "take released features, dino-ds embed vit_small_patch16_224.dino --root"),
        (
            ["{six}"],
            "7 images are too few to learn from (LightlyTrain recommends several thousand): released weights have",
        ),
        (["{broken}"], "none of the 20 images looked at can be read"),
        (["{good}", "--gpu", "4090"], "Did you mean rtx4090-24g?"),
        (["{good}", "--gpus", "4"], "no GPU is given: --gpu NAME"),
        (["{good}", "--memory_gib", "0.2"], "nothing fits 0.194 GiB"),
        (["--data.root", "{good}"], "give it without a name: dino-ds advise"),
    ],
)
def test_mistakes_are_one_line(photographs, words, message, capsys):
    places = {"good": photographs / "few.txt", "broken": photographs / "broken", "seven": photographs / "seven.txt"}
    places["six"] = photographs / "six"
    with pytest.raises(SystemExit) as stopped:
        main(["advise", *(word.format(**places) for word in words), *QUICK])
    assert stopped.value.code != 0
    said = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(said) == 1 and message in said[0]

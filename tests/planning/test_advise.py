"""`dino-ds advise`: its rules have sources and give recipes that load; its command is one that `train` takes."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from dino_ds.cli.main import main, parse, prepare
from dino_ds.config.loading import load_recipe
from dino_ds.config.sections import fitting_sizes
from dino_ds.errors import ConfigError
from dino_ds.method.specs.base import StepImages
from dino_ds.method.specs.own import check_images_together
from dino_ds.options.commands import COMMANDS, TRAIN
from dino_ds.options.flags import parse_flags, read
from dino_ds.planning.advise import Situation, advise
from dino_ds.run.beginning import few_images
from tests.run.harness import REPOSITORY, image_folder


def _advise(capsys, *words):
    main(["advise", *words, *([] if "--sample" in words else ["--sample", "20"]), "--json"])
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
    def __init__(self, root): self.images = int(root)
    def __len__(self): return self.images
    def name(self, index): return str(index)
    def load(self, index): return np.random.default_rng(index).integers(0, 255, (120, 120, 6), np.uint8)
"""


def test_fifty_thousand_photographs_on_one_card_are_a_page_whose_command_a_shell_reads(tmp_path, capsys):
    lines = [str(file) for file in sorted(_photographs(tmp_path, 20, 300).rglob("*.png"))]
    (tmp_path / "list.txt").write_text("\n".join(lines * 2500))
    found = _advise(capsys, str(tmp_path / "list.txt"), "--gpus", "1")
    assert found["decisive"] == {"images": 50_000, "side": 300, "channels": 3, "gpus": 1}
    features = f"dino-ds embed vit_small_patch14_dinov2.lvd142m --size 224 --root {tmp_path}/list.txt --out"
    assert any(features in note for note in found["notes"])
    start = f"--config continue --data.root {tmp_path}/list.txt --model.init_from vit_small_patch16_224.dino"
    assert found["command"] == f"dino-ds train {start}" and _accepted(found["command"]).data.global_batch == 64
    many = _advise(capsys, str(tmp_path / "list.txt"), "--gpus", "8")["command"]
    assert "deepspeed --num_gpus 8 --module dino_ds.train --config" in many and _accepted(many)
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
    found = _advise(capsys, "--source", "advised_noise:Noise", "--root", "4000", "--gpus", "1")
    recipe = _accepted(found["command"])
    assert recipe.model.in_chans == 6 and recipe.model.init_from is None and recipe.crops.global_size == 112
    assert any("--data.source advised_noise:Noise" in note and "look-data --config" in note for note in found["notes"])
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
    with pytest.raises(ConfigError, match=re.escape(says)):
        prepare(*parse(["train", "--config", "small", "--data.root", str(place), "--run_dir", str(tmp_path / "run")]))


def test_without_a_gpu_the_ways_are_compared_each_with_a_command_that_runs(tmp_path, capsys):
    found = _advise(capsys, str(_photographs(tmp_path / "my images", side=40)))
    as_they_are, *trained = found["ways"]
    assert [way["way"] for way in found["ways"]] == ["as they are", "continue", "teach", "from scratch"]
    assert all(way["gave"] and way["minutes"] < 60 for way in found["ways"])
    words = shlex.split(as_they_are["command"])
    options = read(COMMANDS["embed"], parse_flags(COMMANDS["embed"], words[2:]))[0]
    assert words[1] == "embed" and str(tmp_path / "my images") in str(options.root)
    recipes = [_accepted(way["command"]) for way in trained]
    assert {recipe.data.root for recipe in recipes} == {str(tmp_path / "my images")}
    assert {recipe.eval.val_share for recipe in recipes} == {0.1}
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
    result = json.loads(capsys.readouterr().out)
    notes, commands = result["notes"], [result["command"], *(way["command"] for way in result["ways"])]
    assert "30.0% of the images can't be read as 3 channels, such as " in " ".join(notes)
    assert ", more than a run allows: the commands allow 60%; all of them: " in " ".join(notes)
    assert all("embed" in command or "--data.max_bad_fraction 0.6" in command for command in commands)
    (deep,) = [note for note in notes if "uint16, uint8" in note]
    assert "data.max_bad_fraction" not in deep
    assert deep.splitlines()[-1].startswith("  dino-ds look-data --config ") and f"--data.root {tmp_path}" in deep


def test_images_of_a_microscope_are_read_with_their_channels_as_the_run_reads_them(tmp_path, capsys):
    """Half of the files have a page a channel, as ImageJ writes them, half have planes of one page."""
    tifffile = pytest.importorskip("tifffile")
    image = np.arange(4 * 40 * 40, dtype=np.uint16).reshape(4, 40, 40) % 4096
    for number in range(100):
        how = {"imagej": True} if number % 2 else {"photometric": "minisblack", "planarconfig": "separate"}
        tifffile.imwrite(tmp_path / f"{number:03d}.tif", image, **how, metadata={"axes": "CYX"})
    found = _advise(capsys, str(tmp_path))
    assert _accepted(found["command"]).model.in_chans == 4 and found["found"]["unreadable"]["count"] == 0


def test_signed_values_get_a_range_in_every_command_that_trains_and_no_other_command(tmp_path, capsys):
    image_folder(tmp_path, 100)
    for number, file in enumerate(sorted(tmp_path.rglob("*.png"))):
        np.save(file.with_suffix(".npy"), np.full((64, 64), 10 * number - 500, np.int16))
        file.unlink()
    found = _advise(capsys, str(tmp_path), "--sample", "100")
    commands = [found["command"], *(way["command"] for way in found["ways"])]
    assert len(commands) == 4 and {_accepted(command).data.value_range for command in commands} == {(-500.0, 490.0)}
    main(["advise", str(tmp_path), "--sample", "100"])
    page = capsys.readouterr().out
    assert "gray, int16" in page and "which int16 values are black and white is not known" in page
    assert "dino-ds embed" not in page


@pytest.mark.slow
def test_advise_does_not_wait_for_torch():
    """Which takes longer to load than all that advise does, and is asked only where there may be a GPU."""
    code = "import sys, dino_ds.planning.advise; print({'torch', 'deepspeed', 'timm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout == "set()\n" and not COMMANDS["advise"].loads_torch


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


COUNTS = [100, 101, 300, 1000, 2999, 10_000, 49_999, 50_000, 99_999, 100_000, 999_999, 10**6, 1_280_000, 10**7, 10**9]
SOURCES = ("arXiv", "dino", "LightlyTrain", "docs/", "rule of thumb", "released weights")


@pytest.mark.parametrize("gpus", [0, 1, 3, 8, 64])
def test_every_advice_has_a_reason_and_is_a_recipe_that_train_accepts(gpus):
    for images, side, channels in itertools.product(COUNTS[::3], (8, 95, 375), (1, 6)):
        facts = Situation(images, side, channels, gpus)
        rows = advise(facts)
        assert all(any(source in row.why for source in SOURCES) for row in rows), rows
        flags = _flags(facts)
        assert len(flags) == sum(len(row.flags) for row in rows), "two rows set one key"
        recipe = load_recipe(facts.recipe, {"data.source": "folder", "data.root": "x", **flags})
        recipe.check_learning_rates()
        check_images_together(recipe, StepImages(recipe.data.global_batch, 1, 1))
        value, crops, batch = {row.setting: row.value for row in rows}, recipe.crops, recipe.data.global_batch
        local = f" + {crops.num_local} x {crops.local_size}" if crops.num_local else ""
        assert value["crops"] == f"2 x {crops.global_size}{local} px"
        if rate := value.get("learning rate"):
            assert rate.startswith(f"{recipe.optimizer.lr:g} for 256 images")
            assert batch == 256 or f": {recipe.peak_lr:.2g} for {batch}," in rate
        assert not gpus or batch % gpus == 0
        assert recipe.model.in_chans == (3 if facts.has_color else channels)
        steps = max(1, images // batch)
        shown = recipe.length.in_steps(batch, steps) * batch
        assert not any("shown" in line for line in few_images(images, shown))


def _flags(facts):
    return {name: text for row in advise(facts) for name, text in row.flags.items()}


def _advised(key, counts, side=375, channels=6, gpus=8):
    """The value of a key by number of images; images of six channels are trained from scratch."""
    return [float(_flags(Situation(count, side, channels, gpus))[key].split()[0]) for count in counts]


def _falls(values):
    return all(a >= b for a, b in itertools.pairwise(values))


def test_more_images_are_seen_less_often_and_more_in_all():
    """Within LightlyTrain's ranges; also where released weights are continued, as long as recipe continue does."""
    passes = _advised("length", COUNTS)
    assert _falls(passes)
    few = [n for n in COUNTS if n < 1_000_000]
    lengths = _advised("length", few, channels=3)
    assert _falls([seen / n for n, seen in zip(few, lengths, strict=True)]) and _falls(lengths[::-1])
    assert lengths[-1] == load_recipe("continue", {"model.init_from": "x"}).length.value
    # Each is rounded to whole epochs.
    seen = zip(passes, COUNTS, strict=True)
    assert all((b + 0.5) * m >= (a - 0.5) * n for (a, n), (b, m) in itertools.pairwise(seen))
    for images, low, high in [(1000, 200, 2000), (50_000, 200, 2000), (300_000, 100, 500), (20_000_000, 5, 100)]:
        assert low <= _advised("length", [images])[0] <= high


def test_values_follow_the_images_and_the_batch():
    for gpus in (1, 8):
        batches = [Situation(images, 375, 3, gpus).batch for images in COUNTS]
        assert _falls(batches[::-1]) and batches[0] == 32 and batches[-1] == 512
    assert _falls(_advised("head.prototypes", [n for n in COUNTS if n >= 100_000])[::-1])
    for patch in (4, 8, 16):
        for side in range(2 * patch, 300):
            large, local = fitting_sizes(side, patch, 224)
            assert large % patch == local % patch == 0 and patch <= local < large <= min(side, 224)


def test_without_a_gpu_a_small_network_is_taught_by_released_weights_where_these_fit():
    for side, channels in itertools.product((8, 31, 32, 64, 100, 375), (1, 3, 6)):
        flags = _flags(Situation(2000, side, channels))
        assert ("teacher.source" in flags) == (side >= 32 and channels != 6)
        assert "teacher.source" not in flags or load_recipe("small", flags).crops.global_size >= 64

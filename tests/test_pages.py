"""The pages' commands and lines of Python run, in the order of the pages, on what `make train` leaves and a folder of
images. Others that need a GPU, several machines, other files or minutes are only parsed (tests/test_docs.py)."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

import dino_ds
from dino_ds.cli import main as cli
from dino_ds.cli.main import as_it_was, torch_as_it_was
from dino_ds.examples import finetune_classification, finetune_segmentation
from tests.examples.test_finetune import draw_images
from tests.run.harness import image_folder

ROOT = Path(__file__).parent.parent
LEAVES = "train --config quickstart --run_dir runs/quickstart"
"""What `make train` leaves, in fewer steps."""
PAGES = {
    "README.md": 4,
    "docs/quickstart.md": 4,
    "docs/your-data.md": 1,
    "docs/small-data.md": 1,
    "docs/features.md": 7,
    "docs/evaluations.md": 1,
    "docs/report.md": 4,
}
"""In the order of the README, with how many commands of each run."""
ELSEWHERE = re.compile(
    r"\b(RUN|ROOT|WEIGHTS|MODEL|FILE|vits16|vit_|rtx|dinov\d_|theirs|clusters:|wandb|trackio|bench|launch|profile"
    r"|eval\.(every|stop_after))"
    r"|[ '\"]/\w|\.pth|runs/(?!quickstart|mine|small)"
)
"""What names files, cards or weights that are not here, or takes minutes."""
SHORT = {
    "train": "--max_steps 2 --eval.every '0 steps' --eval.pictures_every '0 steps' --data.workers 0",
    "eval": "--images 60 --workers 0",
    "embed": "--workers 0",
    "look-data": "--sample 100",
    "finetune_classification": "--epochs 1 --workers 0",
    "finetune_segmentation": "--epochs 1 --workers 0",
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    for kind in ("cats", "dogs"):
        image_folder(folder / "images" / kind, 70)
        Image.new("RGB", (40, 40)).save(folder / "images" / kind / "1.jpg")
    draw_images(folder / "birds")
    (folder / "birds/masked").rename(folder / "shapes")
    image_folder(folder / "birds/train/disc", 40)
    return folder


@pytest.mark.slow
def test_the_pages_run_in_their_order(here, monkeypatch, capsys):
    monkeypatch.chdir(here)
    monkeypatch.setattr(cli, "_exit", sys.exit)
    train = dino_ds.train
    monkeypatch.setattr(dino_ds, "train", lambda *given, **more: train(*given, max_steps=2, **more))
    (here / "dino_ds").symlink_to(ROOT / "dino_ds")
    _run(LEAVES)
    for name, count in PAGES.items():
        ran, names = 0, {"image": "images/cats/1.jpg"}
        for language, block in re.findall(r"```(\w*)\n(.*?)```", (ROOT / name).read_text().replace("\\\n", " "), re.S):
            if language == "python" and not block.startswith("# my_"):
                exec(block, names)
            lines = [] if language in ("python", "yaml") else block.splitlines()
            for line in lines:
                found = re.match(r"(?:dino-ds|python -m dino_ds\.examples\.(?=\w)) ?(.*)", line)
                if found and not ELSEWHERE.search(line.partition("#")[0]):
                    if "--eval.val_share 0.1 --run_dir runs/mine" in line:  # each of two pages begins it
                        shutil.rmtree("runs/mine", ignore_errors=True)
                    _run(found[1])
                    ran += 1
        assert ran == count, name
    assert (
        here / "runs/mine/teacher.safetensors"
    ).is_file() and "of the test images are right" in capsys.readouterr().out


def _run(line: str) -> None:
    words = shlex.split(line, comments=True)
    short = SHORT.get(words[0], "").replace("2", "3" if "--resume" in words else "2")
    words += shlex.split(
        short.replace("0 steps", "9 steps", 1) if {"--eval.val_share", "--resume"} & {*words} else short
    )
    program = {"finetune_classification": finetune_classification, "finetune_segmentation": finetune_segmentation}
    code: object = 0
    try:
        with as_it_was(), torch_as_it_was():
            program[words[0]].main(words[1:]) if words[0] in program else cli.main(words)
    except SystemExit as end:
        code = end.code
    assert not code, line

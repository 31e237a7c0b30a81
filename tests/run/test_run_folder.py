"""A run folder: strange things in it are named, put aside or cleared, a refused start leaves it as it was, and a run
whose folder is removed or renamed ends with a word."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from dino_ds.basics.files import discard
from dino_ds.report.folder import read_run
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, losses_of, train_tiny

CHANGES = {"save_every": "1 steps"}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Saved at steps 1 and 2."""
    place = tmp_path_factory.mktemp("begun")
    root = image_folder(place / "root")
    assert run_on_ranks(train_tiny, root, place / "run", max_steps=2, changes=CHANGES, world=1) == [None]
    return root, place / "run"


@pytest.fixture
def run(begun, tmp_path):
    return shutil.copytree(begun[1], tmp_path / "run")


def _resume(begun, run, resume=True):
    [message] = run_on_ranks(train_tiny, begun[0], run, max_steps=3, resume=resume, changes=CHANGES, world=1)
    return message


def _instead(path, make):
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


@pytest.mark.parametrize(
    ("name", "make", "found"),
    [
        ("metrics.jsonl", os.mkdir, "a folder where a run has a file"),
        ("metrics.jsonl", os.mkfifo, "a pipe or device where a run has a file"),
        ("metrics.jsonl", lambda path: path.symlink_to("gone"), "is a link to gone, which is not there"),
        ("tensorboard", lambda path: path.touch(), "a file where a run has a folder"),
        ("metrics.jsonl", lambda path: (path.touch(), os.truncate(path, 30 << 30)), "30.0 GiB, 4 are allowed"),
    ],
)
def test_what_can_not_be_written_to_is_named(begun, run, name, make, found):
    _instead(run / name, make)
    message = _resume(begun, run)
    assert f"{run / name} " in message and found in message


@pytest.mark.parametrize(
    ("lose", "said"),
    [
        (lambda path: None, "run has no checkpoint, and had one"),
        (Path.mkdir, "run has no checkpoint, and had one"),
        (lambda path: path.symlink_to("/not/mounted"), "checkpoints is a link to /not/mounted, which is not there"),
    ],
)
def test_a_run_that_has_lost_its_checkpoints_does_not_begin_anew(begun, run, lose, said):
    (run / "checkpoints").rename(run.parent / "checkpoints")
    lose(run / "checkpoints")
    before = contents(run)
    for resume in (True, "auto"):
        message = _resume(begun, run, resume)
        assert message is not None and said in message and "\n" not in message
        assert contents(run) == before
    discard(run / "checkpoints")
    (run.parent / "checkpoints").rename(run / "checkpoints")
    assert _resume(begun, run) is None
    assert [step for step, _ in losses_of(run)] == [1, 2, 3]


def test_what_is_in_the_way_goes(begun, run):
    left = (".config.yaml.0123abcd.tmp", ".teacher.safetensors.0123abcd.tmp", "checkpoints/.latest.0123abcd.tmp")
    for name in (*left, "heartbeats.before"):
        (run / name / "inner").mkdir(parents=True)
    (run / "config.yaml.tmp").write_text("a user's")
    assert _resume(begun, run) is None
    assert (run / "config.yaml.tmp").read_text() == "a user's"
    (run / "config.yaml.tmp").unlink()
    assert (run / "checkpoints/latest").read_text() == "step_00000003\n"
    assert not [path for path in run.rglob("*") if path.name.endswith((".tmp", ".before"))]


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below, with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "already holds a run; add --resume"),
        ({"resume": True, "changes": {"optimizer.lr": "0.01"}}, "settings changed since step 2"),
        ({"resume": True, "allow_change": "optimizer.l"}, "--allow_change optimizer.l: it is not a key of the recipe"),
        ({"resume": True, "changes": {"data.global_batch": "32"}}, "20 images < one global batch of 32"),
    ],
)
def test_a_refused_start_leaves_no_trace_in_a_finished_run(begun, options, said):
    root, run = begun
    before = contents(run)
    one, two = run_on_ranks(train_tiny, root, run, **options)
    assert one == two and said in one
    assert contents(run) == before
    assert read_run(run).state == "stopped"  # before its length


def _train_and_lose(root, run):
    """Rank 0 renames the folder after the first checkpoint."""

    def lose():
        while not (run / "checkpoints/latest").exists():
            time.sleep(0.05)
        run.rename(run.with_name("aside"))

    if os.environ["RANK"] == "0":
        threading.Thread(target=lose, daemon=True).start()
    return train_tiny(root, run, changes={"length": "100000 steps", "save_every": "3 steps"})


def test_a_lost_run_folder_ends_the_run(tmp_path):
    one, two = run_on_ranks(_train_and_lose, image_folder(tmp_path / "images"), tmp_path / "run")
    assert one == two and "run is gone, removed or renamed while the run was at work" in one

"""What lies in a run folder in place of a run's own files: named, put aside or cleared, never an end without a word."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.ranks import run_on_ranks
from tests.training.harness import image_folder, log_of, losses_of, train_tiny

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


def _resume(begun, run):
    [message] = run_on_ranks(train_tiny, begun[0], run, max_steps=3, resume=True, changes=CHANGES, world=1)
    return message


def _instead(path, make):
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


@pytest.mark.parametrize(
    ("name", "make", "found"),
    [
        ("metrics.jsonl", os.mkdir, "a folder where a run has a file"),
        ("log.txt", os.mkdir, "a folder where a run has a file"),
        ("metrics.jsonl", os.mkfifo, "a pipe or device where a run has a file"),
        ("config.yaml", os.mkdir, "a folder where a run has a file"),
        ("tensorboard", lambda path: path.touch(), "a file where a run has a folder"),
        ("metrics.jsonl", lambda path: (path.touch(), os.truncate(path, 30 << 30)), "30.0 GiB, 4 are allowed"),
    ],
)
def test_what_can_not_be_written_to_is_named(begun, run, name, make, found):
    _instead(run / name, make)
    message = _resume(begun, run)
    assert f"{run / name} " in message and found in message


def test_a_checkpoint_that_is_a_link_to_itself_gives_way_to_the_one_before(begun, run):
    path = run / "checkpoints/step_00000002"
    _instead(path, lambda path: path.symlink_to(path.name))
    assert _resume(begun, run) is None
    assert "note     checkpoint step 2 is incomplete: it has no manifest.json; using step 1" in log_of(run)
    assert [step for step, _ in losses_of(run)] == [1, 2, 3]
    assert path.is_dir() and not list((run / "checkpoints").glob("removing_*"))


def test_what_is_in_the_way_goes_or_is_put_aside(begun, run):
    for name in ("config.yaml.tmp", "teacher.safetensors.tmp", "heartbeats.before", "checkpoints/latest.tmp"):
        (run / name / "inner").mkdir(parents=True)
    _instead(run / "checkpoints/latest", os.mkdir)
    assert _resume(begun, run) is None
    assert (run / "checkpoints/latest").read_text() == "step_00000003\n"
    assert "latest was a folder and is put aside as aside_latest" in log_of(run)
    assert not [path for path in run.rglob("*") if path.name.endswith((".tmp", ".before"))]

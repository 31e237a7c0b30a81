"""A run folder: when it is written, what strange things in it lead to, and the end of a run that has lost it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from dino_ds.basics.files import discard
from dino_ds.engine import distributed
from dino_ds.report.folder import read_run
from dino_ds.run import run as run_module
from dino_ds.run.metrics import Clock
from dino_ds.run.run import FIRST_SAVE_AFTER, SAVE_SECONDS, SaveClock
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, losses_of, train_alone, train_tiny

CHANGES = {"save_every": "1 steps"}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    place = tmp_path_factory.mktemp("begun")
    root = image_folder(place / "root")
    assert train_alone(root, place / "run", max_steps=2, changes=CHANGES) is None
    return root, place / "run"


@pytest.fixture
def run(begun, tmp_path):
    return shutil.copytree(begun[1], tmp_path / "run")


def _resume(begun, run, resume=True):
    return train_alone(begun[0], run, max_steps=3, resume=resume, changes=CHANGES)


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
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "already holds a run; add --resume"),
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


def _saved_steps(monkeypatch, clock, steps, step_seconds, start=0):
    now, saved = [100.0], []
    monkeypatch.setattr(run_module.time, "monotonic", lambda: now[0])
    for done in range(start + 1, start + steps + 1):
        now[0] += step_seconds
        saved += [done] if clock.due(done) else []
    return saved


def test_a_fixed_interval_is_a_matter_of_the_step_alone(monkeypatch):
    assert _saved_steps(monkeypatch, SaveClock(4, 3), 10, 1.0, start=3) == [4, 8, 12]
    assert _saved_steps(monkeypatch, SaveClock(0, 0), 10, 1.0) == []


@pytest.mark.parametrize("slowest", [2.0, 4.0])
def test_the_first_save_comes_early_and_the_slowest_rank_sets_the_interval(monkeypatch, slowest):
    """Ranks measure other times and must save after the same steps."""
    monkeypatch.setattr(distributed, "gather_objects", lambda mine: [mine, mine * slowest / 2.0])
    every = round(SAVE_SECONDS / slowest)
    saved = _saved_steps(monkeypatch, SaveClock(None, 7), 1000, 2.0, start=7)
    assert saved == [7 + FIRST_SAVE_AFTER, *range(every, 1008, every)]


def test_how_often_a_run_saves_is_no_part_of_what_is_learned(tmp_path):
    images = image_folder(tmp_path / "images")
    for every in ("auto", "4 steps"):
        changes = {"save_every": every, "save_in_background": "false", "length": "8 steps"}
        assert run_on_ranks(train_tiny, images, tmp_path / every, changes=changes) == [None, None]
    assert sorted(p.name for p in (tmp_path / "auto/checkpoints").glob("step_*")) == ["step_00000005", "step_00000008"]
    assert losses_of(tmp_path / "auto") == losses_of(tmp_path / "4 steps")


def test_pauses_do_not_count_for_the_images_per_second(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock(8)
    with clock.spending("pause"):
        now[0] += 100
    with clock.spending("wait"):
        now[0] += 1
    now[0] += 3
    clock.steps += 1
    assert clock.read() == {"images_per_second": 2, "data_wait_fraction": 0.25}

"""Bad images, lengths that cannot be, strange things in a run folder, its loss, and full disks: said in one line,
nothing lost and nothing left behind."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from dino_ds.basics.files import discard
from dino_ds.config.loading import load_recipe
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, StorageError
from dino_ds.health import beat, processes
from dino_ds.report.folder import read_run
from dino_ds.run import run as run_module
from dino_ds.run.beginning import MOST_KEPT, check_lengths, slow_teachers
from dino_ds.run.metrics import Clock, RunLog
from dino_ds.run.run import FIRST_SAVE_AFTER, SAVE_SECONDS, SaveClock
from tests.disks import fill, mount_disk, unmount
from tests.ranks import run_on_ranks
from tests.run.harness import TINY, image_folder, log_of, losses_of, read_metrics, train_alone, train_tiny


def test_unreadable_images_are_named_skipped_and_counted(tmp_path):
    """Three passes over the images, and two evaluations: each is named and counted once, whichever rank meets it."""
    root, test, run = image_folder(tmp_path / "images", 24, 3), tmp_path / "test", tmp_path / "run"
    image_folder(test, 9, 3, seed=1)
    cut, *empty = root / "class2/005.png", root / "class2/011.png", test / "class1/004.png"
    cut.write_bytes(cut.read_bytes()[:200])
    for path in empty:
        path.write_bytes(b"")
    changes = {"length": "9 steps", "data.max_bad_fraction": "0.1", "eval.every": "9 steps", "eval.root": str(test)}
    assert run_on_ranks(train_tiny, root, run, changes=changes) == [None, None]
    lines = [line.partition(" ")[2] for line in log_of(run).splitlines()]
    named = [line for line in lines if "unreadable image skipped" in line]
    assert len(named) == 2 and "005.png" in "".join(named) and "011.png" in "".join(named)
    assert [line["bad_images"] for line in read_metrics(run) if "loss" in line][-1] == 2
    told = [line for line in lines if "left out" in line and str(test) in line]
    assert told == [f"evals    left out, unreadable: {test}/class1/004.png (empty file)"]


NO_VIT = {f"model.{key}": "none" for key in ("patch_size", "width", "depth", "heads")} | {"model.drop_path": "0"}
EVALUATED = {"eval.every": "2 steps"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data.global_batch": "64"}, "20 images < one global batch of 64"),
        ({"data.root": "/nowhere/images"}, "/nowhere/images"),
        (EVALUATED | {"eval.root": "/nowhere/test"}, "/nowhere/test"),
        (EVALUATED | {"eval.root": "SAME"}, "eval.evals knn: the training images have no classes"),
        (EVALUATED | {"eval.evals": "statistics,ridge"}, "eval.evals ridge: there are no test images"),
        (EVALUATED | {"eval.stop_after": "5"}, "needs a metric"),
        (EVALUATED | {"eval.val_share": "0.001"}, "holds 0 out"),
        ({"model.train": "lora"}, "these would be random: give model.init_from"),
        (NO_VIT | {"model.backbone": "resnet18", "teacher.batch_norm": "frozen"}, "give model.init_from, or take"),
    ],
)
def test_what_can_t_be_trained_is_said_in_one_line_and_leaves_no_run_folder(tmp_path, changes, said):
    root, run = image_folder(tmp_path / "images"), tmp_path / "run"
    message = train_alone(root, run, changes={k: value.replace("SAME", str(root)) for k, value in changes.items()})
    assert message is not None and said in message and "\n" not in message
    assert not run.exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eval.stop_after": "5 evaluations", "eval.every": "0"}, "eval.stop_after 5 has no effect with eval.every 0"),
        ({"eval.keep_best": "val_loss"}, "needs held-out images"),
        ({"eval.keep_best": "ridge"}, "needs --eval.evals ridge"),
        ({"eval.stop_after": "drift 0.1"}, r"stop_after drift needs objective\.preserve_weight, which measures it"),
        ({"eval.stop_after": "drift 3"}, r"'drift 3' is not a distance: write 'drift 0\.1', more than 0 and less"),
        ({"teacher.distill": "features"}, "distill features has no effect without source"),
    ],
)
def test_what_could_never_have_an_effect_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said) as refused:
        load_recipe(None, changes)
    assert "\n" not in str(refused.value) and refused.value.exit_code == 2


def test_fewer_test_images_than_ranks_is_an_error_on_all_ranks(tmp_path):
    root, test = image_folder(tmp_path / "images", 24, 3), image_folder(tmp_path / "test", 9, 3, seed=1)
    changes = {"eval.every": "2 steps", "eval.root": str(test), "eval.test_images": "1"}
    assert all("eval.test_images" in said for said in run_on_ranks(train_tiny, root, tmp_path / "run", changes=changes))


@pytest.fixture
def disk(tmp_path):
    mount_disk(tmp_path / "disk", 256)
    yield tmp_path / "disk"
    unmount(tmp_path / "disk")


@pytest.fixture
def large_disk(tmp_path):
    mount_disk(tmp_path / "large")
    yield tmp_path / "large"
    unmount(tmp_path / "large")


def test_a_resume_without_room_leaves_the_run_as_it_was(large_disk, tmp_path):
    root, run = image_folder(tmp_path / "images"), large_disk / "run"
    assert train_alone(root, run, max_steps=2) is None
    fill(large_disk, 100)
    before = contents(run)
    message = train_alone(root, run, max_steps=4, resume=True)
    assert message.startswith("a checkpoint and the teacher need ")
    assert contents(run) == before
    assert train_alone(root, run, max_steps=2, resume=True) is None  # nothing to save


def test_metrics_and_log_have_whole_lines_only(disk, capsys):
    log = RunLog(disk, 0)
    fill(disk, 12)
    for step in range(200):
        log.write({"step": step, "loss": 1.5})
        log.info(f"step {step}")
    os.unlink(disk / "FILLER")
    log.write({"step": 200, "loss": 2.5})
    log.close()
    lines = (disk / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(len(lines) - 1), 200] and 20 < len(lines) < 199
    assert all(
        line.split()[1:3] == ["step", str(i)] for i, line in enumerate((disk / "log.txt").read_text().splitlines())
    )
    printed = capsys.readouterr().err
    # Once a file; TensorBoard's writer is a thread, which may come to the disk when there is room again.
    assert "Traceback" not in printed and printed.count("training continues") in (3, 4)


def test_lock_and_heartbeats_without_room(disk):
    beats = beat.Heartbeats(disk)
    beats.prepare()
    (beats.folder / "first_failure.json").write_text("{}")
    fill(disk)
    with pytest.raises(StorageError, match="No space left on device"):
        processes.RunLock(disk).acquire()
    assert sorted(os.listdir(disk)) == ["FILLER", "heartbeats"]


GRAM = {"gram.weight": "1", "gram.start": "12 steps"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model.freeze_backbone": "6 epochs"}, "model.freeze_backbone 6 epochs is step 12, and length 12 steps is 12"),
        ({"length": "2 epochs", "model.freeze_backbone": "5 steps"}, "length 2 epochs is 4 steps: the backbone would"),
        (GRAM, "Gram anchoring would never begin"),
    ],
)
def test_what_would_never_begin_is_refused(changes: dict[str, str], problem: str):
    with pytest.raises(ConfigError, match="shorten it") as caught:
        check_lengths(load_recipe(None, TINY | changes), 2, 99)
    assert problem in str(caught.value)


def test_what_lasts_to_the_end_is_said():
    ends = TINY | {"model.freeze_backbone": "5 epochs", "gram.start": "0 steps"}
    assert check_lengths(load_recipe(None, ends), 2, 99) == []
    (line,) = check_lengths(load_recipe(None, TINY | {"length": "3 steps", "optimizer.warmup": "2 epochs"}), 2, 99)
    assert line.startswith("optimizer.warmup 2 epochs is 4 steps, and length 3 steps is 3: the learning rate ")
    slow = {"objective.teacher_temp": "0.07", "objective.teacher_temp_warmup": "2 epochs"}
    slow |= {"objective.koleo_weight": "0.1..0.5 over 2 epochs"}
    one, other = check_lengths(load_recipe(None, TINY | {"length": "3 steps"} | slow), 2, 99)
    assert one.startswith("objective.teacher_temp_warmup 2 ") and other.startswith("the ramp of koleo's weight 2 ")
    (line,) = check_lengths(load_recipe(None, TINY | {"optimizer.warmup": "2 epochs"}), 2, 3)
    assert "--max_steps ends at 3 (--length shortens these too): the learning rate" in line


def test_an_end_that_lies_behind_is_refused(tmp_path):
    root, run = image_folder(tmp_path / "root"), tmp_path / "run"
    assert train_alone(root, run, max_steps=3) is None
    before = log_of(run)
    message = train_alone(root, run, max_steps=2, resume="auto")
    assert message.startswith(f"--max_steps 2 lies behind: {run} has done 3 steps, and would end at 2; give more")
    message = train_alone(root, run, resume=True, changes={"length": "2 steps"}, allow_change="length")
    assert message.startswith(f"length 2 steps lies behind: {run} has done 3 steps, and would end at 2; give more")
    assert log_of(run) == before
    assert train_alone(root, run, max_steps=3, resume=True) is None
    assert [step for step, _ in losses_of(run)] == [1, 2, 3]


def test_a_teacher_too_slow_for_its_run_is_named_with_a_momentum_that_is_not():
    """By the weights that the start has in the average at the end; runs of trained weights are not asked."""
    slow = load_recipe(None, TINY | {"teacher.momentum": "0.9999"})
    (said,) = slow_teachers(slow, 500)
    kept = math.prod(
        slow.teacher.momentum + (1 - slow.teacher.momentum) * (1 - math.cos(math.pi * t / 500)) / 2 for t in range(500)
    )
    assert f"still be {kept:.0%} what it began as: lower teacher.momentum" in said and kept > MOST_KEPT
    (advised,) = re.findall(r"\(here ([\d.]+) or less\)", said)
    assert slow_teachers(load_recipe(None, TINY | {"teacher.momentum": advised}), 500) == []
    trained = TINY | {"teacher.momentum": "0.9999", "model.init_from": "x.pth"}
    assert slow_teachers(load_recipe(None, trained), 500) == []


SAVES = {"save_every": "1 steps"}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    place = tmp_path_factory.mktemp("begun")
    root = image_folder(place / "root")
    assert train_alone(root, place / "run", max_steps=2, changes=SAVES) is None
    return root, place / "run"


@pytest.fixture
def run(begun, tmp_path):
    return shutil.copytree(begun[1], tmp_path / "run")


def _resume(begun, run, resume=True):
    return train_alone(begun[0], run, max_steps=3, resume=resume, changes=SAVES)


@pytest.mark.parametrize(
    ("name", "make", "found"),
    [
        ("metrics.jsonl", lambda path: path.symlink_to("gone"), "is a link to gone, which is not there"),
        ("tensorboard", lambda path: path.touch(), "a file where a run has a folder"),
        ("metrics.jsonl", lambda path: (path.touch(), os.truncate(path, 30 << 30)), "30.0 GiB, 4 are allowed"),
    ],
)
def test_what_can_not_be_written_to_is_named(begun, run, name, make, found):
    discard(run / name)
    make(run / name)
    message = _resume(begun, run)
    assert f"{run / name} " in message and found in message


@pytest.mark.parametrize(
    ("lose", "said"),
    [
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


def contents(folder: Path) -> dict[Path, bytes | None]:
    """All that is in a run but its heartbeats, which are those of the last start."""
    paths = [path for path in folder.rglob("*") if "heartbeats" not in path.parts]
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


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


@pytest.mark.parametrize("slowest", [2.0, 4.0])
def test_the_first_save_comes_early_and_the_slowest_rank_sets_the_interval(monkeypatch, slowest):
    """Ranks measure other times and must save after the same steps."""
    now, clock, saved = [100.0], SaveClock(None, 7), []
    monkeypatch.setattr(distributed, "gather_objects", lambda mine: [mine, mine * slowest / 2.0])
    monkeypatch.setattr(run_module.time, "monotonic", lambda: now[0])
    for done in range(8, 1008):
        now[0] += 2
        saved += [done] * clock.due(done)
    every = round(SAVE_SECONDS / slowest)
    assert saved == [7 + FIRST_SAVE_AFTER, *range(every, 1008, every)]


def test_how_often_a_run_saves_is_no_part_of_what_is_learned(tmp_path):
    images = image_folder(tmp_path / "images")
    for every in ("auto", "4 steps"):
        changes = {"save_every": every, "save_in_background": "false", "length": "8 steps"}
        assert train_alone(images, tmp_path / every, changes=changes) is None
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

"""No room: exit code 5 and one line on all ranks, nothing left behind, no half line in any file."""

from __future__ import annotations

import json
import os

import pytest

from dino_ds.basics.files import append_whole
from dino_ds.errors import StorageError
from dino_ds.health.beat import append_line
from dino_ds.health.processes import RunLock
from dino_ds.health.records import Heartbeats
from dino_ds.run.metrics import RunLog
from dino_ds.run.train_options import TrainOptions
from tests.disks import PAGE, fill, mount_disk, small_disk, unmount
from tests.ranks import run_on_ranks
from tests.run.harness import REPOSITORY, TINY, image_folder, train_tiny


@pytest.fixture
def disk(tmp_path):
    mount_disk(tmp_path / "disk", 256)
    yield tmp_path / "disk"
    unmount(tmp_path / "disk")


def _start(root, run):
    """Message and exit code of a start."""
    from dino_ds.config.ds_config import load_ds_config
    from dino_ds.config.loading import load_recipe
    from dino_ds.train import train

    ds = str(REPOSITORY / "ds_configs" / "zero1_fp32.json")
    recipe = load_recipe(None, {**TINY, "data.root": str(root)})
    try:
        train(
            TrainOptions(run_dir=str(run), max_steps=1, resume=False),
            recipe=recipe,
            ds=load_ds_config(ds, {}),
            ds_path=ds,
        )
    except StorageError as error:
        return str(error), error.exit_code


@pytest.mark.parametrize(("world", "free_kib"), [(1, 8), (2, 0)])
def test_a_start_without_room_leaves_nothing(tmp_path, world, free_kib):
    root = image_folder(tmp_path / "images")
    with small_disk(tmp_path / "disk", free_kib) as disk:
        outcomes = run_on_ranks(_start, root, disk / "run", world=world)
        assert outcomes == [outcomes[0]] * world
        message, code = outcomes[0]
        assert code == 5 and ("No space left" if free_kib == 0 else "MB are free in") in message
        assert os.listdir(disk) == ["FILLER"]


def _files(run):
    """All files of a run but its heartbeats, which are those of the last start."""
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.parent.name != "heartbeats"}


def test_a_resume_without_room_leaves_the_run_as_it_was(tmp_path):
    root = image_folder(tmp_path / "images")
    mount_disk(tmp_path / "disk")
    try:
        run = tmp_path / "disk/run"
        assert run_on_ranks(train_tiny, root, run, max_steps=2, world=1) == [None]
        fill(tmp_path / "disk", 100)
        before = _files(run)
        [message] = run_on_ranks(train_tiny, root, run, max_steps=4, resume=True, world=1)
        assert message.startswith("a checkpoint and the teacher need ")
        assert _files(run) == before
        assert run_on_ranks(train_tiny, root, run, max_steps=2, resume=True, world=1) == [None]  # nothing to save
    finally:
        unmount(tmp_path / "disk")


def test_a_line_is_written_whole_or_not_at_all(disk):
    with (disk / "lines").open("ab", buffering=0) as file:
        append_whole(file.fileno(), b"x" * (PAGE - 10))
        fill(disk)
        with pytest.raises(OSError, match="No space left"):
            append_whole(file.fileno(), b"y" * 20)
        assert os.fstat(file.fileno()).st_size == PAGE - 10
    append_line(disk / "lines", "z" * 20)
    append_line(disk / "lines", "z" * 5)
    assert (disk / "lines").read_bytes() == b"x" * (PAGE - 10) + b"zzzzz\n"


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
    beats = Heartbeats(disk)
    beats.prepare()
    (beats.folder / "first_failure.json").write_text("{}")
    fill(disk)
    with pytest.raises(StorageError, match="No space left on device"):
        RunLock(disk).acquire()
    assert sorted(os.listdir(disk)) == ["FILLER", "heartbeats"]

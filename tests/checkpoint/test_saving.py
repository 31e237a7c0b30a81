"""Saving: files are read by their library, a save is of its own step, full disks lose nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file

from dino_ds.basics.files import replace_file, replacing_folder
from dino_ds.checkpoint import folder as checkpoint_folder
from dino_ds.checkpoint import manifest as checkpoint_files
from dino_ds.checkpoint.manifest import FileRecord, checksum, write_tensors
from dino_ds.engine import distributed
from dino_ds.errors import OutOfMemory, StorageError
from tests.checkpoint.small_run import SmallRun, folders, is_that_of
from tests.disks import mount_disk, unmount
from tests.ranks import run_on_ranks


@pytest.fixture
def gate(monkeypatch):
    gate = threading.Event()

    def write(*args):
        gate.wait(60)
        return write_tensors(*args)

    monkeypatch.setattr(checkpoint_files, "write_tensors", write)
    return gate


def _train_until_said(run: SmallRun, words: str, limit: int = 6000) -> None:
    for _ in range(limit):
        if words in "".join(run.said):
            return
        run.train()
        time.sleep(0.01)
    raise AssertionError(run.said)


def test_what_is_saved_is_of_the_step_it_was_asked_at(tmp_path, gate):
    """Training changes the tensors in place while they wait to be written."""
    run = SmallRun(tmp_path).train(3).save().train(4)
    assert folders(tmp_path) == ["writing_step_00000003"] and not run.said
    gate.set()
    _train_until_said(run, "step 3:")
    assert folders(tmp_path) == ["latest", "step_00000003"]
    assert is_that_of(run.choose().saved, 3)
    assert run.saving.cost.bytes > 2 * 5000 * 4
    assert 0 < run.saving.cost.stall_seconds < run.saving.cost.seconds


@pytest.mark.parametrize(("background", "wait"), [(False, False), (True, True)])
def test_without_background_it_is_complete_on_return_and_nothing_is_copied(tmp_path, background, wait):
    run = SmallRun(tmp_path, background=background).train(3).save(wait)
    assert folders(tmp_path) == ["latest", "step_00000003"] and not run.saving.copies
    assert is_that_of(run.choose().saved, 3)
    assert SmallRun(tmp_path / "two").train(3).save().saving.copies


def test_a_second_save_waits_for_the_first(tmp_path, gate, monkeypatch):
    is_written = checkpoint_files.PendingSave.is_written
    waiting = lambda flight, seconds: gate.set() or is_written(flight, seconds)  # noqa: E731
    run = SmallRun(tmp_path).train(1).save().train(1)
    monkeypatch.setattr(checkpoint_files.PendingSave, "is_written", waiting)
    run.save()
    assert run.said[0].startswith("save     step 1: ")
    _train_until_said(run, "step 2:")
    assert is_that_of(run.choose().saved, 2) and is_that_of(run.choose(1).saved, 1)


def test_the_work_after_a_commit_is_done_when_waited_for(tmp_path):
    """Its failure is an error then, a line otherwise."""
    done = []
    SmallRun(tmp_path, finish=lambda folder: done.append(folder.name)).train(1).save(wait=True)
    assert done == ["step_00000001"]

    def fail(folder):
        raise OSError(errno.ENOSPC, "No space left on device", "teacher.safetensors")

    run = SmallRun(tmp_path / "two", finish=fail).train(1)
    with pytest.raises(StorageError, match=r"teacher\.safetensors"):
        run.save(wait=True)
    run = SmallRun(tmp_path / "three", finish=fail).train(1).save()
    _train_until_said(run, "warning")
    assert "teacher.safetensors" in run.said[1] and run.said[1].startswith("warning")


def test_the_work_after_a_commit_stops_nobody_and_goes_in_order(tmp_path, gate):
    done, slow = [], threading.Event()
    run = SmallRun(tmp_path, finish=lambda folder: (slow.wait(60), done.append(folder.name)))
    gate.set()
    for step in (1, 2, 3):
        run.train(step - run.step).save()
    assert len(folders(tmp_path)) >= 3 and done == []
    slow.set()
    run.save(wait=True)
    assert done == ["step_00000001", "step_00000002", "step_00000003"]


class TestRotation:
    def test_the_last_ones_and_every_mth_stay(self, tmp_path):
        run = SmallRun(tmp_path, keep=2, keep_every=4)
        for _ in range(10):
            run.train().save(wait=True)
        assert folders(tmp_path) == [f"{'step_'}{s:08d}" if s else "latest" for s in (0, 4, 8, 9, 10)]
        assert (tmp_path / "checkpoints/latest").read_text() == "step_00000010\n"

    def test_a_damaged_one_does_not_count(self, tmp_path):
        run = SmallRun(tmp_path, keep=2)
        run.train().save(wait=True).train().save(wait=True)
        (tmp_path / "checkpoints/step_00000002/rank_00000.safetensors").unlink()
        run.train().save(wait=True)
        assert folders(tmp_path)[1:] == ["step_00000001", "step_00000002", "step_00000003"]
        run.train().save(wait=True)
        assert folders(tmp_path)[1:] == ["step_00000003", "step_00000004"]


def test_later_ones_than_the_one_gone_on_from_are_put_aside_until_training_has_come_as_far(tmp_path):
    run = SmallRun(tmp_path)
    for _ in range(3):
        run.train(2).save(wait=True)
    (tmp_path / "checkpoints/writing_step_00000008").mkdir()
    (tmp_path / "checkpoints/latest.tmp").write_text("st")
    run = SmallRun(tmp_path)
    run.step = 2
    assert run.checkpoints.tidy(2) == ["checkpoints of later steps are put aside as aside_step_*: 4, 6"]
    assert folders(tmp_path) == ["aside_step_00000004", "aside_step_00000006", "latest", "step_00000002"]
    choice = run.choose()
    assert is_that_of(choice.saved, 2) and not choice.notes
    run.train(2).save(wait=True)
    assert folders(tmp_path) == ["aside_step_00000006", "latest", "step_00000002", "step_00000004"]
    run.train(3).save(wait=True)
    assert folders(tmp_path) == ["latest", "step_00000002", "step_00000004", "step_00000007"]


def _full(path, tensors, about):
    """Take some bytes, then the disk is full."""
    path.write_bytes(b"\0" * 1000)
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def _no_memory(*_):
    raise MemoryError


def test_memory_that_runs_out_in_a_save_or_after_it_is_not_reported_as_the_disk(tmp_path, monkeypatch):
    """Its exit code says that a new start would only repeat it, and the line what to change."""
    told = r"MemoryError.*Give the job more host memory, or go without a second copy with --save_in_background false$"
    for wait in (True, False):
        run = SmallRun(tmp_path / str(wait), finish=_no_memory)
        with pytest.raises(OutOfMemory, match=f"^after a save: out of memory .*{told}") as caught:
            run.train().save(wait) and run.saving.finish(must=True)
        assert caught.value.exit_code == 7
    monkeypatch.setattr(checkpoint_files, "write_tensors", _no_memory)
    with pytest.raises(OutOfMemory, match=f"^cannot save step 1: out of memory .*{told.replace('$', '')}"):
        SmallRun(tmp_path / "run").train().save(wait=True)


class TestFullDisk:
    @pytest.mark.parametrize("mib,good", [(1, 0), (4, 2)])
    def test_a_real_full_disk(self, tmp_path, mib, good, monkeypatch):
        """Two checkpoints of 1.6 MB on a disk of a few MiB; without the check of free space, writing meets its end."""
        mount_disk(tmp_path, 1024 * mib)
        try:
            monkeypatch.setattr(checkpoint_folder, "_SPARE_FRACTION", -1.0)
            monkeypatch.setattr(checkpoint_folder, "_SPARE_BYTES", 0)
            run = SmallRun(tmp_path, keep=2, background=False, numel=200_000).train()
            with contextlib.suppress(StorageError):
                for _ in range(4):
                    run.train().save(wait=True)  # until older ones are removed
            assert sum(line.startswith("save ") for line in run.said) == good
            assert all("MB needed" in line for line in run.said if line.startswith("warning"))
            assert "writing" not in str(folders(tmp_path))
            choice = run.choose()
            assert good == 0 if choice.saved is None else is_that_of(choice.saved, good + 1, 200_000)
        finally:
            unmount(tmp_path)


def _fails_on(rank: int, run_dir: Path) -> list[str]:
    run = SmallRun(run_dir).train().save(wait=True)
    write = checkpoint_files.write_tensors
    if distributed.rank() == rank:
        checkpoint_files.write_tensors = _full
    try:
        run.train().save()
        while len(run.said) < 2:
            run.train()
            time.sleep(0.01)
    finally:
        checkpoint_files.write_tensors = write
    run.train(2).save(wait=True)
    return run.said


@pytest.mark.parametrize("rank", [0, 1])
def test_the_failure_of_one_rank_is_that_of_all(tmp_path, rank):
    """Nothing of that save stays, the next one is good, and ranks need no collective to know."""
    one, two = run_on_ranks(_fails_on, rank, tmp_path)
    assert f"(rank {rank})" in one[1] and one[1] == two[1] and len(one) == 3
    assert len(folders(tmp_path)) == 3
    choice = SmallRun(tmp_path).choose()
    assert is_that_of(choice.saved, choice.saved.manifest.step) and choice.saved.manifest.step > 2


def _bytes_of_whole(run_dir: Path) -> None:
    SmallRun(run_dir).train().save(wait=True)


def test_the_teacher_is_saved_once_and_shared_out(tmp_path):
    run_on_ranks(_bytes_of_whole, tmp_path)
    one, two = (SmallRun(tmp_path).choose().saved.folder / f"whole_0000{r}.safetensors" for r in (0, 1))
    assert is_that_of(SmallRun(tmp_path).choose().saved, 1)
    assert one.stat().st_size + two.stat().st_size < (1200 + 9 + 48) * 4 + 1000


TENSORS = {
    "matrix": torch.randn(30, 7), "half": torch.randn(5).half(), "brain": torch.randn(3, 3).bfloat16(),
    "scalar": torch.tensor(3.5), "empty": torch.zeros(0), "strided": torch.randn(8, 6).t(), "counts": torch.arange(4),
    "bytes": torch.arange(3, dtype=torch.uint8),
}  # fmt: skip


def test_the_library_reads_what_we_write(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "_PIECE_BYTES", 100)
    path = tmp_path / "x.safetensors"
    record = write_tensors(path, TENSORS, {"step": "7"})
    read = load_file(path)
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in TENSORS.items())
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"step": "7"}
    assert record == checksum(path) == FileRecord(path.stat().st_size, record.crc32)


def test_a_disk_that_gives_other_bytes_back_is_noticed(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    fsync = os.fsync

    def flip(descriptor):
        fsync(descriptor)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(os, "fsync", flip)
    with pytest.raises(OSError, match="other bytes back"):
        write_tensors(path, TENSORS, {})


def test_a_replaced_file_is_old_or_new(tmp_path, monkeypatch):
    path = tmp_path / "latest"
    replace_file(path, "old")
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_: (_ for _ in ()).throw(OSError("no")))
            with pytest.raises(OSError, match="no"):
                replace_file(path, "new")
        assert path.read_text() == "old" and os.listdir(tmp_path) == ["latest"]
    replace_file(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["latest"]


def test_a_new_folder_is_whole_or_absent(tmp_path):
    def write(fail):
        with replacing_folder(tmp_path / "out") as folder:
            (folder / "a").write_text("a")
            if fail:
                raise OSError("no")

    with pytest.raises(OSError, match="no"):
        write(fail=True)
    assert os.listdir(tmp_path) == []
    (tmp_path / "out.tmp").mkdir()  # the user's
    write(fail=False)
    assert sorted(os.listdir(tmp_path)) == ["out", "out.tmp"] and os.listdir(tmp_path / "out") == ["a"]

"""One writer per run folder: the lock, whoever starts when, and what is left of those who are gone."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dino_ds.errors import ConfigError
from dino_ds.health.processes import STALE_SECONDS, RunLock, machine


def change(run: Path, **values: object) -> None:
    """Change the lock, as if another process had written it."""
    path = run / "lock"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_lock_is_taken_once_and_given_back_with_the_folders_made_for_it(tmp_path):
    run = tmp_path / "a" / "run"
    first = RunLock(run)
    assert first.acquire() == ""
    holder = first.holder()
    assert holder is not None and holder.pid == os.getpid() and (run / "lock").exists()
    for take in (RunLock(run).acquire, lambda: RunLock(run).check_free(0), lambda: RunLock(run).check_free(1)):
        with pytest.raises(ConfigError, match=rf"run is in use by pid {os.getpid()} on .* \(heartbeat \d s ago\)"):
            take()
    first.release()
    assert not (tmp_path / "a").exists()
    RunLock(run).check_free(0)


@pytest.mark.parametrize(
    ("holder", "age", "free"),
    [
        ({"ticks": 1}, 0, True),  # the pid is another process's by now
        ({"pid": 2**22 - 1}, 0, True),  # nobody has it
        ({}, 10 * STALE_SECONDS, False),  # alive, whatever its monitor does
        ({"machine": "another", "host": "far"}, STALE_SECONDS / 2, False),
        ({"machine": "another", "host": "far"}, 2 * STALE_SECONDS, True),
    ],
)
def test_the_lock_of_somebody_who_is_gone_is_taken_over_with_a_note(tmp_path, holder, age, free):
    RunLock(tmp_path).acquire()
    change(tmp_path, **holder)
    then = time.time() - age
    os.utime(tmp_path / "lock", (then, then))
    if not free:
        with pytest.raises(ConfigError, match="is in use by") as caught:
            RunLock(tmp_path).acquire()
        # Of a process of this machine it is known that it lives.
        wait = re.search(r"; if far is gone, it is free in (\d+) s$", str(caught.value))
        assert 20 <= int(wait[1]) <= 30 if wait else "host" not in holder
        return
    RunLock(tmp_path).check_free(0)
    late = RunLock(tmp_path)
    assert "which is gone, was taken over" in late.acquire()
    assert late.refresh()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock"]


def test_something_else_with_the_lock_s_name_is_named(tmp_path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(ConfigError, match="lock is not the lock of a run, which is a file"):
        RunLock(tmp_path).acquire()


def test_a_disk_that_fails_is_no_lost_run_folder(tmp_path, monkeypatch):
    lock = RunLock(tmp_path)
    assert not lock.guards_a_run

    def fail(path, **_):
        raise OSError(errno.EIO, "input/output error", str(path))

    monkeypatch.setattr(Path, "stat", fail)
    assert lock.guards_a_run


def test_a_holder_that_was_replaced_is_told(tmp_path):
    """After a night, say, in which the machine was frozen."""
    lock = RunLock(tmp_path)
    lock.acquire()
    assert lock.refresh()
    change(tmp_path, pid=1, machine=machine())
    assert not lock.refresh()
    lock.release()
    assert (tmp_path / "lock").exists()


def _take(run: Path, start: multiprocessing.synchronize.Barrier, results: multiprocessing.SimpleQueue) -> None:
    start.wait()
    try:
        RunLock(run).acquire()
        results.put(True)
    except ConfigError:
        results.put(False)
    start.wait()  # nobody's lock is stale before all have tried


@pytest.mark.slow
def test_of_several_starts_at_the_same_moment_exactly_one_wins(tmp_path):
    context = multiprocessing.get_context("fork")
    for i in range(4):
        run = tmp_path / f"run{i}"
        if i % 2:
            run.mkdir()
            RunLock(run).acquire()
            change(run, ticks=1)
        start, results = context.Barrier(4), context.SimpleQueue()
        starters = [context.Process(target=_take, args=(run, start, results)) for _ in range(4)]
        for process in starters:
            process.start()
        for process in starters:
            process.join()
        assert sum(results.get() for _ in starters) == 1


@pytest.mark.slow
def test_a_second_job_ends_before_the_slow_imports(tmp_path):
    """The first one is this test."""
    run = tmp_path / "run"
    RunLock(run).acquire()
    code = "import sys; from dino_ds.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "train", "--config", "quickstart", "--run_dir", str(run)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert out.returncode == 2
    assert "run is in use by pid" in out.stderr and "torch" not in out.stderr
    assert len(out.stderr.splitlines()) == 1

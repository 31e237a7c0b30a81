"""One writer per folder, and the monitor process of a rank: what it publishes, whom it names; more in tests/faults."""

from __future__ import annotations

import dataclasses
import errno
import json
import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from dino_ds.errors import ConfigError
from dino_ds.health.beat import Beat, Disk, Failure, Heartbeat, Heartbeats, describe_hang, last_checkpoint
from dino_ds.health.monitor import Failures
from dino_ds.health.processes import STALE_SECONDS, RunLock, Standstill, machine

HERE = Heartbeat(0, "here", 10, 0.0, 0.0, 5, "step", "backward", 40, 12.0)


def at(rank: int, **changes: object) -> Heartbeat:
    return dataclasses.replace(HERE, rank=rank, **changes)


def listed() -> Beat:
    beat = Beat()
    beat.listed = True
    return beat


@pytest.fixture
def heartbeats(tmp_path):
    found = Heartbeats(tmp_path)
    found.prepare()
    return found


@pytest.mark.parametrize(
    ("beats", "behind", "line"),
    [
        # The others wait in the next step's all-reduce for the one whose data do not come.
        ([at(0, moves=44), at(1, phase="data", where="data"), at(2, moves=44)], [1], "rank 1 for 12 s (step 5, data)"),
        ([at(0), at(1, moves=39, where="student")], [1], "rank 1 for 12 s (step 5, step: student)"),
        ([at(0), at(1)], [], "any rank for 12 s (step 5, step: backward)"),
        ([at(0), at(2, host="far", moves=1), at(3, moves=1)], [1], "rank 1 for 12 s"),  # 1 was never heard of
        ([at(0), at(1, host="far", moves=2)], [1], "rank 1 on far for 12 s"),
    ],
)
def test_who_holds_up_the_others(heartbeats, beats, behind, line):
    for beat in beats:
        heartbeats.publish(beat)
    found = heartbeats.behind(max(beat.rank for beat in beats) + 1)
    assert [b if isinstance(b, int) else b.rank for b in found] == behind
    text = describe_hang(found, beats[0], 12.0, Path("RUN/hang-5.txt"))
    assert f"no progress on {line}" in text and text.endswith("stacks in RUN/hang-5.txt")


def test_work_inside_a_phase_is_progress_that_is_not_compared():
    """Ranks have shares of unequal size; the one with fewer pieces is not behind."""
    beat = Beat()
    progress = Standstill(beat)
    beat.enter("evaluate", 5)
    moves, idle = beat.moves, []
    for breathes in (False, False, True, False):
        if breathes:
            beat.tick()
        progress.add(10.0)
        idle.append(progress.seconds)
    assert idle == [0.0, 10.0, 0.0, 10.0] and beat.moves == moves


def test_a_rank_whose_machine_is_silent_is_behind(heartbeats):
    for rank in range(2):
        heartbeats.publish(at(rank, moves=40 + 100 * rank))
    os.utime(heartbeats.path(1), (time.time() - 60, time.time() - 60))
    assert [beat.rank for beat in heartbeats.behind(2)] == [1]
    heartbeats.publish(at(1, ended="done"))
    assert heartbeats.behind(2) == []


def test_the_first_failure_is_claimed_once(heartbeats, tmp_path):
    first, second = (Failure(rank, "here", 3, "error", 2, f"by rank {rank}") for rank in (1, 0))
    assert heartbeats.claim(first) and not heartbeats.claim(second)
    assert heartbeats.first_failure() == first
    heartbeats.prepare()
    assert heartbeats.first_failure() is None and heartbeats.claim(second)
    assert not Heartbeats(tmp_path / "nowhere").claim(first)
    heartbeats.remove()
    assert not heartbeats.folder.exists()


@pytest.mark.slow
def test_a_disk_that_does_not_answer_holds_nobody_up(tmp_path, monkeypatch):
    """A FIFO that nobody writes to stands for it."""
    monkeypatch.setattr(Disk.__init__, "__defaults__", (0.2,))
    heartbeats = Heartbeats(tmp_path)
    for name in ("checkpoints/latest", "heartbeats/rank_00000.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
    assert last_checkpoint(tmp_path).endswith("the disk does not answer")
    assert heartbeats.read() == [] and heartbeats.first_failure() is None
    disk, later = Disk(), threading.Event()
    assert disk.run(later.wait, False) is False
    assert disk.run(lambda: True, False) is False  # skipped: the one before still waits
    later.set()
    disk._thread.join()
    disk._limit_seconds = 60.0
    assert disk.run(lambda: True, False) is True
    assert disk.run(lambda: (tmp_path / "nothing").read_text(), "none") == "none"


def test_what_all_ranks_raise_is_said_once_though_the_heartbeats_go(heartbeats, tmp_path):
    """Rank 0, which removes them, would otherwise not know that rank 1 has said it."""
    errors = []
    for rank in (1, 0):
        beat = listed()
        failures = Failures(tmp_path, rank, 2, beat)
        error = ConfigError("a network is not known")
        failures.settle(error)
        if rank == 0:
            heartbeats.remove()
        with pytest.raises(ConfigError), failures.reported():
            raise error
        errors.append(error)
    assert [error.said_by_me for error in errors] == [True, False]


@pytest.mark.slow
def test_without_a_limit_a_hang_is_left_alone(tmp_path):
    """A rank that moves again in time is not ended either; one that hangs is, with its stacks."""
    code = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from dino_ds.health.monitor import watchdog
        with watchdog(Path(sys.argv[1]), 0, 1, float(sys.argv[2])) as beat:
            beat.enter("step", 1)
            beat.warm = True
            for _ in range(int(sys.argv[3])):
                time.sleep(0.2)
                beat.enter_part("backward")
            time.sleep(float(sys.argv[4]))
        """
    )
    cases = {("0", "0", "3"): (0, 0), ("3", "17", "0"): (0, 0), ("1", "0", "600"): (6, 1)}
    commands = [[sys.executable, "-c", code, str(tmp_path), *words] for words in cases]
    all_at_once = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process, (code, times) in zip(all_at_once, cases.values(), strict=True):
        _, said = process.communicate(timeout=120)
        assert process.returncode == code, said
        assert said.count("no progress on any rank for") == times
    (stack,) = (tmp_path / "hang-1.txt").read_text().split("== rank 0")[1:]
    assert 'File "<string>", line ' in stack


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

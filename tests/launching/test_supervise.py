"""The supervisor: when it starts a run again, and what it does with real processes that die, stop and are orphaned.

The processes are small ones, without torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dino_ds.launching.supervise as module
from dino_ds.errors import FORWARDED_SECONDS
from dino_ds.health.lock import RunLock
from dino_ds.health.records import Failure, Heartbeat, Heartbeats
from dino_ds.launching.supervise import Outcome, stop_signals
from tests.launching.cluster import started_by

FAKE = Path(__file__).parent / "fake_launch.py"
MAIN = """
import sys
from pathlib import Path
import dino_ds.launching.supervise as module
module._FIRST_WAIT, module._OTHER_MACHINES_SECONDS, module._LAST_WORDS_SECONDS = 0.02, 2.0, 1.0
command = lambda resumes: sys.argv[3:] + ["--resume"] * resumes
sys.exit(module.supervise(command, Path(sys.argv[1]), int(sys.argv[2])))
"""
DONE = ["step 9"]
HERE = Heartbeat(0, "here", 1, 0.0, 0.0, 4, "step", "backward", 0, 0.0)


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    """Supervises starts that end at once with the same code; returns the exit code and which starts resumed."""
    monkeypatch.setattr(module, "_FIRST_WAIT", 0.0)
    monkeypatch.setattr(module, "_FIRST_WAIT_STORAGE", 0.0)

    def run(code, max_restarts):
        starts = []

        def run_once(argv, *_):
            starts.append(argv)
            return Outcome(code, "an error")

        monkeypatch.setattr(module, "run_once", run_once)
        return module.supervise(lambda resumes: resumes, tmp_path, max_restarts), starts

    return run


@pytest.mark.parametrize(("code", "count"), [(1, 3), (5, 3), (6, 3), (0, 1), (2, 1), (3, 1), (4, 1), (7, 1), (75, 1)])
def test_what_is_started_again(supervised, capsys, code, count):
    assert supervised(code, 2) == (code, [False, True, True][:count])
    lines = capsys.readouterr().err.splitlines()
    assert sum("restart" in line for line in lines) == (3 if count > 1 else 0)  # the last one: no more are allowed


def test_waits_grow(supervised, monkeypatch):
    waits = []
    monkeypatch.setattr(module, "_wait", lambda seconds, *_: waits.append(seconds) or True)
    monkeypatch.setattr(module, "_FIRST_WAIT", 1.0)
    supervised(1, 11)
    assert waits[:3] == [1.0, 2.0, 4.0] and waits[-1] == 300.0


def test_a_signal_between_two_starts_is_a_stop(supervised, monkeypatch):
    """There is nothing to save."""
    monkeypatch.setattr(module, "_print", lambda text: "restart" in text and os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(module, "_FIRST_WAIT", 1000.0)
    assert supervised(1, 3) == (75, [False])


def test_every_signal_that_asks_for_a_stop_is_heard():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        before = signal.signal(number, signal.default_int_handler)  # nohup and a shell's & ignore some
        with stop_signals() as received:
            assert received == []
            signal.raise_signal(number)
        assert received == [number]
        signal.signal(number, before)


def test_a_restart_waits_for_the_lock_of_a_lost_machine(tmp_path, monkeypatch):
    """Rank 0 ran there: nobody has given the lock back. A sleep lets a minute pass."""
    RunLock(tmp_path).acquire()
    lock, waits = tmp_path / "lock", []
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "machine": "another", "host": "far"}))
    monkeypatch.setattr("time.sleep", lambda seconds: (waits.append(seconds), os.utime(lock, (0, 0))))
    assert module._wait(0.0, tmp_path, []) and waits == [1.0]


HANG, DIED = (Failure(1, "here", 4, kind, 6, f"rank 1: {kind}") for kind in ("hang", "died"))


@pytest.mark.parametrize(
    ("launcher", "ends", "failure", "signals", "code", "says"),
    [
        (0, ("done", "done"), None, [], 0, ""),
        (3, ("done", "done"), None, [], 0, ""),  # whatever the launcher says
        (0, ("done", ""), None, [], 6, "rank 1 has ended without having finished; there is no checkpoint yet"),
        (247, ("error", "error"), DIED, [], 6, "rank 1: died"),
        (1, ("error", "error"), HANG, [], 6, "rank 1: hang"),
        (2, (), None, [], 2, "the ranks ended with code 2: usage"),
        (7, ("error", ""), None, [], 7, "the ranks ended with code 7"),
        (247, (), None, [], 6, "a rank died by SIGKILL at step 0 (start), most often because memory has run out"),
        (245, ("error", ""), None, [], 6, "a rank died by SIGSEGV at step 4 (backward)"),
        (0, (), None, [], 6, "the launcher ended with code 0, and no rank was seen"),
        (-9, (), None, [], 6, "the launcher ended by SIGKILL, and no rank was seen"),
        (75, ("stopped", "stopped"), None, [], 75, ""),
        (0, ("stopped", "stopped"), None, [], 6, "the launcher ended with code 0; its ranks have stopped"),
        (1, ("stopped", "stopped"), None, [15], 75, ""),
        (241, ("done", ""), None, [15], 75, ""),
        (-9, ("", ""), None, [15, 15], 143, "ended by a second signal; there is no checkpoint yet"),
    ],
)
def test_the_exit_code_is_the_ranks_and_the_culprit_the_first(launcher, ends, failure, signals, code, says, tmp_path):
    heartbeats = Heartbeats(tmp_path)
    heartbeats.prepare()
    for rank, ended in enumerate(ends):
        heartbeats.publish(dataclasses.replace(HERE, rank=rank, ended=ended))
    if failure:
        heartbeats.claim(failure)
    found = module._outcome(launcher, heartbeats, tmp_path, signals)
    assert found.code == code and says in found.message and bool(says) == bool(found.message)


class Job:
    """A supervisor of a fake launcher, running."""

    def __init__(self, run: Path, plan: list[list[list[str]]], max_restarts: int = 0) -> None:
        run.mkdir()
        (run / "config.yaml").touch()  # the folder holds a run
        (run / "log.txt").touch()
        self.run = run
        command = [sys.executable, str(FAKE), "train.py", str(run), json.dumps(plan)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, str(run), str(max_restarts), *command],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Tests that nohup or a shell's & has started would hand on that they are ignored.
            preexec_fn=lambda: [signal.signal(n, signal.SIG_DFL) for n in (signal.SIGHUP, signal.SIGINT)],
        )

    def wait_for(self, name: str) -> None:
        """Until both ranks have left their file of this name."""
        end = time.monotonic() + 120
        while not all((self.run / f"{name}{rank}").exists() for rank in range(2)):
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.02)

    def asked(self) -> list[str]:
        return [(self.run / f"asked{rank}").read_text() for rank in range(2)]

    def end(self) -> tuple[int, list[str]]:
        """Exit code and our own lines."""
        _, text = self.process.communicate(timeout=120)
        assert not started_by(self.process.pid)
        return self.process.returncode, [line for line in text.splitlines() if line.startswith("dino_ds: ")]

    @property
    def starts(self) -> list[str]:
        return (self.run / "starts").read_text().splitlines()


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_started_again(tmp_path):
    """Nothing that it has started stays."""
    job = Job(tmp_path / "run", [[["child", "step 4", "die 9"], DONE], [DONE, DONE]], 5)
    code, lines = job.end()
    assert code == 0 and job.starts == ["", "--resume"]
    died, restart = map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines())
    assert {"kind": "restart", "code": 6, "checkpoint": 0}.items() <= restart.items()
    death = re.compile(r"rank 0 died (by SIGKILL )?at step 4 \(step\)")  # its launcher may take the cause first
    assert death.search(died["line"]) and len([line for line in lines if death.search(line)]) == 1
    assert [line for line in lines if "restart 1 of 5 in 0 s, from the beginning" in line]


@pytest.mark.slow
def test_a_signal_reaches_all_ranks_at_once_and_a_second_one_ends_everything(tmp_path):
    saves = Job(tmp_path / "saves", [[["step 1", "work"], ["step 1", "work"]]], 3)
    deaf = Job(tmp_path / "deaf", [[["child", "step 1", "deaf"], ["child", "step 1", "deaf"]]], 3)
    for job in (saves, deaf):
        job.wait_for("ready")
        job.process.send_signal(signal.SIGUSR1)
    assert saves.end()[0] == 75 and len(saves.starts) == 1
    deaf.wait_for("asked")
    assert saves.asked() == deaf.asked() == ["the stop file"] * 2 and not (saves.run / "stop").exists()
    time.sleep(FORWARDED_SECONDS)
    assert deaf.process.poll() is None
    deaf.process.terminate()
    code, (line,) = deaf.end()
    assert code == 128 + signal.SIGUSR1 and "second signal" in line and len(deaf.starts) == 1


@pytest.mark.slow
def test_ranks_whose_launcher_or_supervisor_was_killed_save(tmp_path):
    """DeepSpeed's launcher leaves them alone in the world, and the `deepspeed` command ends with code 0. With a
    supervisor they are started again."""
    work = [["step 1", "work"], ["step 1", "work"]]
    alone, supervised = Job(tmp_path / "alone", [work]), Job(tmp_path / "supervised", [work, [DONE, DONE]], 3)
    for job in (alone, supervised):
        job.wait_for("ready")
    alone.process.kill()
    os.kill(int((supervised.run / "launcher.pid").read_text()), signal.SIGKILL)
    alone.process.wait()
    code, lines = supervised.end()
    assert code == 0 and len(supervised.starts) == 2 and "the launcher ended by SIGKILL" in lines[0]
    end = time.monotonic() + 60
    while started_by(alone.process.pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert not started_by(alone.process.pid)
    assert alone.asked() == ["the end of the launcher"] * 2
    assert {*supervised.asked()} <= {"the end of the launcher", "the stop file"}

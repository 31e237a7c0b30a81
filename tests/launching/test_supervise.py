"""What the supervisor does with real processes that die, stop, hang on and are orphaned; small ones, without torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from itertools import islice
from pathlib import Path

import psutil
import pytest

from dino_ds.config.loading import dump_recipe, load_recipe
from dino_ds.data.batches import LoaderOptions
from dino_ds.data.feed import Position
from dino_ds.data.loader import Loader
from dino_ds.data.multicrop import MultiCrop
from dino_ds.data.sources import build_source
from dino_ds.health.lock import RunLock
from dino_ds.launching.attempt import StopSignals
from dino_ds.launching.supervise import _wait
from dino_ds.launching.suspect_images import write_step_images
from tests.ranks import run_on_ranks
from tests.training.harness import TINY, image_folder, train_tiny

pytestmark = pytest.mark.slow

FAKE = Path(__file__).parent / "fake_launch.py"
MAIN = """
import sys
from pathlib import Path
import dino_ds.launching.supervise as module
module._FIRST_WAIT = module._FIRST_WAIT_STORAGE = 0.02
sys.exit(module.supervise(sys.argv[3:], Path(sys.argv[1]), int(sys.argv[2])))
"""
DONE = ["step 9", "exit 0"]


class Job:
    """A supervisor of a fake launcher, running."""

    def __init__(self, run: Path, plan: list[list[list[str]]], max_restarts: int = 0, *words: str) -> None:
        run.mkdir(exist_ok=True)
        self.run = run
        command = [sys.executable, str(FAKE), "torchrun", "train.py", str(run), json.dumps(plan), *words]
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, str(run), str(max_restarts), *command],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Tests that nohup or a shell's & has started would hand on that they are ignored.
            preexec_fn=lambda: [signal.signal(n, signal.SIG_DFL) for n in (signal.SIGHUP, signal.SIGINT)],
        )

    def wait_ready(self, ranks: int = 2) -> None:
        """Until the ranks work, and the supervisor watches them and their launcher."""
        end = time.monotonic() + 120
        while not all((self.run / f"ready{rank}").exists() for rank in range(ranks)) or self._watched() < ranks + 1:
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.02)

    def _watched(self) -> int:
        found = 0
        for descriptor in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found += "pidfd" in os.readlink(descriptor)
        return found

    def end(self) -> tuple[int, list[str]]:
        """Exit code and our own lines."""
        _, text = self.process.communicate(timeout=120)
        assert not self.left()
        return self.process.returncode, [line for line in text.splitlines() if line.startswith("dino_ds: ")]

    def left(self) -> list[psutil.Process]:
        """Processes of this job, orphans too."""
        mark, found = f"{self.process.pid}.", []
        for process in psutil.process_iter():
            try:
                if process.environ().get("DINO_DS_SUPERVISOR", "").startswith(mark):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    @property
    def starts(self) -> list[str]:
        return (self.run / "starts").read_text().splitlines()


@pytest.mark.parametrize(
    ("ranks", "code", "parts"),
    [
        ([DONE, DONE], 0, []),
        ([["wait 0.6", "exit 2"], ["after 0", "exit 2"]], 2, ["rank 0", "code 2"]),
        ([["step 5", "after 1", "exit 6"], ["step 5", "wait 0.5", "die 9"]], 6, ["rank 1", "SIGKILL", "at step 5"]),
        ([["step 5", "wait 0.5", "die 11"], ["after 0", "exit 1"]], 6, ["rank 0", "SIGSEGV"]),
        ([["wait 1", "die 9"], DONE, ["launcher 0"]], 6, ["rank 0", "SIGKILL"]),
        ([["wait 1", "exit 75"], ["wait 1", "exit 75"], ["launcher 1"]], 75, []),
        ([DONE, DONE, ["launcher 3"]], 0, []),
        ([DONE, DONE, ["launcher 0 late"]], 0, []),
    ],
    ids=[
        "done",
        "usage",
        "second rank killed",
        "first rank crashed",
        "launcher says 0",
        "stopped",
        "launcher says 3",
        "slow launcher",
    ],
)
def test_the_exit_code_is_the_ranks_and_the_culprit_the_first(tmp_path, ranks, code, parts):
    found, lines = Job(tmp_path / "run", [ranks]).end()
    assert found == code
    assert len(lines) == bool(parts) and all(part in line for line in lines for part in parts), lines


def test_a_rank_that_ends_well_without_having_finished_is_a_failure(tmp_path):
    """Its exit code is 0, and its last heartbeat does not say "done"."""
    code, (line,) = Job(tmp_path / "run", [[DONE, ["step 3", "wait 1"]]]).end()
    assert code == 6 and "rank 1 has ended without having finished" in line


@pytest.mark.parametrize(("code", "starts"), [(1, 3), (5, 3), (6, 3), (2, 1), (3, 1), (4, 1), (7, 1), (75, 1)])
def test_what_is_started_again(tmp_path, code, starts):
    job = Job(tmp_path / "run", [[[f"exit {code}"]]], 2, "--resume", "--lr", "1")
    found, lines = job.end()
    assert found == code and len(job.starts) == starts
    assert job.starts[0] == "--resume --lr 1"
    assert all(start == "--lr 1 --resume auto" for start in job.starts[1:])
    assert sum("restart" in line for line in lines) == (3 if starts > 1 else 0)  # the last one: no more are allowed


def test_restarts_are_written_down(tmp_path):
    job = Job(tmp_path / "run", [[["step 4", "wait 1", "die 9"], DONE], [["step 6", "wait 2", "exit 0"], DONE]], 5)
    code, lines = job.end()
    assert code == 0 and len(job.starts) == 2
    first, second = map(json.loads, (tmp_path / "run/restarts.jsonl").read_text().splitlines())
    assert {"code": 6, "rank": 0, "step": 4, "restart": 1}.items() <= first.items()
    assert "rank 0 died by signal SIGKILL (often: out of memory) at step 4" in first["message"]
    assert second["restart"] == 1 and second["restart_seconds"] > 0
    assert [line for line in lines if "restart 1 of 5 in " in line]


def test_three_deaths_at_one_step_end_it_and_name_its_images(tmp_path):
    """Two steps an epoch: the fifth is the first of the third epoch, of both ranks and all their micro-batches."""
    images, run = image_folder(tmp_path / "images"), tmp_path / "run"
    run.mkdir()
    recipe = load_recipe(None, {**TINY, "data.root": str(images)})
    (run / "config.yaml").write_text(dump_recipe(recipe))
    job = Job(run, [[["step 4", "wait 0.5", "exit 1"], DONE]], 9)
    code, lines = job.end()
    assert code == 6 and len(job.starts) == 3
    assert "step 5 has ended the run 3 times in a row" in lines[-1]
    named = (run / "suspect_images-5.txt").read_text().splitlines()
    assert "step 5, epoch 2" in named[0]
    source, crops = (
        build_source("folder", str(images), "train", False),
        MultiCrop(recipe.groups, recipe.crops.augment),
    )
    loaded = []
    for micro_step in range(2):  # accumulation 2
        for rank in range(2):
            with closing(
                Loader(
                    source,
                    crops,
                    LoaderOptions(seed=recipe.seed, global_batch=8, micro_batch=2, rank=rank, world_size=2),
                    Position(),
                )
            ) as loader:
                loaded += next(islice(loader, 4 * 2 + micro_step, None)).names
    assert [line for line in named if not line.startswith("#")] == loaded


def test_images_are_counted_from_the_last_checkpoint_and_with_skipped_steps(tmp_path):
    """A step that was skipped has used its images up."""
    images, run = image_folder(tmp_path / "images"), tmp_path / "run"
    assert run_on_ranks(train_tiny, images, run, max_steps=3, world=1) == [None]
    assert write_step_images(run, 4).read_text().startswith("# step 5, epoch 2")
    _, _, *next_step = write_step_images(run, 5).read_text().splitlines()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "skipped_steps": 1}\n{"step": 5, "skip')
    _, _, *after_a_skip = write_step_images(run, 4).read_text().splitlines()
    assert after_a_skip == next_step


def test_deaths_at_other_steps_do_not(tmp_path):
    plan = [[[f"step {step}", "wait 0.5", "exit 1"]] for step in (4, 4, 5, 4)] + [[DONE]]
    job = Job(tmp_path / "run", plan, 9)
    assert job.end()[0] == 0 and len(job.starts) == 5


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_a_signal_reaches_all_ranks_at_once_and_lets_them_save(tmp_path, name):
    job = Job(tmp_path / "run", [[["step 1", "work"], ["step 1", "work"]]], 3)
    job.wait_ready()
    job.process.send_signal(signal.Signals[name])
    assert job.end()[0] == 75 and len(job.starts) == 1
    told = [int((tmp_path / f"run/signals{rank}").read_text()) for rank in range(2)]
    assert told == [signal.SIGTERM if name == "SIGHUP" else signal.Signals[name]] * 2


def test_a_second_signal_ends_everything(tmp_path):
    job = Job(tmp_path / "run", [[["deaf", "child"], ["child", "deaf"]]], 3)
    job.wait_ready()
    job.process.terminate()
    time.sleep(0.5)
    assert job.process.poll() is None
    job.process.terminate()
    code, (line,) = job.end()
    assert code == 143 and "second signal" in line and len(job.starts) == 1


def test_a_signal_while_nothing_runs_is_a_stop(tmp_path):
    """Between two starts there is nothing to save."""
    run = tmp_path / "run"
    main = MAIN.replace("0.02", "1000.0")
    run.mkdir()
    command = [sys.executable, str(FAKE), "torchrun", "train.py", str(run), json.dumps([[["exit 1"]]])]
    process = subprocess.Popen([sys.executable, "-c", main, str(run), "3", *command], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "restart 1 of 3" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75


def test_ranks_whose_launcher_was_killed_save_and_are_started_again(tmp_path):
    """DeepSpeed's launcher leaves them alone in the world, and the `deepspeed` command ends with code 0."""
    job = Job(tmp_path / "run", [[["step 1", "work"], ["step 1", "work"]], [DONE, DONE]], 3)
    job.wait_ready()
    os.kill(int((tmp_path / "run/launcher.pid").read_text()), signal.SIGKILL)
    code, lines = job.end()
    assert code == 0 and len(job.starts) == 2
    assert "the launcher" in lines[0]


@pytest.mark.parametrize("words", [["work"], ["deaf"]])
def test_nothing_outlives_a_killed_supervisor(tmp_path, words):
    job = Job(tmp_path / "run", [[["child", *words], ["step 1", *words]]])
    job.wait_ready()
    job.process.kill()
    job.process.wait()
    end = time.monotonic() + 60  # 5 s and the load of the machine
    while job.left() and time.monotonic() < end:
        time.sleep(0.1)
    assert not job.left()


def test_children_of_ranks_do_not_stay(tmp_path):
    assert Job(tmp_path / "run", [[["child", *DONE], ["child", *DONE]]]).end()[0] == 0


def test_a_launcher_that_can_not_start_is_an_error(tmp_path):
    code, (line,) = Job(tmp_path / "run", [[["launcher 2"]]]).end()
    assert code == 2 and "no rank was seen" in line


def test_a_restart_waits_for_the_lock_of_a_lost_machine_and_says_so(tmp_path, capsys, monkeypatch):
    """Rank 0 ran there: nobody has given the lock back. A sleep lets a minute pass."""
    RunLock(tmp_path).acquire()
    lock = tmp_path / "lock"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "machine": "another", "host": "far"}))
    monkeypatch.setattr("time.sleep", lambda _: os.utime(lock, (0, 0)))
    assert _wait(0.0, tmp_path, StopSignals())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dino_ds: waiting: {tmp_path} is in use by pid ")
    assert "; if far is gone, it is free in " in line
    RunLock(tmp_path).check_free(0)

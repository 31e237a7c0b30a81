"""The supervisor: when it starts a run again, and what it does with real processes that die, stop and are orphaned.

The processes are small ones, without torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import dino_ds.launching.supervise as module
from dino_ds.config.loading import dump_recipe, load_recipe
from dino_ds.data.batches import LoaderOptions
from dino_ds.data.feed import Position
from dino_ds.data.held_out import training_images
from dino_ds.data.loader import Loader
from dino_ds.data.multicrop import MultiCrop
from dino_ds.data.sources import build_source
from dino_ds.errors import FORWARDED_SECONDS
from dino_ds.health.lock import RunLock
from dino_ds.health.records import Heartbeat
from dino_ds.launching.attempt import Outcome, _for_ranks, stop_signals
from dino_ds.launching.ranks import LocalRanks
from dino_ds.launching.suspect_images import write_step_images
from tests.launching.cluster import started_by
from tests.ranks import run_on_ranks
from tests.run.harness import TINY, image_folder, train_tiny

FAKE = Path(__file__).parent / "fake_launch.py"
MAIN = """
import sys
from pathlib import Path
import dino_ds.launching.supervise as module
from dino_ds.launching import attempt
module._FIRST_WAIT, attempt._OTHER_MACHINES_SECONDS, attempt._LAST_WORDS_SECONDS = 0.02, 2.0, 0.5
sys.exit(module.supervise(sys.argv[3:], Path(sys.argv[1]), int(sys.argv[2])))
"""
DONE = ["step 9", "exit 0"]


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    """Supervises starts that end at once, each with a code while it works on the step after another; returns the exit
    code and the words of each start."""
    monkeypatch.setattr(module, "_FIRST_WAIT", 0.0)
    monkeypatch.setattr(module, "_FIRST_WAIT_STORAGE", 0.0)
    monkeypatch.setattr(module, "guard", contextlib.nullcontext)

    def run(ends, max_restarts, *words):
        starts, left = [], iter(ends)

        def attempt(argv, *_):
            starts.append(" ".join(argv[1:]))
            code, step = next(left)
            beat = Heartbeat(0, "here", 1, 0.0, 0.0, step, "step", "backward", 0, 0.0)
            return SimpleNamespace(run=lambda: Outcome(code, "an error", beat=beat))

        monkeypatch.setattr(module, "LaunchAttempt", attempt)
        return module.supervise(["train.py", *words], tmp_path, max_restarts), starts

    return run


@pytest.mark.parametrize(("code", "count"), [(1, 3), (5, 3), (6, 3), (0, 1), (2, 1), (3, 1), (4, 1), (7, 1), (75, 1)])
def test_what_is_started_again(supervised, capsys, code, count):
    found, starts = supervised([(code, step) for step in range(3)], 2, "--resume", "--lr", "1")
    assert found == code and starts == ["--resume --lr 1", *["--lr 1 --resume auto"] * (count - 1)]
    lines = capsys.readouterr().err.splitlines()
    assert sum("restart" in line for line in lines) == (3 if count > 1 else 0)  # the last one: no more are allowed


def test_deaths_at_other_steps_do_not_end_it(supervised):
    ends = [*((1, step) for step in (4, 4, 5, 4)), (0, 9)]
    assert supervised(ends, 9, "--resume=auto")[1] == ["--resume=auto", *["--resume auto"] * 4]


def test_waits_grow_until_progress_is_saved(supervised, tmp_path, monkeypatch):
    for code, first in ((6, 1.0), (5, 30.0)):
        monkeypatch.setattr(module, "_FIRST_WAIT", 1.0)
        monkeypatch.setattr(module, "_FIRST_WAIT_STORAGE", 30.0)
        for in_vain, longest in ((0, first), (3, 8 * first), (5000, 300.0)):
            assert longest / 2 <= module._back_off(code, in_vain) <= longest
    (tmp_path / "checkpoints").mkdir()
    latest, seen = tmp_path / "checkpoints/latest", []

    def back_off(_, in_vain):
        seen.append(in_vain)
        latest.write_text(f"step_{len(seen) // 3:08d}\n")  # with the third restart, and with the sixth
        return 0.0

    monkeypatch.setattr(module, "_back_off", back_off)
    supervised([(1, step) for step in range(6)], 5)
    assert seen == [0, 1, 2, 0, 1]


def test_a_signal_between_two_starts_is_a_stop(supervised, monkeypatch):
    """There is nothing to save."""
    monkeypatch.setattr(module, "_print", lambda text: "restart" in text and os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(module, "_FIRST_WAIT", 1000.0)
    assert supervised([(1, 4)], 3) == (75, [""])


def test_every_signal_that_asks_for_a_stop_is_heard():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        before = signal.signal(number, signal.default_int_handler)  # nohup and a shell's & ignore some
        with stop_signals() as received:
            assert received == []
            signal.raise_signal(number)
        assert received == [number]
        assert _for_ranks(number) == (signal.SIGTERM if number == signal.SIGHUP else number)
        signal.signal(number, before)


def test_a_port_that_is_taken_is_changed_on_one_machine():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = f"--master_port={taken.getsockname()[1]}"
        words = module._resumed(["deepspeed", port, "train.py", port])
        assert words[1] != port and words[1].startswith("--master_port=") and words[2:4] == ["train.py", port]
        assert module._resumed(["deepspeed", port, "--hostfile=h", "train.py"])[1] == port


def test_three_deaths_at_one_step_end_it_and_name_its_images(supervised, capsys, tmp_path):
    """Two steps an epoch: the fifth is the first of the third epoch, of both ranks and all their micro-batches."""
    images, run = image_folder(tmp_path / "images"), tmp_path
    recipe = load_recipe(None, {**TINY, "data.root": str(images)})
    (run / "config.yaml").write_text(dump_recipe(recipe))
    code, starts = supervised([(1, 4)] * 4, 9)
    assert code == 6 and len(starts) == 3
    assert "step 5 has ended the run 3 times in a row" in capsys.readouterr().err.splitlines()[-1]
    named = (run / "suspect_images-5.txt").read_text().splitlines()
    assert "step 5, epoch 2" in named[0]
    source = build_source("folder", str(images), "train", False)
    crops, loaded = MultiCrop(recipe.groups, recipe.crops.augment), []
    for micro_step in range(2):  # accumulation 2
        for rank in range(2):
            options = LoaderOptions(seed=recipe.seed, global_batch=8, micro_batch=2, rank=rank, world_size=2)
            with closing(Loader(source, crops, options, Position())) as loader:
                loaded += next(islice(loader, 4 * 2 + micro_step, None)).names
    assert [line for line in named if not line.startswith("#")] == loaded


def test_suspect_images_are_none_of_those_held_out(tmp_path):
    images = image_folder(tmp_path / "images")
    held_out = {"eval.val_share": "0.3", "eval.every": "1 steps"}
    recipe = load_recipe(None, {**TINY, "data.root": str(images), **held_out})
    (tmp_path / "config.yaml").write_text(dump_recipe(recipe))
    named = write_step_images(tmp_path, 0).read_text().splitlines()[2:]
    trained = training_images(recipe.data, recipe.eval.val_share)
    assert named and set(named) <= {trained.name(index) for index in range(len(trained))}


@pytest.mark.slow
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


def test_a_restart_waits_for_the_lock_of_a_lost_machine_and_says_so(tmp_path, capsys, monkeypatch):
    """Rank 0 ran there: nobody has given the lock back. A sleep lets a minute pass."""
    RunLock(tmp_path).acquire()
    lock = tmp_path / "lock"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "machine": "another", "host": "far"}))
    monkeypatch.setattr("time.sleep", lambda _: os.utime(lock, (0, 0)))
    assert module._wait(0.0, tmp_path, [])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dino_ds: waiting: {tmp_path} is in use by pid ")
    assert "; if far is gone, it is free in " in line
    RunLock(tmp_path).check_free(0)


class Job:
    """A supervisor of a fake launcher, running."""

    def __init__(self, run: Path, plan: list[list[list[str]]], max_restarts: int = 0, *words: str) -> None:
        run.mkdir(exist_ok=True)
        self.run = run
        command = [sys.executable, str(FAKE), "train.py", str(run), json.dumps(plan), *words]
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
        while self._watched() < ranks + 1 or not self.has("ready", ranks):
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.02)

    def has(self, name: str, ranks: int = 2) -> bool:
        """Whether every rank has left its file of this name."""
        return all((self.run / f"{name}{rank}").exists() for rank in range(ranks))

    def _watched(self) -> int:
        found = 0
        for descriptor in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found += "pidfd" in os.readlink(descriptor)
        return found

    def end(self) -> tuple[int, list[str]]:
        """Exit code and our own lines."""
        _, text = self.process.communicate(timeout=120)
        assert not started_by(self.process.pid)
        return self.process.returncode, [line for line in text.splitlines() if line.startswith("dino_ds: ")]

    @property
    def starts(self) -> list[str]:
        return (self.run / "starts").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "code", "parts"),
    [
        ([["watched", "exit 2"], ["after 0", "exit 2"]], 2, ["rank 0", "code 2"]),
        ([["step 5", "after 1", "exit 6"], ["step 5", "watched", "die 9"]], 6, ["rank 1", "SIGKILL", "at step 5"]),
        ([["step 5", "watched", "die 11"], ["after 0", "exit 1"]], 6, ["rank 0", "SIGSEGV"]),
        ([["watched", "die 9"], DONE, ["launcher 0"]], 6, ["rank 0", "SIGKILL"]),
        ([["watched", "exit 75"], ["watched", "exit 75"], ["launcher 1"]], 75, []),
        ([["child", *DONE], ["child", *DONE], ["launcher 3"]], 0, []),
        ([DONE, DONE, ["launcher 0 late"]], 0, []),
        ([DONE, ["step 3", "watched"]], 6, ["rank 1 has ended without having finished"]),
        ([["launcher 2"]], 2, ["no rank was seen"]),
    ],
    ids=[
        "usage",
        "second rank killed",
        "first rank crashed",
        "launcher says 0",
        "stopped",
        "launcher says 3",
        "slow launcher",
        "code 0 without the end",
        "launcher that can't start",
    ],
)
def test_the_exit_code_is_the_ranks_and_the_culprit_the_first(tmp_path, ranks, code, parts):
    """Nothing stays either: `Job.end`."""
    found, lines = Job(tmp_path / "run", [ranks]).end()
    assert found == code
    assert len(lines) == bool(parts) and all(part in line for line in lines for part in parts), lines


@pytest.mark.slow
def test_what_a_rank_leaves_is_no_rank():
    """Its environment names the rank, too: in the rank's life, and after it ended before it was looked at."""
    tree, mark = "RANK=0 WORLD_SIZE=2 sh -c 'sleep 1000 & wait' & wait", f"DINO_DS_SUPERVISOR={os.getpid()}.0"
    environment = dict([*os.environ.items(), mark.split("=")])
    with subprocess.Popen(["sh", "-c", tree], env=environment) as launcher:
        while len(below := psutil.Process(launcher.pid).children(recursive=True)) < 2:
            time.sleep(0.01)
        rank, left = below
        ranks = LocalRanks(launcher, mark)
        ranks.poll(0.0)
        assert ranks.alive == {0: rank.pid}
        rank.kill()
        while left.ppid() == rank.pid:
            time.sleep(0.01)
        ranks = LocalRanks(launcher, mark)
        ranks.poll(0.0)
        assert ranks.alive == {}
        left.kill()


@pytest.mark.slow
def test_restarts_are_written_down(tmp_path):
    second = ["step 6", "noted restart_seconds", "exit 0"]
    job = Job(tmp_path / "run", [[["step 4", "watched", "die 9"], DONE], [second, DONE]], 5)
    code, lines = job.end()
    assert code == 0 and len(job.starts) == 2
    first, second = map(json.loads, (tmp_path / "run/restarts.jsonl").read_text().splitlines())
    assert {"code": 6, "rank": 0, "step": 4, "restart": 1}.items() <= first.items()
    assert "rank 0 died by SIGKILL at step 4 (step), most often because memory has run out" in first["message"]
    assert second["restart"] == 1 and second["restart_seconds"] > 0
    assert [line for line in lines if "restart 1 of 5 in " in line]


@pytest.mark.slow
def test_a_signal_reaches_all_ranks_at_once_and_lets_them_save(tmp_path):
    job = Job(tmp_path / "run", [[["step 1", "work"], ["step 1", "work"]]], 3)
    job.wait_ready()
    job.process.send_signal(signal.SIGUSR1)
    assert job.end()[0] == 75 and len(job.starts) == 1
    told = [int((tmp_path / f"run/signals{rank}").read_text()) for rank in range(2)]
    assert told == [signal.SIGUSR1] * 2


@pytest.mark.slow
def test_a_second_signal_ends_everything(tmp_path):
    job = Job(tmp_path / "run", [[["deaf", "child"], ["child", "deaf"]]], 3)
    job.wait_ready()
    job.process.terminate()
    while not job.has("signals"):
        assert job.process.poll() is None
        time.sleep(0.02)
    job.process.terminate()  # the first one once more, as terminals and schedulers send it
    time.sleep(FORWARDED_SECONDS)
    assert job.process.poll() is None
    job.process.terminate()
    code, (line,) = job.end()
    assert code == 143 and "second signal" in line and len(job.starts) == 1


@pytest.mark.slow
def test_ranks_whose_launcher_was_killed_save_and_are_started_again(tmp_path):
    """DeepSpeed's launcher leaves them alone in the world, and the `deepspeed` command ends with code 0."""
    job = Job(tmp_path / "run", [[["step 1", "work"], ["step 1", "work"]], [DONE, DONE]], 3)
    job.wait_ready()
    os.kill(int((tmp_path / "run/launcher.pid").read_text()), signal.SIGKILL)
    code, lines = job.end()
    assert code == 0 and len(job.starts) == 2
    assert "the launcher" in lines[0]


@pytest.mark.slow
def test_nothing_outlives_a_killed_supervisor(tmp_path):
    job = Job(tmp_path / "run", [[["child", "deaf"], ["step 1", "deaf"]]])
    job.wait_ready()
    job.process.kill()
    job.process.wait()
    end = time.monotonic() + 60  # 5 s and the load of the machine
    while started_by(job.process.pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert not started_by(job.process.pid)

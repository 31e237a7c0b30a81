"""A supervised run that is shot at: it ends by itself, bit-identical to one that was left in peace.

python -m pytest -s tests/faults/test_soak.py -m soak     # SOAK_MINUTES a launcher (20), SOAK_SEED
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from dino_ds.basics.ports import find_free_port
from tests.launching.cluster import environment, started_by
from tests.ranks import run_on_ranks
from tests.run.harness import REPOSITORY, TINY, image_folder, losses_of, train_tiny

STEPS_BETWEEN_SAVES = 10
MAIN = """
import sys
from pathlib import Path
import dino_ds.launching.supervise as module
module._FIRST_WAIT = 0.1
sys.exit(module.supervise(lambda _: sys.argv[2:], Path(sys.argv[1]), 1000))
"""


class Target:
    """The supervised run: started again by hand only after it was asked to stop (code 75)."""

    def __init__(self, launcher: list[str], images: Path, run: Path, options: dict[str, str]) -> None:
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        own = ["--data.root", str(images), "--run_dir", str(run), "--ds_config", "ds_configs/zero1_fp32.json"]
        self.run = run
        self._command = [sys.executable, "-c", MAIN, str(run), *launcher, "dino_ds/train.py", *own, *flags]
        self._output = run.parent / "output.txt"
        self.supervisor = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._output.open("a") as output:
            return subprocess.Popen(
                [*self._command, "--resume", "auto"],
                cwd=REPOSITORY,
                env=environment(),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def step(self) -> int:
        """The last step that was written down."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return max((json.loads(line)["step"] for line in lines), default=0)

    def wait_for_step(self, step: int, seconds: float = 300.0) -> None:
        """Wait for a step, and start the run again after a stop on request."""
        end = time.monotonic() + seconds
        while self.step < step:
            if self.supervisor.poll() == 75:
                self.restart()
            assert self.supervisor.poll() is None, self.tail()
            assert time.monotonic() < end, f"no step {step}: {self.tail()}"
            time.sleep(0.05)

    def ranks(self) -> list[psutil.Process]:
        found: dict[str, psutil.Process] = {}
        for process, rank in self._processes():
            if rank is not None:
                found.setdefault(rank, process)
        return list(found.values())

    def launchers(self) -> list[psutil.Process]:
        return [process for process, rank in self._processes() if rank is None]

    def monitors(self) -> list[psutil.Process]:
        return [
            process
            for process, _ in self._processes()
            if any("dino_ds.health.monitor" in word for word in process.cmdline())
        ]

    def _processes(self) -> list[tuple[psutil.Process, str | None]]:
        """Processes of the run, parents first, and RANK of their environment."""
        found = []
        for process in psutil.Process(self.supervisor.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                if "DINO_DS_SUPERVISOR" in variables:
                    found.append((process, variables.get("RANK")))
        return found

    def restart(self) -> None:
        self.supervisor = self._start()

    def end(self, seconds: float = 300.0) -> int:
        return self.supervisor.wait(seconds)

    def tail(self) -> str:
        return self._output.read_text()[-3000:]


def _kill_supervisor(target: Target, dice: random.Random) -> None:
    pid = target.supervisor.pid
    target.supervisor.kill()
    target.supervisor.wait()
    end = time.monotonic() + 60
    while started_by(pid):
        assert time.monotonic() < end, "something has outlived its supervisor"
        time.sleep(0.05)
    target.restart()


def _signal_rank(*numbers: int) -> Callable[[Target, random.Random], None]:
    return lambda target, dice: dice.choice(target.ranks()).send_signal(dice.choice(numbers))


def _kill_all_ranks(target: Target, _: random.Random) -> None:
    for rank in target.ranks():
        rank.kill()


FAULTS: dict[str, Callable[[Target, random.Random], None]] = {
    "kill a rank": _signal_rank(signal.SIGKILL),
    "crash a rank": _signal_rank(signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS),
    "kill all ranks": _kill_all_ranks,
    "freeze a rank": _signal_rank(signal.SIGSTOP),
    "stop a rank": _signal_rank(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2),
    "stop the run": lambda target, dice: target.supervisor.send_signal(dice.choice([signal.SIGTERM, signal.SIGUSR1])),
    "stop file": lambda target, _: (target.run / "stop").touch(),
    "kill a launcher": lambda target, dice: dice.choice(target.launchers()).kill(),
    "stop a launcher": lambda target, dice: dice.choice(target.launchers()).terminate(),
    "kill the supervisor": _kill_supervisor,
    "kill a monitor": lambda target, dice: dice.choice(target.monitors()).kill(),
}


def _shoot_all(target: Target, faults: list[str], steps: int, dice: random.Random) -> None:
    """Break the run by each of `faults` at a random step; it comes to its end all the same."""
    steps_hit = sorted(dice.randrange(2, steps - STEPS_BETWEEN_SAVES) for _ in faults)
    for number, (fault, step) in enumerate(zip(faults, steps_hit, strict=True)):
        target.wait_for_step(step)
        missed = "" if _shoot(target, fault, dice) else ": nobody there"
        print(f"{number + 1} of {len(faults)}: {fault} at step {target.step}{missed}", flush=True)
        time.sleep(dice.uniform(0, 2))
    target.wait_for_step(steps)
    assert target.end() == 0, target.tail()


def _shoot(target: Target, fault: str, dice: random.Random) -> bool:
    """Break the run by one fault; whether it has hit anybody: a target may be gone, or not there yet."""
    try:
        FAULTS[fault](target, dice)
    except (psutil.Error, IndexError, ProcessLookupError):
        return False
    return True


def _soak(tmp_path: Path, launcher: list[str], faults: list[str], steps: int) -> None:
    """Shoot `faults`, each after a random number of new steps, and compare with a run in peace."""
    dice = random.Random(int(os.environ.get("SOAK_SEED", "0")))
    images = image_folder(tmp_path / "images")
    options = {**TINY, "length": f"{steps} steps", "save_every": f"{STEPS_BETWEEN_SAVES} steps", "hang_seconds": "15"}
    target = Target(launcher, images, tmp_path / "run", options)
    try:
        _shoot_all(target, faults, steps, dice)
    finally:
        target.supervisor.kill()
    peace = tmp_path / "peace"
    assert run_on_ranks(train_tiny, images, peace, "zero1_fp32.json", changes=options) == [None, None]
    assert losses_of(target.run) == losses_of(peace)
    for name in ("teacher.safetensors", f"checkpoints/step_{steps:08d}/whole_00000.safetensors"):
        ours, theirs = load_file(target.run / name), load_file(peace / name)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    _report(target.run, steps)


def _report(run: Path, steps: int) -> None:
    """Check that no fault costs more than the work since the last save, and all together a fifth of the steps."""
    records = [json.loads(line) for line in (run / "restarts.jsonl").read_text().splitlines()]
    lost = [max(0, (record["step"] or 0) - (record["checkpoint"] or 0)) for record in records]
    print(f"restarts {len(records)}, lost steps {lost}")
    # The save that is being written when a fault comes does not count yet.
    assert max(lost, default=0) <= 2 * STEPS_BETWEEN_SAVES
    assert steps / (steps + sum(lost)) >= 0.8


def _torchrun() -> list[str]:
    port = str(find_free_port())
    return [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", f"--master_port={port}"]


def _deepspeed() -> list[str]:
    port = str(find_free_port())
    return [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", f"--master_port={port}"]


@pytest.mark.full
def test_a_killed_rank_and_a_killed_launcher_cost_nothing(tmp_path):
    """Under torchrun. Under DeepSpeed's launcher, over ssh: tests/launching/test_launches.py."""
    _soak(tmp_path, _torchrun(), ["kill a rank", "kill a launcher"], 60)


@pytest.mark.soak
@pytest.mark.parametrize("launcher", [_torchrun, _deepspeed], ids=["torchrun", "deepspeed"])
def test_faults_of_all_kinds(tmp_path, launcher):
    """One about every 30 seconds: on two idle cores a start takes half of that."""
    dice = random.Random(int(os.environ.get("SOAK_SEED", "0")))
    count = 2 * int(os.environ.get("SOAK_MINUTES", "20"))
    faults = [dice.choice(list(FAULTS)) for _ in range(count)]
    _soak(tmp_path, launcher(), faults, 60 * (count + 1))

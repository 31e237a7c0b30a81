"""Real launchers that a signal ends, alone or with all below them: the ranks save, and no process stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dino_ds.basics.machine import find_free_port
from tests.launching.cluster import REPOSITORY, environment
from tests.run.harness import TINY, image_folder
from tests.sample import sampled

pytestmark = [pytest.mark.slow, pytest.mark.full]  # real launchers and hosts: minutes, and timings of a quiet machine
MOST_SECONDS = 60.0
"""On two quiet cores the last process is gone within 15 s."""
SRUN = """
import os, subprocess, sys
told = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1"}
ranks = [{"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
ranks = [subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, **told, **rank}) for rank in ranks]
sys.exit(max(rank.wait() for rank in ranks))
"""
ENDINGS = [
    *(("deepspeed", name, target) for target in ("launcher", "launch.py") for name in ("TERM", "KILL", "INT", "HUP")),
    *(("deepspeed", name, "group") for name in ("TERM", "INT", "HUP")),
    *(("torchrun", name, "launcher") for name in ("KILL", "TERM", "INT", "HUP")),
    *(("torchrun", name, "group") for name in ("TERM", "INT", "HUP")),
    *(("srun", name, "launcher") for name in ("KILL", "TERM")),
]


class Launch:
    """A job of two ranks under a launcher in a session of its own."""

    def __init__(self, launcher: str, folder: Path) -> None:
        port, script = str(find_free_port()), str(REPOSITORY / "dino_ds/train.py")
        command = {
            "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", port, script],
            "torchrun": ["torchrun", "--nproc_per_node", "2", "--master_port", port, script],
            "srun": [sys.executable, "-c", SRUN, script],
        }[launcher]
        self.run = folder / "run"
        values = {**TINY, "data.root": image_folder(folder / "images"), "data.workers": 1, "length": "100000 steps"}
        words = [str(part) for name, value in values.items() for part in (f"--{name}", value)]
        ds = str(REPOSITORY / "ds_configs/zero1_fp32.json")
        with (folder / "output").open("w") as output:
            self.process = subprocess.Popen(
                [*command, *words, "--run_dir", str(self.run), "--ds_config", ds],
                env=environment(MASTER_PORT=port),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Tests that nohup or a shell's & has started would hand on that they are ignored.
                preexec_fn=lambda: [signal.signal(n, signal.SIG_DFL) for n in (signal.SIGHUP, signal.SIGINT)],
            )
        self.output = folder / "output"

    def wait_for_steps(self, steps: int) -> list[psutil.Process]:
        """Until so many are done; returns the processes of the job, the launcher first."""
        end, metrics = time.monotonic() + 400, self.run / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= steps):
            assert self.process.poll() is None and time.monotonic() < end, self.output.read_text()
            time.sleep(0.1)
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]


def _end(job: Launch, processes: list[psutil.Process], number: int, target: str) -> None:
    if target == "group":
        os.killpg(job.process.pid, number)
    elif target == "launcher":
        job.process.send_signal(number)
    else:
        (launch,) = (process for process in processes if "deepspeed.launcher.launch" in process.cmdline())
        launch.send_signal(number)


@pytest.mark.parametrize(("launcher", "name", "target"), sampled(ENDINGS))
def test_a_run_ends_saved_with_what_started_it(launcher, name, target, tmp_path):
    job = Launch(launcher, tmp_path)
    processes = job.wait_for_steps(3)
    try:
        assert len(processes) >= 7  # the launcher, and of each rank itself, its monitor and its loader process
        _end(job, processes, getattr(signal, f"SIG{name}"), target)
        job.process.wait(MOST_SECONDS)
        assert not psutil.wait_procs(processes[1:], MOST_SECONDS)[1], job.output.read_text()
    finally:
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
    assert "stopped  by " in job.output.read_text()
    saved = (job.run / "checkpoints/latest").read_text().strip()
    steps = (job.run / "metrics.jsonl").read_text().count("\n")
    assert saved == f"step_{steps:08d}" and not (job.run / "lock").exists()

"""Real launches of which a rank is killed, by the scripts of launch/ and by torchrun on two hosts: the run goes on from
its last checkpoint, and learns to the last bit what a run learns that nobody disturbs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from dino_ds.basics.machine import find_free_port
from tests.launching.hosts import start, two_hosts
from tests.ranks import run_on_ranks
from tests.run.harness import REPOSITORY, TINY, image_folder, losses_of, train_tiny
from tests.sample import sampled

pytestmark = [pytest.mark.slow, pytest.mark.full]

CHANGES = {"length": "60 steps", "save_every": "5 steps"}
DS = "zero2_fp32.json"


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run without a fault, by the number of its ranks."""
    folder = tmp_path_factory.mktemp("straight")
    images, runs = image_folder(folder / "images"), {}

    def of(ranks: int) -> Path:
        if ranks not in runs:
            runs[ranks] = folder / f"run{ranks}"
            run_on_ranks(train_tiny, images, runs[ranks], DS, changes=CHANGES, world=ranks)
        return runs[ranks]

    return of


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose scripts a user has edited; images and a recipe beside it."""
    image_folder(tmp_path / "images")
    sections: dict[str, dict[str, str]] = {}
    for name, value in {**TINY, **CHANGES}.items():
        section, _, key = name.rpartition(".")
        (sections.setdefault(section, {}) if section else sections)[key or name] = value
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(sections))
    edits = {"HOSTFILE": "hostfile", "DATA": "images", "RECIPE": "tiny.yaml", "RUN": "run", "GPUS": "2"}
    edits |= {"DS_CONFIG": f"ds_configs/{DS}"}
    (tmp_path / "launch").mkdir()
    for script in (REPOSITORY / "launch").glob("*.sh"):
        text = script.read_text()
        for name, value in edits.items():
            text = re.sub(rf"(?m)^{name}=\S*", f"{name}={value}", text)
        (tmp_path / "launch" / script.name).write_text(text)
    for name in ("dino_ds", "ds_configs"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    return tmp_path


def _wait_for_losses(run: Path, processes: list[subprocess.Popen]) -> None:
    end, metrics = time.monotonic() + 500, run / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count('"loss"') >= 12):
        assert all(process.poll() is None for process in processes) and time.monotonic() < end
        time.sleep(0.1)


def _kill_a_rank(run: Path, processes: list[subprocess.Popen], rank: int) -> None:
    _wait_for_losses(run, processes)
    os.kill(json.loads((run / f"heartbeats/rank_{rank:05d}.json").read_text())["pid"], signal.SIGKILL)


def _equal(run: Path, other: Path) -> None:
    assert losses_of(run) == losses_of(other)
    ours, theirs = (load_file(where / "teacher.safetensors") for where in (run, other))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("script", "ranks", "restarts"),
    [("torchrun.sh", 2, True), ("one_node.sh", 2, False), ("one_gpu.sh", 1, True)],
)
def test_a_script_of_one_machine_goes_on_after_a_rank_is_killed(script, ranks, restarts, checkout, straight):
    command = ["sh", checkout / "launch" / script, *["--ds_config", f"ds_configs/{DS}"] * (script == "one_gpu.sh")]
    job = start(command, checkout / "output")
    try:
        _kill_a_rank(checkout / "run", [job], ranks - 1)
        code = job.wait(300)
        if not restarts:
            assert code not in (0, None)
            job = start(command, checkout / "output")
            code = job.wait(300)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert code == 0, (checkout / "output").read_text()
    assert f"rank {ranks - 1} died" in (checkout / "output").read_text()
    _equal(checkout / "run", straight(ranks))


def _words(folder: Path) -> list[object]:
    words = ["--data.root", folder / "images", "--config", folder / "tiny.yaml", "--run_dir", folder / "run"]
    return [*words, "--ds_config", REPOSITORY / "ds_configs" / DS, "--resume", "auto"]


def _torchrun(hosts, folder: Path, *how: object) -> list[subprocess.Popen]:
    started = []
    for number, host in enumerate(hosts):
        command = ["torchrun", "--nnodes", 2, "--nproc_per_node", 1, *how, "--node_rank", number]
        started.append(host.start([*command, REPOSITORY / "dino_ds/train.py", *_words(folder)], folder / "output"))
    return started


def _srun(hosts, folder: Path, port: int) -> list[subprocess.Popen]:
    """As srun would: a rank a host, told by Slurm's variables alone."""
    told = {"SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": 0}
    told |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": port}
    command = [sys.executable, REPOSITORY / "dino_ds/train.py", *_words(folder)]
    return [host.start(command, folder / "output", SLURM_PROCID=n, **told) for n, host in enumerate(hosts)]


@pytest.mark.parametrize("way", ["hostfile.sh", "c10d", "static", "srun"])
def test_two_hosts_go_on_after_a_rank_of_one_is_killed(way, checkout, straight):
    """hostfile.sh ends on both hosts and goes on when started again, as static torchrun; c10d starts both again."""

    def launch(near, far):
        if way == "hostfile.sh":
            return [near.start(["sh", checkout / "launch/hostfile.sh"], checkout / "output")]
        if way == "srun":
            return _srun((near, far), checkout, port)
        if way == "static":
            return _torchrun((near, far), checkout, "--master_addr", near.address, "--master_port", port)
        endpoint = f"{near.name}:{port}"  # by its address, no torchrun knows that it is the one to serve
        rendezvous = ("--rdzv_backend", "c10d", "--rdzv_id", "a", "--rdzv_endpoint", endpoint)
        return _torchrun((near, far), checkout, *rendezvous, "--max_restarts", 1)

    port = find_free_port()
    with two_hosts(checkout) as hosts:
        started = launch(*hosts)
        try:
            _kill_a_rank(checkout / "run", started, 1)
            codes = [process.wait(300) for process in started]
            if way != "c10d":
                assert 0 not in codes and not any(host.processes("train.py") for host in hosts)
                codes = [process.wait(300) for process in launch(*hosts)]
        finally:
            print((checkout / "output").read_text()[-5000:])
    output = (checkout / "output").read_text()
    assert set(codes) == {0} and output.count("error: rank 1 died") == 1
    assert way != "hostfile.sh" or "hb: 1 slots, GPUs: none" in output
    _equal(checkout / "run", straight(2))


@pytest.mark.parametrize("victim", ["launch.py", "ssh's other end", "runner"])
def test_two_hosts_end_with_a_launcher_that_is_killed(victim, checkout):
    """SIGKILL to the far launch.py, to the far sshd's session, or to the near runner: no rank trains on."""
    with two_hosts(checkout) as (near, far):
        job = near.start(["sh", checkout / "launch/hostfile.sh"], checkout / "output")
        _wait_for_losses(checkout / "run", [job])
        found = {"launch.py": far.processes("deepspeed.launcher.launch"), "ssh's other end": far.processes("sshd: ")}
        victims = found.get(victim) or [psutil.Process(job.pid)]
        for process in victims:
            process.kill()
        left, end = [job], time.monotonic() + MOST_SECONDS
        while left and time.monotonic() < end:
            time.sleep(0.2)
            left = [process for host in (near, far) for process in host.processes("train.py")]
        output = (checkout / "output").read_text()
        assert not left, output
        assert job.wait(MOST_SECONDS) and not (checkout / "run/lock").exists(), output


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


def _launch(launcher: str, folder: Path) -> subprocess.Popen:
    """A job of two ranks under a launcher."""
    port, script = str(find_free_port()), str(REPOSITORY / "dino_ds/train.py")
    command = {
        "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", port, script],
        "torchrun": ["torchrun", "--nproc_per_node", "2", "--master_port", port, script],
        "srun": [sys.executable, "-c", SRUN, script],
    }[launcher]
    values = {**TINY, "data.root": image_folder(folder / "images"), "data.workers": 1, "length": "100000 steps"}
    values |= {"run_dir": folder / "run", "ds_config": REPOSITORY / "ds_configs/zero1_fp32.json"}
    words = [part for name, value in values.items() for part in (f"--{name}", value)]
    return start([*command, *words], folder / "output", MASTER_PORT=port)


@pytest.mark.parametrize(("launcher", "name", "target"), sampled(ENDINGS))
def test_a_run_ends_saved_with_what_started_it(launcher, name, target, tmp_path):
    job, run, number = _launch(launcher, tmp_path), tmp_path / "run", getattr(signal, f"SIG{name}")
    _wait_for_losses(run, [job])
    processes = psutil.Process(job.pid).children(recursive=True)
    try:
        assert len(processes) >= 6  # of each rank itself, its monitor and its loader process
        if target == "launch.py":
            (launch,) = (process for process in processes if "deepspeed.launcher.launch" in process.cmdline())
            launch.send_signal(number)
        else:
            (os.killpg if target == "group" else os.kill)(job.pid, number)
        job.wait(MOST_SECONDS)
        assert not psutil.wait_procs(processes, MOST_SECONDS)[1], (tmp_path / "output").read_text()
    finally:
        for process in (job, *processes):
            with suppress(psutil.Error):
                process.kill()
    assert "stopped  by " in (tmp_path / "output").read_text()
    saved = (run / "checkpoints/latest").read_text().strip()
    steps = (run / "metrics.jsonl").read_text().count("\n")
    assert saved == f"step_{steps:08d}" and not (run / "lock").exists()

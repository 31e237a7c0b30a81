"""Real launches of two ranks, as on two machines, which learn to the last bit what one machine's two ranks learn, and
how they are stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dino_ds.basics.ports import find_free_port
from tests.launching.cluster import HOSTS, REPOSITORY, dino_ds, environment, ssh_cluster
from tests.ranks import run_on_ranks
from tests.run.harness import TINY, image_folder, losses_of, train_tiny

pytestmark = pytest.mark.slow

DS = "ds_configs/zero2_fp32.json"
STEPS = 3
_SECONDS = 600


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder whose name a remote shell would act on."""
    return image_folder(tmp_path_factory.mktemp("images") / "im {a,b} $HOME `id`;%h")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ssh_cluster(tmp_path_factory.mktemp("ssh")) as found:
        yield found


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# two machines\n" + "".join(f"{host} slots=1\n" for host in HOSTS))
    return path


def _train_words(images, run, steps=STEPS, ds=DS, **changes):
    options = [part for name, value in {**TINY, **changes}.items() for part in (f"--{name}", value)]
    return ["--data.root", images, "--run_dir", run, "--max_steps", steps, *options, "--ds_config", ds]


def _start(command, env=None):
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=REPOSITORY,
        env=env or environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _finish(*processes):
    """(exit code, output) of each."""
    ended = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=_SECONDS)
            ended.append((process.returncode, output))
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                print(process.communicate()[0][-3000:])
    return ended


def _wait_for(run, process, condition, name="log.txt"):
    """Until a file of the run is as wanted."""
    end = time.monotonic() + _SECONDS
    while not ((run / name).exists() and condition((run / name).read_text())):
        assert process.poll() is None and time.monotonic() < end, name
        time.sleep(0.1)


def _assert_same(run, expected):
    assert losses_of(run) == losses_of(expected)
    ours, theirs = (load_file(where / "teacher.safetensors") for where in (run, expected))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_hostfile_over_ssh_and_pdsh_and_a_rank_that_is_killed(cluster, hostfile, images, tmp_path):
    """Started again from the last checkpoint, at most ten steps behind: bit-identical to a run that nobody disturbs."""
    run, straight, changes = tmp_path / "a run", tmp_path / "straight", {"length": "60 steps", "save_every": "5 steps"}
    words = ["launch", "--hostfile", hostfile, "--max_restarts", 1, "--master_port", find_free_port()]
    words += ["--", *_train_words(images, run, steps=60, **changes)]
    process = _start(dino_ds(*words), cluster)
    _wait_for(run, process, lambda text: text.count('"loss"') >= 12, "metrics.jsonl")
    os.kill(json.loads((run / "heartbeats/rank_00001.json").read_text())["pid"], signal.SIGKILL)
    assert run_on_ranks(train_tiny, images, straight, Path(DS).name, changes=changes) == [None, None]
    ((code, output),) = _finish(process)
    assert code == 0, output[-3000:]
    assert all(f"machine  {host}: 1 ranks" in output for host in HOSTS) and "command  " in output
    death = json.loads((run / "restarts.jsonl").read_text())
    assert (death["code"], death["rank"]) == (6, 1) and death["step"] - death["checkpoint"] <= 10
    _assert_same(run, straight)

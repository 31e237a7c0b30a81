"""A real launch of two ranks, as on two machines, which learn to the last bit what one machine's two ranks learn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file

from dino_ds.basics.ports import find_free_port
from tests.launching.cluster import HOSTS, REPOSITORY, dino_ds, two_machines
from tests.ranks import run_on_ranks
from tests.run.harness import TINY, image_folder, losses_of, train_tiny

pytestmark = pytest.mark.slow


def test_hostfile_over_ssh_and_pdsh_and_a_rank_that_is_killed(tmp_path):
    """Started again from the last checkpoint, at most ten steps behind: bit-identical to a run that nobody disturbs.

    A remote shell would act on the name of the folder of images.
    """
    images = image_folder(tmp_path / "im {a,b} $HOME `id`;%h")
    run, straight = tmp_path / "a run", tmp_path / "straight"
    changes = {"length": "60 steps", "save_every": "5 steps"}
    (tmp_path / "hosts").write_text("# two machines\n" + "".join(f"{host} slots=1\n" for host in HOSTS))
    words = ["launch", "--hostfile", tmp_path / "hosts", "--max_restarts", 1, "--master_port", find_free_port(), "--"]
    words += ["--data.root", images, "--run_dir", run, "--ds_config", "ds_configs/zero2_fp32.json"]
    words += [part for name, value in {**TINY, **changes}.items() for part in (f"--{name}", value)]
    environment = two_machines(tmp_path)
    with (tmp_path / "output").open("w+") as file:
        process = subprocess.Popen(
            dino_ds(*words),
            cwd=REPOSITORY,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end, metrics = time.monotonic() + 500, run / "metrics.jsonl"
            while not (metrics.exists() and metrics.read_text().count('"loss"') >= 12):
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.1)
            os.kill(json.loads((run / "heartbeats/rank_00001.json").read_text())["pid"], signal.SIGKILL)
            assert run_on_ranks(train_tiny, images, straight, "zero2_fp32.json", changes=changes) == [None, None]
            assert process.wait(500) == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            file.seek(0)
            output = file.read()
            print(output[-3000:])
    assert all(f"machine  {host}: 1 ranks" in output for host in HOSTS) and "command  " in output
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    died, restart = (event for event in events if event["kind"] in ("error", "restart"))
    assert restart["code"] == 6 and "rank 1 died" in died["line"] and died["step"] - restart["checkpoint"] <= 10
    assert losses_of(run) == losses_of(straight)
    ours, theirs = (load_file(where / "teacher.safetensors") for where in (run, straight))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)

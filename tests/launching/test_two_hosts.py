"""Ranks on two hosts with networks and mounts of their own: they learn as on one host, and end together."""

from __future__ import annotations

import time
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dino_ds
from tests.faults import inject, jobs
from tests.faults.inject import SLOW, act, at_call, at_once, at_step
from tests.launching.hosts import OnHosts, two_hosts
from tests.ranks import run_on_ranks
from tests.run.harness import REPOSITORY, image_folder, losses_of, train_tiny

pytestmark = pytest.mark.slow
SAVES = {"save_every": "3 steps", "save_in_background": "false"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with two_hosts(tmp_path_factory.mktemp("hosts")) as pair:
        yield pair


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), classes=2)


@pytest.fixture
def start(hosts, images, tmp_path):
    def start(fault=None, root=images, environment=(), name="run", **more):
        near, far = hosts
        told = {"MASTER_ADDR": near.address, **dict(environment)}
        place = OnHosts((near.holder.pid, far.holder.pid), fault)
        return jobs.start(tmp_path / name, root, fault=place, environment=told, **more)

    return start


@pytest.fixture
def mount(hosts):
    mounted = []

    def mount(source, target, host=hosts[1]):
        host.run("mount", *(("-t", "tmpfs", "tmpfs") if source is None else ("--bind", source)), target)
        mounted.append((host, target))

    yield mount
    for host, target in mounted:
        host.run("umount", target)


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1, 3))])
def test_two_hosts_learn_what_two_ranks_of_one_host_learn(stage, start, images, tmp_path):
    ds = f"zero{stage}_fp32.json"
    start(ds=ds).finish()
    assert run_on_ranks(train_tiny, images, tmp_path / "straight", ds) == [None, None]
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "straight")
    ours, theirs = (load_file(tmp_path / name / "teacher.safetensors") for name in ("run", "straight"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


IN_START = "dino_ds.run.run_folder:RunFolder.agree"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "codes", "says"),
    [
        (at_call(IN_START, 1, (1,), inject.kill), (6, -9), "rank 1 died"),
        (at_call(IN_START, 1, (0,), inject.kill), (-9, 6), "rank 0 died"),
        (at_step(8, (1,), inject.kill), (6, -9), "rank 1 died"),
        (at_step(8, (0,), inject.kill), (-9, 6), "rank 0 died"),
        (at_step(8, (1,), inject.fail), (1, 1), "planted by a test"),
    ],
    ids=["far in start", "near in start", "far", "near", "far raises"],
)
def test_no_rank_waits_for_a_dead_one(fault, codes, says, start):
    """Faults while it saves and evaluates, and of the disk: tests/faults, on one host."""
    outcome = start(fault).wait()
    assert tuple(outcome.codes) == codes, outcome.text
    # Before there is a run folder, ranks can't agree who reports.
    causes = [line for line in outcome.errors if "connection to another rank was lost at step 0 (start)" not in line]
    assert all(says in line for line in causes) and len(causes) <= 1 <= len(outcome.errors), outcome.text
    assert outcome.orphans == []


@pytest.mark.full
def test_a_rank_that_does_not_come_is_named(start):
    job = start(at_once((1,), inject.kill))
    job.wait_for(lambda: "ha: rank 1 of 2 did not come within" in job.text(0), 200)
    job.signal(0, 15)
    assert job.wait().codes == [75, -9]


@pytest.mark.parametrize("refuses", [0, pytest.param(1, marks=pytest.mark.full)])
def test_nobody_waits_for_a_host_that_refuses_to_start(refuses, start, mount, hosts, tmp_path):
    """Before ranks join, where launchers such as `deepspeed --no_ssh` don't know of each other."""
    (tmp_path / "broken").write_text("{")
    mount(tmp_path / "broken", DS, hosts[refuses])
    began = time.monotonic()
    outcome = start().wait()
    assert outcome.codes == [2, 2] and time.monotonic() - began < 60, outcome.text
    assert "zero1_fp32.json" in outcome.output[refuses]
    assert f"error: h{'ab'[refuses]} has not started: " in outcome.output[1 - refuses]


@pytest.mark.full
@pytest.mark.parametrize("returns", [False, True])
def test_a_pulled_cable_ends_the_run_and_names_the_host_unless_it_is_back_in_time(returns, start, hosts, tmp_path):
    job = start(SLOW, changes={"hang_seconds": "120" if returns else "15"})
    try:
        job.wait_for_steps(tmp_path / "run", 4)
        hosts[0].cable("down")
        job.go_on()
        outcome = time.sleep(20) if returns else job.wait()
    finally:
        hosts[0].cable("up")
    if returns:
        job.finish()
        return
    assert outcome.codes == [6, 6] and "hb does not reach 10.9.0.1:" in outcome.text, outcome.text
    assert len(outcome.errors) == 1, outcome.text


@pytest.mark.full
def test_hosts_that_can_not_connect_say_which_variables_name_the_interface(start):
    outcome = start(environment={"GLOO_SOCKET_IFNAME": "lo"}).wait()
    assert outcome.codes == [2, 2] and outcome.orphans == [], outcome.text
    for text in outcome.output:
        (line,) = [line for line in text.splitlines() if "error: " in line]
        assert "GLOO_SOCKET_IFNAME=eth0" in line and "NCCL_SOCKET_IFNAME" in line


TORCH = Path(str(distribution("torch")._path)) / "METADATA"
CODE = Path(dino_ds.__file__).parent / "recipes/cifar10.yaml"
DS = REPOSITORY / "ds_configs/zero1_fp32.json"


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        (TORCH, "\nVersion: ", "\nVersion: 1", "torch is 1"),
        (CODE, "\n", "\n# other\n", "the code of dino_ds is "),
        (DS, '"gradient_clipping": ', '"gradient_clipping": 7', "ds.gradient_clipping is 7"),
    ],
    ids=["torch", "code", "ds"],
)
def test_what_differs_on_a_host_is_refused_at_the_start(file, old, new, says, start, mount, tmp_path):
    (tmp_path / "other").write_text(file.read_text().replace(old, new, 1))
    mount(tmp_path / "other", file)
    outcome = start().wait()
    assert outcome.codes == [2, 2], outcome.text
    (line,) = outcome.errors
    assert f"{says}" in line and "for rank 1 on hb, and " in line and "for rank 0 on ha: make it the same" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.faults
@pytest.mark.parametrize("resume", [False, True])
def test_a_run_folder_that_a_host_does_not_share_is_refused_at_the_start(resume, start, mount, tmp_path):
    if resume:
        start(flags=("--max_steps", "4")).finish()
    (tmp_path / "run").mkdir(exist_ok=True)
    mount(None, tmp_path / "run")
    outcome = start(resume=resume).wait()
    says = "holds no run on hb" if resume else "rank 1 on hb does not see"
    assert outcome.codes == [3 if resume else 2] * 2 and says in outcome.text, outcome.text


@pytest.mark.full
def test_a_clock_that_is_an_hour_off_changes_nothing(start, images, tmp_path):
    """On the far host, for the rank and all that it starts."""
    start(at_once((1,), act(inject.shift_clock, str(tmp_path), 3600)), changes=SAVES).finish()
    assert run_on_ranks(train_tiny, images, tmp_path / "straight", "zero1_fp32.json") == [None, None]
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "straight")

"""Ranks on two hosts with networks and mounts of their own: they learn as on one host, and end together."""

from __future__ import annotations

import json
import time
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dino_ds
from dino_ds.config.loading import load_recipe
from dino_ds.costs.step_costs import count_parameters
from tests.faults import inject, jobs
from tests.faults.inject import SLOW, act, at_call, at_once, at_step, in_save
from tests.launching.hosts import OnHosts, two_hosts
from tests.ranks import run_on_ranks
from tests.run.harness import REPOSITORY, TINY, image_folder, losses_of, train_tiny

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


IN_START, IN_EVALUATION = "dino_ds.run.run_folder:RunFolder.agree", "dino_ds.evals.runner:EvalRunner.evaluate"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "codes", "says"),
    [
        (at_call(IN_START, 1, (1,), inject.kill), (6, -9), "rank 1 died"),
        (at_call(IN_START, 1, (0,), inject.kill), (-9, 6), "rank 0 died"),
        (at_step(8, (1,), inject.kill), (6, -9), "rank 1 died"),
        (at_step(8, (0,), inject.kill), (-9, 6), "rank 0 died"),
        (in_save(6, (1,), inject.kill), (6, -9), "rank 1 died"),
        (at_step(8, (1,), inject.fail), (1, 1), "planted by a test"),
        (in_save(6, (1,), inject.no_space, times=1000), (5, 5), "3 saves in a row have failed"),
        (at_call(IN_EVALUATION, 2, (1,), inject.kill), (6, -9), "rank 1 died"),
    ],
    ids=[
        "far in start",
        "near in start",
        "far",
        "near",
        "far while saving",
        "far raises",
        "disk full on far",
        "far in k-NN",
    ],
)
def test_no_rank_waits_for_a_dead_one(fault, codes, says, start, images):
    changes = SAVES | ({"save_every": "1 steps"} if codes == (5, 5) else {})
    changes |= {"eval.every": "4 steps", "eval.root": str(images), "eval.k": "1"}
    outcome = start(fault, changes=changes).wait()
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


@pytest.mark.parametrize("refuses", [pytest.param(0, marks=pytest.mark.full), 1])
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
def test_a_pulled_cable_ends_the_run_and_names_the_host(start, hosts, tmp_path):
    job = start(SLOW, changes={"hang_seconds": "15"})
    try:
        job.wait_for_steps(tmp_path / "run", 4)
        hosts[0].cable("down")
        job.go_on()
        outcome = job.wait()
    finally:
        hosts[0].cable("up")
    assert outcome.codes == [6, 6] and "hb does not reach 10.9.0.1:" in outcome.text, outcome.text
    assert len(outcome.errors) == 1, outcome.text


@pytest.mark.full
@pytest.mark.faults
def test_training_goes_on_when_the_cable_is_back(start, hosts, tmp_path):
    job = start(SLOW, changes={"hang_seconds": "120"})
    try:
        job.wait_for_steps(tmp_path / "run", 4)
        hosts[0].cable("down")
        job.go_on()
        time.sleep(20)
    finally:
        hosts[0].cable("up")
    job.finish()


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
        (None, "0.02", "0.03", "optimizer.lr is 0.03"),
    ],
    ids=["torch", "code", "ds", "recipe"],
)
def test_what_differs_on_a_host_is_refused_at_the_start(file, old, new, says, start, mount, tmp_path):
    if file is None:
        file = tmp_path / "recipe.yaml"
        file.write_text("optimizer: {lr: 0.02}\n")
    (tmp_path / "other").write_text(file.read_text().replace(old, new, 1))
    mount(tmp_path / "other", file)
    flags = ("--config", str(tmp_path / "recipe.yaml")) if file.name == "recipe.yaml" else ()
    outcome = start(flags=flags, without=("optimizer.lr",) if flags else ()).wait()
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


def test_a_clock_that_is_an_hour_off_changes_nothing(start, images, tmp_path):
    """On the far host, for the rank and all that it starts."""
    start(at_once((1,), act(inject.shift_clock, str(tmp_path), 3600)), changes=SAVES).finish()
    assert run_on_ranks(train_tiny, images, tmp_path / "straight", "zero1_fp32.json") == [None, None]
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "straight")


def _sent(host) -> int:
    """Bytes that a host has sent through the cable."""
    return json.loads(host.run("ip", "-s", "-j", "link", "show", "cable"))[0]["stats64"]["tx"]["bytes"]


@pytest.mark.full
@pytest.mark.parametrize(("stage", "each"), [(0, 4), (1, 6), (2, 6), (3, 8)])
def test_bytes_that_a_host_sends_for_each_weight(stage, each, start, hosts):
    """Of two hosts, in FP32: 4 for gradients, 2 for new weights, which the teacher's average reads too, at ZeRO 3 2 for
    the weights of the backward pass. The rest, below 5 %, are headers and the center."""
    sent, changes = [], {"model.width": "128", "model.depth": "4"}
    for steps in (4, 12):
        before = _sent(hosts[0])
        start(ds=f"zero{stage}_fp32.json", name=f"run{steps}", changes=changes | {"length": f"{steps} steps"}).finish()
        sent.append(_sent(hosts[0]) - before)
    recipe = load_recipe(None, {**TINY, **changes, "data.root": "images"})
    assert (sent[1] - sent[0]) / 8 / count_parameters(recipe) == pytest.approx(each, rel=0.05)

"""What measures: a trial, which is the step that training makes, in processes of its own; clocks, and the host."""

from __future__ import annotations

import gc
import json
import math
import sys
import time

import pytest
import torch

from dino_ds.basics.ranges import listen, named_range
from dino_ds.config.crops import all_crops
from dino_ds.engine import distributed
from dino_ds.engine.process import init_distributed, memory_gib, resident_mib
from dino_ds.planning.measure import (
    ChildFailed,
    ChildLimits,
    ChildOutOfMemory,
    PartTimes,
    build_trial,
    clock_of,
    describe_host,
    host_line,
    matmul_tflops,
    resolve,
    run_in_child,
    time_interleaved,
)
from tests.planning.measure.tiny import tiny_ds, tiny_recipe
from tests.reference import copied

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _process_group():
    init_distributed()


@pytest.mark.slow
def test_a_trial_has_the_recipe_s_crops_and_moves_the_weights():
    trial = build_trial(*resolve(tiny_recipe(), tiny_ds(0), "test.json", 4))
    assert [tuple(view.shape) for view in all_crops(trial.batch.crops)] == [(4, 3, 32, 32)] * 2 + [(4, 3, 16, 16)] * 2
    schedule = trial.step.schedule
    assert not schedule.prototypes_frozen and not schedule.unfreeze_prototypes
    assert schedule.lr == pytest.approx(5e-4 * 4 / 256, rel=1e-3)
    before = copied(trial.step.teachers["ema"].state())
    first = trial.run()
    assert math.isfinite(float(first))
    assert trial.step.applied_steps == 10001
    after = copied(trial.step.teachers["ema"].state())
    assert any(not torch.equal(before[name], value) for name, value in after.items())


def take_memory(mib):
    block = torch.ones(mib * 2**18)
    return float(block.sum()), memory_gib() * 1024


@pytest.mark.slow
def test_a_child_tells_its_own_peak_memory():
    """However large this process is: 150 MiB of work to 20 MiB of allocator and threads; by its metrics too."""
    ballast = torch.ones(2**27)
    result = run_in_child(take_memory, threads=1, mib=150)
    assert result.value == [150 * 2**18, pytest.approx(result.peak_mib, abs=1)]
    assert result.peak_mib - result.imports_mib == pytest.approx(150, abs=20)
    assert ballast.sum() == ballast.numel() and result.peak_mib < resident_mib()
    gc.collect()


def take_long():
    return distributed.world_size() if distributed.world_size() > 1 else time.sleep(60)


@pytest.mark.slow
def test_children_end_at_their_limits_and_several_are_ranks():
    with pytest.raises(ChildOutOfMemory, match=r"took 0\.\d\d GiB, more than 0\.05"):
        run_in_child(take_memory, 1, ChildLimits(gib=0.05), mib=150)
    with pytest.raises(ChildFailed, match="had not ended after 1 s"):
        run_in_child(take_long, 1, ChildLimits(seconds=1.0))
    assert run_in_child(take_long, 1, ChildLimits(ranks=2)).value == 2


@pytest.mark.parametrize(
    ("code", "says"),
    [("echo on purpose >&2; exit 1", "without a result: on purpose"), ("kill -9 $$", "take a smaller batch")],
)
def test_a_child_that_fails_says_why(code, says, tmp_path, monkeypatch):
    (tmp_path / "python").write_text(f"#!/bin/sh\n{code}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ChildFailed, match=says):
        run_in_child(take_memory, threads=1, mib=1)


def test_runs_are_interleaved_in_turned_order_and_warm_up_is_not_counted():
    order = []
    timings = time_interleaved(
        {name: (lambda name=name: order.append(name)) for name in "ab"}, repeats=2, warmup=1, device=CPU
    )
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(t.all_seconds) for name, t in timings.items()} == {"a": 2, "b": 2}


def test_what_waits_for_others_is_timed_by_the_wall(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert (clock_of(CPU), clock_of(CPU, waits=True), clock_of(torch.device("cuda"))) == ("cpu", "wall", "wall")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert clock_of(CPU) == "wall"


@pytest.mark.slow
def test_host_and_peak():
    host = describe_host()
    assert host["versions"]["torch"] in host_line(host)
    assert json.dumps(host)
    assert matmul_tflops(CPU, torch.float32, repeats=1) > 0


@pytest.mark.gpu
def test_part_times_of_a_gpu_see_the_kernel():
    device = torch.device("cuda", 0)
    parts, a = PartTimes(device), torch.ones(4096, 4096, device=device)
    with listen(parts), named_range("teacher"):
        a @ a
    assert parts.read()["teacher"] > 1e-5

"""The clocks and tables that results are made of."""

from __future__ import annotations

import json

import pytest
import torch

from dino_ds.basics.ranges import listen, named_range
from dino_ds.planning.measure import PartTimes, clock_of, describe_host, host_line, matmul_tflops, time_interleaved

CPU = torch.device("cpu")


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

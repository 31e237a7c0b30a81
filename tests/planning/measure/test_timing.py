"""The clocks and tables that results are made of."""

from __future__ import annotations

import json

import pytest
import torch

from dino_ds.basics.digits import short
from dino_ds.basics.ranges import listen, named_range
from dino_ds.planning.measure.host import describe_host, host_line, matmul_tflops
from dino_ds.planning.measure.memory import MIB, GpuPeak
from dino_ds.planning.measure.tables import markdown_table, print_result
from dino_ds.planning.measure.timing import PartTimes, clock_of, time_interleaved

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


def test_part_times_leave_the_warm_up_out():
    heard, parts = [], PartTimes(torch.device("cpu"))

    def step():
        with named_range("loss"):
            heard.append(parts.read().get("loss", 0.0))

    run = parts.after(2, step)
    for _ in range(4):
        run()
    assert len(heard) == 4 and heard[:3] == [0.0] * 3 and 0 < heard[3] < parts.read()["loss"]


def test_peak_of_a_gpu_is_what_comes_after(monkeypatch):
    held = {"memory_allocated": 3 * MIB, "max_memory_allocated": 90 * MIB}
    for name in held:
        monkeypatch.setattr(torch.cuda, name, lambda name=name: held[name])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: held.update(max_memory_allocated=3 * MIB))
    peak = GpuPeak()
    held["max_memory_allocated"] = 10 * MIB
    assert peak.mib() == 7


@pytest.mark.slow
def test_host_and_peak():
    host = describe_host()
    assert host["versions"]["torch"] in host_line(host)
    assert json.dumps(host)
    assert matmul_tflops(CPU, torch.float32, repeats=1) > 0


def test_tables(capsys):
    table = markdown_table(("name", "s"), [("a", short(1.254))])
    assert table == "| name |    s |\n| ---- | ---: |\n| a    | 1.25 |"
    for as_json in (True, False):
        print_result(table, {"a": 1}, as_json=as_json)
        said = capsys.readouterr().out
        assert json.loads(said) == {"a": 1} if as_json else said == table + "\n"


@pytest.mark.gpu
def test_part_times_of_a_gpu_see_the_kernel():
    device = torch.device("cuda", 0)
    parts, a = PartTimes(device), torch.ones(4096, 4096, device=device)
    with listen(parts), named_range("teacher"):
        a @ a
    assert parts.read()["teacher"] > 1e-5

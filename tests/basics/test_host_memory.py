"""Memory of the machine or container, and of a process with its children."""

from __future__ import annotations

import subprocess
import sys
import threading

import psutil
import pytest

from dino_ds.basics import machine


@pytest.mark.parametrize(("limit", "room"), [(str(2**28), (0.25, 0.125)), ("max", None)])
def test_a_container_has_what_its_limit_leaves(limit, room, monkeypatch, tmp_path):
    """Cached files of its own are free."""
    for name, text in {
        "memory.max": limit,
        "memory.current": 2**27 + 2**20,
        "memory.stat": f"anon 5\ninactive_file {2**19}\nactive_file {2**19}",
    }.items():
        (tmp_path / name).write_text(f"{text}\n")
    places = [(str(folder), *names) for folder, (_, *names) in zip((tmp_path, "/x"), machine._CONTAINERS, strict=True)]
    monkeypatch.setattr(machine, "_CONTAINERS", places)
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert machine.host_memory_gib() == (room or (memory.total / 2**30, memory.available / 2**30))


def test_the_memory_of_children_counts():
    """What a child process holds is part of the resident memory, and no longer once it has ended."""
    take = "import sys; held = bytearray(64 << 20); print(flush=True); sys.stdin.read()"
    before = machine.resident_gib()
    child = subprocess.Popen([sys.executable, "-c", take], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    during = machine.resident_gib()
    child.communicate()
    assert during > before + 60 / 1024
    assert machine.resident_gib() < during - 60 / 1024


@pytest.mark.parametrize("has_lists", [True, False])
def test_own_processes_are_all_that_this_one_has_started(has_lists, monkeypatch):
    """By any of its threads, and what these have started in turn; also where the kernel has no lists of children."""
    if not has_lists:
        monkeypatch.setattr(machine.os.path, "exists", lambda path: False)
    started = []
    command = ["sh", "-c", "sleep 60 & echo; wait"]
    thread = threading.Thread(target=lambda: started.append(subprocess.Popen(command, stdout=subprocess.PIPE)))
    thread.start()
    thread.join()
    started[0].stdout.readline()
    try:
        family = psutil.Process().children(recursive=True)
        assert len(family) >= 2 and set(machine.own_processes()) == {psutil.Process(), *family}
    finally:
        for process in psutil.Process(started[0].pid).children():
            process.kill()
        started[0].wait()

"""The machine's memory, ports, sockets and device files, and the environment variables of a rank, without torch."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

import psutil

from dino_ds.errors import ConfigError

_CONTAINERS = (  # cgroup v2, v1: folder, files of limit and of memory in use, prefix of names in memory.stat
    ("/sys/fs/cgroup", "memory.max", "memory.current", ""),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
_LONGEST_TMPDIR = 60  # in bytes, which leaves room for a socket's name: the whole path may have 107
_random = random.SystemRandom()  # a fixed seed would give two jobs of a machine the same port


def host_memory_gib() -> tuple[float, float]:
    """(total, free) memory in GiB of the machine, or of the container where that has less."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    for folder, limit_file, used_file, prefix in _CONTAINERS:
        with suppress(OSError, ValueError):  # there is no limit: no such file, or "max"
            limit = int(Path(folder, limit_file).read_text())
            total, free = min(total, limit), min(free, limit)
            stat = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
            # the kernel frees cached file content when memory is needed
            cached = sum(int(stat.get(f"{prefix}{state}_file", 0)) for state in ("inactive", "active"))
            free = max(0, min(free, limit - int(Path(folder, used_file).read_text()) + cached))
    return total / 2**30, free / 2**30


def has_accelerator_files() -> bool:
    """Whether /dev has a file of a GPU or another accelerator: without such a file, torch need not be asked."""
    return any(next(Path("/dev").glob(name), None) for name in ("nvidia*", "kfd", "dri", "dxg", "accel*", "davinci*"))


def resident_gib() -> float:
    """Resident memory of this process and all its descendants in GiB; of descendants without shared pages."""
    process, *children = own_processes()
    resident = process.memory_info().rss
    for child in children:
        with suppress(psutil.Error):  # it has ended meanwhile
            resident += (memory := child.memory_info()).rss - getattr(memory, "shared", 0)
    return resident / 2**30


def own_processes() -> list[psutil.Process]:
    """This process and all its descendants by the kernel's lists: psutil would look at each process of the machine."""
    processes, pids = list[psutil.Process](), [os.getpid()]
    if not os.path.exists(f"/proc/{pids[0]}/task/{pids[0]}/children"):
        return [psutil.Process(), *psutil.Process().children(recursive=True)]
    for pid in pids:  # grows in the loop
        with suppress(psutil.Error, OSError):  # it has ended meanwhile
            processes.append(psutil.Process(pid))
            for thread in os.listdir(f"/proc/{pid}/task"):
                pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return processes


def find_free_port() -> int:
    """A port on which a process may listen, below the range that the system uses for outgoing connections."""
    while True:
        port = _random.randrange(20000, 32000)
        with socket.socket() as listener, suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
            return port


def shorten_socket_names() -> None:
    """Put this process's and its children's sockets into /tmp where TMPDIR is too long for them. Raises ConfigError."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" in config or len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_TMPDIR:
        return
    try:
        config["tempdir"] = folder = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
    except OSError as error:
        why = f"is too long for the sockets of other processes, and /tmp can't be written to ({error.strerror})"
        how = f"set a TMPDIR of at most {_LONGEST_TMPDIR} bytes, or --data.workers 0"
        raise ConfigError(f"TMPDIR {tempfile.gettempdir()} {why}: {how}") from None
    util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)


_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_RESOLVE_SECONDS = 20.0  # a cluster makes its first machine's name known while that machine starts


def check_ranks(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if a rank's variables are missing, wrong, or name unknown machines. One process needs none."""
    variables = {name: environment[name] for name in _NEEDED if environment.get(name)}
    if "RANK" not in variables:
        if variables.get("WORLD_SIZE", "1") != "1":
            raise _wrong(f"WORLD_SIZE is {variables['WORLD_SIZE']!r}, and RANK is not set")
        return
    if missing := [name for name in _NEEDED if name not in variables]:
        raise _wrong(f"RANK is {variables['RANK']!r} without {', '.join(missing)}")
    ranks = _number("WORLD_SIZE", variables, 1, 10**6)
    _number("RANK", variables, 0, ranks - 1, f" of WORLD_SIZE {ranks}: ranks count from 0")
    _number("LOCAL_RANK", variables, 0, ranks - 1)
    _number("MASTER_PORT", variables, 1, 65535)
    host, until = variables["MASTER_ADDR"], time.monotonic() + _RESOLVE_SECONDS
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= until:
                why = getattr(error, "strerror", None) or error
                unknown = f"is not a machine known to {socket.gethostname()} ({why})"
                how = "give the name or address of the machine of rank 0 (deepspeed and torchrun: --master_addr)"
                raise ConfigError(f"MASTER_ADDR {host!r} {unknown}: {how}") from None
        time.sleep(1.0)


def speaks_for_its_machine(environment: Mapping[str, str]) -> bool:
    """Whether this is the first rank of its machine, and other machines have ranks too."""
    here = environment.get("LOCAL_SIZE") or environment.get("LOCAL_WORLD_SIZE") or "1"
    sizes = environment.get("WORLD_SIZE", "1"), here
    several = all(map(str.isdecimal, sizes)) and int(sizes[0]) > int(sizes[1])
    return several and environment.get("LOCAL_RANK") == "0"


def _wrong(problem: str) -> ConfigError:
    how = f"start the ranks with deepspeed or torchrun, which set {', '.join(_NEEDED)}"
    return ConfigError(f"{problem}: {how}", said_by_me=True)  # the other ranks may not know of it


def _number(name: str, variables: Mapping[str, str], low: int, high: int, of: str = "") -> int:
    text = variables[name]
    if text.isdecimal() and len(text) < 10 and low <= int(text) <= high:
        return int(text)
    raise _wrong(f"{name} is {text!r}, and must be a whole number, {low} to {high}{of}")

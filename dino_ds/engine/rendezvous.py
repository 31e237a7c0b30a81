"""The rendezvous before a process group exists: which ranks are there, and through which interface they connect."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import psutil
import torch.distributed as dist

from dino_ds.engine import distributed
from dino_ds.errors import ConfigError

_PATIENCE_SECONDS = 25.0
"""Time after which a rank that waits for others says so."""
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables that name network interfaces."""


@contextmanager
def rendezvous(timeout: timedelta) -> Iterator[timedelta]:
    """Wrap joining a process group; yields the time that connecting the ranks may take, since all of them are there.

    On several machines gloo gets the interface that reaches the first one, unless the user has named one. Raises
    ConfigError if ranks disagree on the world size, machines can't connect, or another program uses rank 0's port.
    """
    mine, ranks = distributed.rank(), distributed.world_size()
    several = False
    try:
        if (ranks, mine) == (1, 0):
            yield timeout
            return
        # The server is shared with the process group's store: same port, same process.
        store = _store(mine, timeout)
        several = _call_roll(store, mine, ranks, timeout)
        yield timedelta(seconds=_PATIENCE_SECONDS + ranks / 4)
        del store
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            where = f"port {os.environ.get('MASTER_PORT')} of {socket.gethostname()}"
            raise ConfigError(f"{where} is in use: give another --master_port") from error
        if several:
            first_line = next(iter(str(error).splitlines()), "")
            raise ConfigError(
                f"rank {mine} does not get through to the ranks of other machines ({first_line[:160]}): name the "
                f"interface between them, {GLOO}=eth0 (and {NCCL} for GPUs)"
            ) from error
        raise


def _store(mine: int, timeout: timedelta) -> dist.Store:
    """The store of rank 0, or of torchrun's agent."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = mine == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    for seconds in (timedelta(seconds=_PATIENCE_SECONDS), timeout):
        try:
            return dist.TCPStore(
                address, port, None, is_master=serves, timeout=seconds, wait_for_workers=False, multi_tenant=True
            )
        except dist.DistNetworkError:
            if serves or seconds == timeout:
                raise
            _say(f"rank {mine} does not reach rank 0 at {address}, port {port}, for {seconds.seconds} s")
    raise AssertionError


def _call_roll(store: dist.Store, mine: int, ranks: int, timeout: timedelta) -> bool:
    """Wait until all ranks are there and choose gloo's interface; returns whether they are on several machines.

    Raises ConfigError if they disagree on the world size.
    """
    prefix = f"dino_ds/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    source, master = _route()
    store.set(f"{prefix}/{mine}", json.dumps([ranks, socket.gethostname(), master]))
    if mine == 0:
        answers = [json.loads(_take(store, f"{prefix}/{rank}")) for rank in _present(store, prefix, ranks, timeout)]
        seen = next((address for _, _, address in answers if not _is_loopback(address)), master)
        sizes: dict[int, int] = {}
        for rank, (size, _, _) in enumerate(answers):
            sizes.setdefault(size, rank)
        roll = json.dumps([sizes, len({host for _, host, _ in answers}) > 1, seen])
        for rank in range(ranks):
            store.set(f"{prefix}/roll/{rank}", roll)
    else:
        store.wait([f"{prefix}/roll/{mine}"], timeout)
    sizes, several, seen = json.loads(_take(store, f"{prefix}/roll/{mine}"))
    if len(sizes) > 1:
        text = " and ".join(f"WORLD_SIZE {size} by rank {rank}" for size, rank in sizes.items())
        raise ConfigError(f"ranks disagree on how many they are: {text}; give all of them the same WORLD_SIZE")
    if several and GLOO not in os.environ:
        _choose_interface(seen if _is_loopback(source) else source)
    return bool(several)


def _take(store: dist.Store, key: str) -> bytes:
    """A value that is no longer there for a later start, whose store torchrun's agent keeps."""
    value = store.get(key)
    store.delete_key(key)
    return value


def _present(store: dist.Store, prefix: str, ranks: int, timeout: timedelta) -> Iterator[int]:
    """Each rank as it comes, to the first that says another world size; names after a while those that don't come."""
    due, said = time.monotonic() + _PATIENCE_SECONDS, False
    for rank in range(ranks):
        key = f"{prefix}/{rank}"
        try:
            store.wait([key], timeout if said else timedelta(seconds=max(0.01, due - time.monotonic())))
        except dist.DistStoreError:
            if said:
                raise
            said, missing = True, [str(late) for late in range(rank, ranks) if not store.check([f"{prefix}/{late}"])]
            names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing[:8])}{' ...' if missing[8:] else ''}"
            _say(f"{names} of {ranks} did not come within {_PATIENCE_SECONDS:.0f} s: look at what they print")
            store.wait([key], timeout)
        differs = json.loads(store.get(key))[0] != ranks
        yield rank
        if differs:
            return


def _say(text: str) -> None:
    print(f"dino_ds: {socket.gethostname()}: {text}; waiting", file=sys.stderr, flush=True)


def _route() -> tuple[str, str]:
    """This machine's address towards the machine of rank 0, and that machine's address as it is known here."""
    (family, _, _, _, address), *_ = socket.getaddrinfo(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0]), str(address[0])
        except OSError:
            return str(address[0]), str(address[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _choose_interface(address: str) -> None:
    """Have gloo use the interface with this address. By itself it takes the one of the machine's name, which many
    machines resolve to 127.0.1.1."""
    for name, addresses in psutil.net_if_addrs().items():
        if not _is_loopback(address) and address in [entry.address.partition("%")[0] for entry in addresses]:
            os.environ[GLOO] = name
            return

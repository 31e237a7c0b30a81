"""The doctor's look at the network: interfaces, the machine's own name, libraries of collectives."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from dino_ds.tools.doctor_finding import Finding, fine, warning

_VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali")


def look_at_network() -> list[Finding]:
    return [*_libraries(), _interfaces(), *_own_name(), *_infiniband()]


def _libraries() -> Iterator[Finding]:
    gloo = "gloo" if dist.is_gloo_available() else "no gloo"
    nccl = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if dist.is_nccl_available() else "no NCCL"
    if torch.cuda.is_available() and not dist.is_nccl_available():
        yield warning("network", f"{gloo}, {nccl}", "several GPUs need NCCL: install a torch built with it")
    else:
        yield fine("network", f"{gloo}, {nccl}")
    chosen = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "GLOO_"))}
    if chosen:
        yield fine("network", ", ".join(f"{name}={value}" for name, value in chosen.items()))


def _interfaces() -> Finding:
    """Those that are up, with IPv4 address and speed."""
    states, shown, outside = psutil.net_if_stats(), list[str](), list[str]()
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        numbers = [address.address for address in addresses if address.family == socket.AF_INET]
        if not numbers or name not in states or not states[name].isup:
            continue
        speed = f", {states[name].speed / 1000:g} Gbit/s" if 0 < states[name].speed < 65535 else ""
        shown.append(f"{name} {numbers[0]}{speed}")
        if not ipaddress.ip_address(numbers[0]).is_loopback and not name.startswith(_VIRTUAL):
            outside.append(name)
    if len(outside) > 1:
        remedy = f"if ranks don't find each other: export NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME ({outside[0]}, ...)"
        return Finding("network", "ok", ", ".join(shown), remedy)
    return fine("network", ", ".join(shown) or "no interface is up")


def _own_name() -> Iterator[Finding]:
    """gloo listens at the address that the machine's name stands for."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        cure = f"add a line with {name} and this machine's address to /etc/hosts"
        yield warning("network", f"the machine's own name {name} has no address", cure)
        return
    if ipaddress.ip_address(address).is_loopback:
        cure = "alone that is fine; among several machines put its real address into /etc/hosts"
        yield warning("network", f"{name} is {address} to itself: others can't reach that", cure)
    else:
        yield fine("network", f"{name} is {address}")


def _infiniband() -> Iterator[Finding]:
    root = Path("/sys/class/infiniband")
    for port in sorted(root.glob("*/ports/*")):
        state, rate = ((port / name).read_text().strip() for name in ("state", "rate"))
        text = f"{port.parent.parent.name}:{port.name}: {state}, {rate}"
        if "ACTIVE" in state:
            yield fine("network", text)
        else:
            yield warning("network", text, "it is not active: look at its cable and the subnet manager")

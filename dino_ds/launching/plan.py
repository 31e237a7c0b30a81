"""Decides from the options of `dino-ds launch` who runs what where."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from dino_ds.basics.ports import find_free_port
from dino_ds.config.ds_config import CHECKOUT
from dino_ds.errors import ConfigError
from dino_ds.launching.hostfile import Host, check_host_name, choose_slots, read_hostfile
from dino_ds.options.machine import LaunchOptions

SCRIPT = CHECKOUT / "dino_ds" / "train.py"
_PORT = 29500
_DEEPSPEED_HOSTFILE = Path("/job/hostfile")
"""Taken by DeepSpeed's launcher if none is given."""


@dataclass(frozen=True)
class LaunchPlan:
    """The processes of one launch: who runs what where.

    hosts: the machines and their slots in rank order, from `hostfile`; without them `ranks` processes run on this
    machine, or with torchrun on each of `nodes` (least, most) machines. words: what follows `train` on the command
    line. devices: GPUs by number if CUDA_VISIBLE_DEVICES chooses among this machine's.
    """

    options: LaunchOptions
    words: tuple[str, ...]
    ranks: int
    master_port: int
    master_addr: str | None = None
    hosts: tuple[Host, ...] = ()
    hostfile: Path | None = None
    nodes: tuple[int, int] = (1, 1)
    devices: tuple[int, ...] = ()

    @property
    def uses_ssh(self) -> bool:
        return bool(self.hosts) and not self.options.no_ssh

    @property
    def elastic(self) -> bool:
        """Whether the number of machines may change while it runs; torchrun then restarts the ranks itself."""
        return self.nodes[0] < self.nodes[1]

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Numbers of ranks that the run may have: several for an elastic run."""
        if self.hosts:
            return (sum(len(host.slots) for host in self.hosts),)
        return tuple(self.ranks * nodes for nodes in range(self.nodes[0], self.nodes[1] + 1))


def build_plan(options: LaunchOptions, words: tuple[str, ...]) -> LaunchPlan:
    """The launch of `train` with `words`. Raises ConfigError for flags that contradict each other or the hostfile."""
    if options.master_port is not None and options.master_port > 65535:
        raise ConfigError(f"--master_port {options.master_port} is not a port: 1 to 65535")
    path = _hostfile(options)
    nodes = _parse_nodes(options.nodes)
    _check_combination(options, path, nodes)
    hosts = _choose_hosts(options, path) if path else ()
    ranks = options.ranks or max((len(host.slots) for host in hosts), default=0) or _gpus_or_one()
    alone = not hosts and nodes[1] == 1
    meeting = check_host_name(options.master_addr, "master_addr") if options.master_addr else None
    return LaunchPlan(
        options,
        words,
        ranks,
        master_port=options.master_port or (find_free_port() if alone else _PORT),
        master_addr=meeting or (hosts[0].name if options.no_ssh else None),
        hosts=hosts,
        hostfile=path,
        nodes=nodes,
        devices=_visible_devices(ranks) if alone and options.launcher == "deepspeed" else (),
    )


def _hostfile(options: LaunchOptions) -> Path | None:
    if options.hostfile is not None:
        return Path(options.hostfile)
    return _DEEPSPEED_HOSTFILE if options.launcher == "deepspeed" and _DEEPSPEED_HOSTFILE.is_file() else None


def _check_combination(options: LaunchOptions, hostfile: Path | None, nodes: tuple[int, int]) -> None:
    """Raise ConfigError for flags that don't belong to the launcher, or need others."""
    if (options.include or options.exclude) and hostfile is None:
        raise ConfigError("--include and --exclude choose among the slots of a hostfile: give --hostfile")
    if options.launcher == "torchrun":
        if hostfile or options.no_ssh or options.node_rank is not None:
            raise ConfigError(
                "torchrun starts the processes of one machine: leave out --hostfile, --no_ssh and --node_rank, and run "
                "the same command on every machine with --nodes N --master_addr HOST"
            )
        if nodes[1] > 1 and options.master_addr is None:
            raise ConfigError("--nodes: give --master_addr HOST, the machine where the others meet, the same on all")
        if nodes[0] < nodes[1] and options.max_restarts == 0:
            raise ConfigError(
                f"--nodes {options.nodes}: without --max_restarts the first machine that is lost would end the run: "
                "add --max_restarts 100"
            )
    elif options.nodes is not None:
        raise ConfigError("--nodes is for --launcher torchrun; for deepspeed a --hostfile names the machines")
    elif options.no_ssh and (hostfile is None or options.node_rank is None):
        raise ConfigError(
            "--no_ssh: give --hostfile, the same on every machine, and --node_rank N, this machine's line in it from 0"
        )
    elif options.node_rank is not None and not options.no_ssh:
        raise ConfigError("--node_rank is for --no_ssh; over ssh one command starts all machines")
    elif options.master_addr is not None and hostfile is None:
        raise ConfigError("--master_addr is for several machines: give --hostfile, or --launcher torchrun --nodes N")


def _parse_nodes(text: str | None) -> tuple[int, int]:
    """Least and most machines from "4" or, for a number that may change, "1:4"."""
    if text is None:
        return 1, 1
    found = re.fullmatch(r"([1-9][0-9]{0,4})(?::([1-9][0-9]{0,4}))?", text, re.ASCII)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not found or least > most:
        raise ConfigError(f"--nodes {text!r} is neither a number of machines nor LEAST:MOST, such as 4 or 1:4")
    return least, most


def _choose_hosts(options: LaunchOptions, path: Path) -> tuple[Host, ...]:
    """The machines of the hostfile with the wanted slots."""
    hosts = choose_slots(read_hostfile(path), options.include, options.exclude)
    if options.node_rank is not None and options.node_rank >= len(hosts):
        raise ConfigError(f"--node_rank {options.node_rank}: the hostfile has machines 0 to {len(hosts) - 1}")
    if options.ranks is None:
        return hosts
    if options.include or options.exclude:
        raise ConfigError("--ranks takes the first slots of each machine, --include and --exclude name them: give one")
    fewest = min(len(host.slots) for host in hosts)
    if options.ranks > fewest:
        raise ConfigError(f"--ranks {options.ranks}: a machine of {path} has {fewest} slots")
    return tuple(Host(host.name, host.slots[: options.ranks]) for host in hosts)


def _gpus_or_one() -> int:
    """Number of GPUs of this machine, or one if there are none: a process for each."""
    import torch

    return torch.cuda.device_count() or 1


def _visible_devices(ranks: int) -> tuple[int, ...]:
    """The first `ranks` of CUDA_VISIBLE_DEVICES, or () if it is not set. Raises ConfigError if they are too few."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if not text:
        return ()
    names = [name.strip() for name in text.split(",")]
    if not all(name.isdigit() for name in names):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={text} names GPUs otherwise than by number, which DeepSpeed's launcher can't read: "
            "add --launcher torchrun"
        )
    if len(names) < ranks:
        raise ConfigError(f"--ranks {ranks}: CUDA_VISIBLE_DEVICES={text} shows {len(names)} GPUs")
    return tuple(int(name) for name in names[:ranks])

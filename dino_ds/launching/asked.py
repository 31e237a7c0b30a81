"""What the flags of `dino-ds launch` ask for, and the launch that follows from them."""

from __future__ import annotations

import re
from pathlib import Path

from dino_ds.config.ds_config import CHECKOUT
from dino_ds.errors import ConfigError
from dino_ds.launching.command import LaunchPlan, visible_devices
from dino_ds.launching.hostfile import Host, check_host_name, choose_slots, read_hostfile
from dino_ds.names import did_you_mean
from dino_ds.options.machine import LaunchOptions
from dino_ds.ports import find_free_port

LAUNCHERS = ("deepspeed", "torchrun")
_PORT = 29500
_DEEPSPEED_HOSTFILE = Path("/job/hostfile")
"""Taken by DeepSpeed's launcher where none is given."""


def build_plan(asked: LaunchOptions, words: tuple[str, ...]) -> LaunchPlan:
    """The launch of `train` with `words`. Raises ConfigError for flags that contradict each other or the hostfile."""
    if asked.launcher not in LAUNCHERS:
        near = did_you_mean(asked.launcher, LAUNCHERS)
        raise ConfigError(f"--launcher {asked.launcher} is neither {' nor '.join(LAUNCHERS)}.{near}")
    if asked.master_port is not None and asked.master_port > 65535:
        raise ConfigError(f"--master_port {asked.master_port} is no port: 1 to 65535")
    path = _hostfile(asked)
    nodes = _parse_nodes(asked.nodes)
    _check_together(asked, path, nodes)
    hosts = _choose_hosts(asked, path) if path else ()
    ranks = asked.ranks or max((len(host.slots) for host in hosts), default=0) or _places()
    alone = not hosts and nodes[1] == 1
    meeting = check_host_name(asked.master_addr, "master_addr") if asked.master_addr else None
    return LaunchPlan(
        script=CHECKOUT / "dino_ds" / "train.py",
        words=words,
        launcher=asked.launcher,
        ranks=ranks,
        master_port=asked.master_port or (find_free_port() if alone else _PORT),
        master_addr=meeting or (hosts[0].name if asked.no_ssh else None),
        hosts=hosts,
        hostfile=path,
        include=asked.include,
        exclude=asked.exclude,
        limited=bool(hosts) and asked.ranks is not None,
        no_ssh=asked.no_ssh,
        node_rank=asked.node_rank,
        nodes=nodes,
        devices=visible_devices(ranks) if alone and asked.launcher == "deepspeed" else (),
        max_restarts=asked.max_restarts,
    )


def _hostfile(asked: LaunchOptions) -> Path | None:
    if asked.hostfile is not None:
        return Path(asked.hostfile)
    return _DEEPSPEED_HOSTFILE if asked.launcher == "deepspeed" and _DEEPSPEED_HOSTFILE.is_file() else None


def _check_together(asked: LaunchOptions, hostfile: Path | None, nodes: tuple[int, int]) -> None:
    """Raises ConfigError for flags that don't belong to the launcher, or want others beside them."""
    if (asked.include or asked.exclude) and hostfile is None:
        raise ConfigError("--include and --exclude choose among the slots of a hostfile: give --hostfile")
    if asked.launcher == "torchrun":
        if hostfile or asked.no_ssh or asked.node_rank is not None:
            raise ConfigError(
                "torchrun starts the processes of one machine: leave out --hostfile, --no_ssh and --node_rank, and run "
                "the same command on every machine with --nodes N --master_addr HOST"
            )
        if nodes[1] > 1 and asked.master_addr is None:
            raise ConfigError("--nodes: give --master_addr HOST, the machine where the others meet, the same on all")
    elif asked.nodes is not None:
        raise ConfigError("--nodes is for --launcher torchrun; for deepspeed a --hostfile names the machines")
    elif asked.no_ssh and (hostfile is None or asked.node_rank is None):
        raise ConfigError(
            "--no_ssh: give --hostfile, the same on every machine, and --node_rank N, this machine's line in it from 0"
        )
    elif asked.node_rank is not None and not asked.no_ssh:
        raise ConfigError("--node_rank is for --no_ssh; over ssh one command starts all machines")
    elif asked.master_addr is not None and hostfile is None:
        raise ConfigError("--master_addr is for several machines: give --hostfile, or --launcher torchrun --nodes N")


def _parse_nodes(text: str | None) -> tuple[int, int]:
    """ "4" or, for a number that may change, "1:4"."""
    if text is None:
        return 1, 1
    found = re.fullmatch(r"([1-9][0-9]{0,4})(?::([1-9][0-9]{0,4}))?", text, re.ASCII)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not found or least > most:
        raise ConfigError(f"--nodes {text!r} is neither a number of machines nor LEAST:MOST, such as 4 or 1:4")
    return least, most


def _choose_hosts(asked: LaunchOptions, path: Path) -> tuple[Host, ...]:
    """The machines of the hostfile with the slots that are asked for."""
    hosts = choose_slots(read_hostfile(path), asked.include, asked.exclude)
    if asked.node_rank is not None and asked.node_rank >= len(hosts):
        raise ConfigError(f"--node_rank {asked.node_rank}: the hostfile has machines 0 to {len(hosts) - 1}")
    if asked.ranks is None:
        return hosts
    if asked.include or asked.exclude:
        raise ConfigError("--ranks takes the first slots of each machine, --include and --exclude name them: give one")
    fewest = min(len(host.slots) for host in hosts)
    if asked.ranks > fewest:
        raise ConfigError(f"--ranks {asked.ranks}: a machine of {path} has {fewest} slots")
    return tuple(Host(host.name, host.slots[: asked.ranks]) for host in hosts)


def _places() -> int:
    """A process for each GPU of this machine; one without GPUs."""
    import torch

    return torch.cuda.device_count() or 1

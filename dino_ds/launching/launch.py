"""`dino-ds launch`: check the machines, show the command of DeepSpeed's launcher or of torchrun, run it to its end."""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dino_ds.config import RECIPES
from dino_ds.ds_config import resolve_ds_config
from dino_ds.errors import ConfigError
from dino_ds.launching.checks import CHECKOUT, Reply, check_machines
from dino_ds.launching.command import LaunchPlan, build_command, check_forwarded, shown, visible_devices
from dino_ds.launching.hostfile import check_host_name, choose_slots, read_hostfile
from dino_ds.launching.probe import find_free_port
from dino_ds.launching.supervise import supervise
from dino_ds.measure.tables import markdown_table
from dino_ds.names import did_you_mean

LAUNCHERS = ("deepspeed", "torchrun")
_PORT = 29500
_DEEPSPEED_HOSTFILE = Path("/job/hostfile")
"""Taken by DeepSpeed's launcher where none is given."""


def run(
    *,
    hostfile: str | None,
    include: str | None,
    exclude: str | None,
    ranks: int | None,
    launcher: str,
    nodes: str | None,
    no_ssh: bool,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    max_restarts: int,
    skip_checks: bool,
    dry_run: bool,
    train_words: tuple[str, ...],
    train: Mapping[str, Any],
) -> None:
    """Ends the process with the code of the training (errors.py). Raises ConfigError before anything has started.

    train: what the words after "--" mean: `train`'s options, recipe, ds, ds_path and config.
    """
    plan = build_plan(
        train_words,
        hostfile=hostfile,
        include=include,
        exclude=exclude,
        ranks=ranks,
        launcher=launcher,
        nodes=nodes,
        no_ssh=no_ssh,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        max_restarts=max_restarts,
    )
    _check_batches(plan, train)
    check_forwarded(plan, os.environ, Path.cwd())
    command = build_command(plan)
    if not skip_checks:
        _check(plan, train)
    print(f"command  {shown(command)}", flush=True)
    if dry_run:
        return
    if plan.elastic:
        os.execvp(command[0], command)
    sys.exit(supervise(command, Path(train["run_dir"]), plan.max_restarts))


def build_plan(
    words: tuple[str, ...],
    *,
    hostfile: str | None,
    include: str | None,
    exclude: str | None,
    ranks: int | None,
    launcher: str,
    nodes: str | None,
    no_ssh: bool,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    max_restarts: int,
) -> LaunchPlan:
    """The launch that flags ask for. Raises ConfigError for flags that contradict each other or the hostfile."""
    if launcher not in LAUNCHERS:
        near = did_you_mean(launcher, LAUNCHERS)
        raise ConfigError(f"--launcher {launcher} is neither {' nor '.join(LAUNCHERS)}.{near}")
    path = _hostfile(hostfile, launcher, ranks)
    if (include or exclude) and path is None:
        raise ConfigError("--include and --exclude choose among the slots of a hostfile: give --hostfile")
    _check_together(launcher, path, nodes, no_ssh, node_rank, master_addr)
    hosts = choose_slots(read_hostfile(path), include, exclude) if path else ()
    if node_rank is not None and node_rank >= len(hosts):
        raise ConfigError(f"--node_rank {node_rank}: the hostfile has machines 0 to {len(hosts) - 1}")
    limited = bool(hosts) and ranks is not None
    if limited and (include or exclude):
        raise ConfigError("--ranks takes the first slots of each machine, --include and --exclude name them: give one")
    slots = min((len(host.slots) for host in hosts), default=None)
    if limited and slots is not None and ranks is not None and ranks > slots:
        raise ConfigError(f"--ranks {ranks}: a machine of {path} has {slots} slots")
    if master_port is not None and master_port > 65535:
        raise ConfigError(f"--master_port {master_port} is no port: 1 to 65535")
    ranks = ranks or max((len(host.slots) for host in hosts), default=0) or _places()
    least, most = _parse_nodes(nodes)
    alone = not hosts and most == 1
    return LaunchPlan(
        script=CHECKOUT / "dino_ds" / "train.py",
        words=words,
        launcher=launcher,
        ranks=ranks,
        master_port=master_port or (find_free_port() if alone else _PORT),
        master_addr=check_host_name(master_addr, "master_addr") if master_addr else hosts[0].name if no_ssh else None,
        hosts=hosts,
        hostfile=path,
        include=include,
        exclude=exclude,
        limited=limited,
        no_ssh=no_ssh,
        node_rank=node_rank,
        nodes=(least, most),
        devices=visible_devices(ranks) if alone and launcher == "deepspeed" else (),
        max_restarts=max_restarts,
    )


def _hostfile(given: str | None, launcher: str, ranks: int | None) -> Path | None:
    if given is not None:
        return Path(given)
    return _DEEPSPEED_HOSTFILE if launcher == "deepspeed" and _DEEPSPEED_HOSTFILE.is_file() else None


def _check_together(
    launcher: str,
    hostfile: Path | None,
    nodes: str | None,
    no_ssh: bool,
    node_rank: int | None,
    master_addr: str | None,
) -> None:
    """Raises ConfigError for flags that don't belong to the launcher."""
    if launcher == "torchrun":
        if hostfile or no_ssh or node_rank is not None:
            raise ConfigError(
                "torchrun starts the processes of one machine: leave out --hostfile, --no_ssh and --node_rank, and run "
                "the same command on every machine with --nodes N --master_addr HOST"
            )
        if _parse_nodes(nodes)[1] > 1 and master_addr is None:
            raise ConfigError("--nodes: give --master_addr HOST, the machine where the others meet, the same on all")
    elif nodes is not None:
        raise ConfigError("--nodes is for --launcher torchrun; for deepspeed a --hostfile names the machines")
    elif no_ssh and (hostfile is None or node_rank is None):
        raise ConfigError(
            "--no_ssh: give --hostfile, the same on every machine, and --node_rank N, this machine's line in it from 0"
        )
    elif node_rank is not None and not no_ssh:
        raise ConfigError("--node_rank is for --no_ssh; over ssh one command starts all machines")
    elif master_addr is not None and hostfile is None:
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


def _places() -> int:
    """A process for each GPU of this machine; one without GPUs."""
    import torch

    return torch.cuda.device_count() or 1


def _check_batches(plan: LaunchPlan, train: Mapping[str, Any]) -> None:
    """Raises ConfigError if the global batch can't be shared out over the ranks, over any number an elastic run has."""
    for world_size in plan.world_sizes:
        try:
            resolve_ds_config(
                copy.deepcopy(train["ds"]), train["ds_path"], train["recipe"].data.global_batch, world_size
            )
        except ConfigError as error:
            if len(plan.world_sizes) == 1:
                raise
            machines = world_size // plan.ranks
            raise ConfigError(
                f"{error}; --nodes {plan.nodes[0]}:{plan.nodes[1]} x --ranks {plan.ranks} may train on {machines} "
                "machines: narrow --nodes, or take a batch that every number divides"
            ) from None


def _check(plan: LaunchPlan, train: Mapping[str, Any]) -> None:
    """Look at all machines and show them. Raises ConfigError with all that stops the training."""
    config = train["config"]
    own = [config] if config and not (RECIPES / f"{config}.yaml").is_file() else []
    files = tuple(os.path.abspath(path) for path in (train["ds_path"], *own))
    data = train["recipe"].data
    images = data.root if data.root and not data.download else None
    replies, problems = check_machines(plan, files, images, Path(train["run_dir"]))
    if any(reply.answer for reply in replies):
        print(_page(replies), flush=True)
    for problem in problems:
        if not problem.stops:
            print(f"warning  {problem.text}", flush=True)
    stopping = [problem.text for problem in problems if problem.stops]
    if stopping:
        raise ConfigError("\n".join(stopping))


def _page(replies: list[Reply]) -> str:
    rows = []
    for reply in replies:
        there = reply.answer
        gpus = [f"{gpu['name']} {gpu['memory_gib']:.0f} GiB" for gpu in there.gpus] if there else []
        kinds = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
        rows.append(
            (
                reply.host.name,
                str(len(reply.host.slots)),
                ", ".join(kinds) or ("none" if there else "?"),
                f"{there.memory_gib:.0f} GiB" if there else "?",
                f"torch {there.versions['torch']}" if there else "no answer",
            )
        )
    return markdown_table(("machine", "ranks", "GPUs", "memory", "software"), rows)

"""Decides from the options of `dino-ds launch` which processes run where, and builds the launcher's command.

DeepSpeed's launcher runs `pdsh`, which joins its words with spaces for a remote shell. Each word is quoted here so that
it arrives unchanged, or refused with the character that can't be forwarded.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dino_ds.basics.ports import find_free_port
from dino_ds.basics.text_file import read_text
from dino_ds.config.ds_config import CHECKOUT
from dino_ds.errors import ConfigError
from dino_ds.options.commands import LaunchOptions

SCRIPT = CHECKOUT / "dino_ds" / "train.py"
_PORT = 29500
_DEEPSPEED_HOSTFILE = Path("/job/hostfile")
"""The hostfile that DeepSpeed's launcher reads if none is given."""
MAX_SLOTS = 1024
_FORM = (
    f"a name of letters, digits, '.', '-' and '_', and 1 to {MAX_SLOTS} slots without spaces, as in node1 slots=8; "
    "users, ports and IPv6 addresses belong into ~/.ssh/config"
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_LINE = re.compile(rf"(?P<name>{_NAME.pattern})[ \t]+slots=(?P<slots>[0-9]{{1,4}})[ \t]*(#.*)?", re.ASCII)


@dataclass(frozen=True)
class Host:
    """One machine and its number of processes, one a GPU on machines with GPUs."""

    name: str
    slots: int


@dataclass(frozen=True)
class LaunchPlan:
    """The processes of one launch and their machines.

    hosts: the machines in rank order, from `hostfile`; without them all processes run on this machine. devices: GPUs by
    number if CUDA_VISIBLE_DEVICES chooses among this machine's.
    """

    ranks: int
    master_port: int
    hosts: tuple[Host, ...] = ()
    hostfile: Path | None = None
    master_addr: str | None = None
    devices: tuple[int, ...] = ()


def build_plan(options: LaunchOptions) -> LaunchPlan:
    """The processes that the options ask for. Raises ConfigError for options that contradict each other."""
    address, port = options.master_addr, options.master_port
    if port is not None and port > 65535:
        raise ConfigError(f"--master_port {port} is not a port: 1 to 65535")
    path = Path(options.hostfile) if options.hostfile is not None else None
    if path is None and _DEEPSPEED_HOSTFILE.is_file():
        path = _DEEPSPEED_HOSTFILE
    if path is None:
        if address is not None:
            raise ConfigError("--master_addr is for several machines: give --hostfile")
        ranks = options.ranks or _gpus_or_one()
        return LaunchPlan(ranks, port or find_free_port(), devices=_visible_devices(ranks))
    if options.ranks is not None:
        raise ConfigError(f"--ranks {options.ranks}: the hostfile {path} says how many: NAME slots=N")
    hosts = read_hostfile(path)
    if address is not None and not _NAME.fullmatch(address):
        raise ConfigError(f"--master_addr {_shown(address)} is not a machine's name or address")
    return LaunchPlan(sum(host.slots for host in hosts), port or _PORT, hosts, path, address)


def _gpus_or_one() -> int:
    """The number of processes: one per GPU of this machine, or one without GPUs."""
    import torch

    return torch.cuda.device_count() or 1


def _visible_devices(ranks: int) -> tuple[int, ...]:
    """The first `ranks` of CUDA_VISIBLE_DEVICES, or () if it is not set. Raises ConfigError if they are too few."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    names = [name.strip() for name in text.split(",")]
    if text and not all(name.isdigit() for name in names):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={text} names GPUs otherwise than by number, which DeepSpeed's launcher can't read: "
            f"torchrun --nproc_per_node {ranks} dino_ds/train.py ... starts the ranks"
        )
    if text and len(names) < ranks:
        raise ConfigError(f"--ranks {ranks}: CUDA_VISIBLE_DEVICES={text} shows {len(names)} GPUs")
    return tuple(int(name) for name in names[:ranks]) if text else ()


def build_command(plan: LaunchPlan, words: Sequence[str]) -> list[str]:
    """The command of DeepSpeed's launcher that runs `train` with `words`, to run without a shell.

    Raises ConfigError for words and paths that can't be forwarded to other machines.
    """
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--quiet", f"--master_port={plan.master_port}"]
    if plan.hosts:
        _check_paths()
        command += [f"--hostfile={plan.hostfile}"]
        command += [f"--master_addr={plan.master_addr}"] if plan.master_addr else []
        command += ["--force_multi"]  # else DeepSpeed takes a single machine of the hostfile for this one
        words = [quote_for_pdsh(word) for word in words]
    elif plan.devices:
        # With --num_gpus the launcher would take the first GPUs and drop CUDA_VISIBLE_DEVICES.
        command += ["--include=localhost:" + ",".join(map(str, plan.devices))]
    else:
        command += [f"--num_gpus={plan.ranks}"]
    return [*command, str(SCRIPT), *words]


def quote_for_pdsh(word: str) -> str:
    """Quote `word` so that it arrives unchanged through DeepSpeed's launcher, pdsh and the remote shell.

    The launcher puts a word with a space into double quotes and escapes quotes in it; pdsh replaces %h, %n and %u.
    """
    for character in word:
        if not character.isprintable():
            raise ConfigError(f"refusing to forward {word!r} to other machines: it contains {character!r}")
    word = word.replace("%", "%%")
    if " " in word:
        return re.sub(r"([\\$`])", r"\\\1", word)
    return shlex.quote(word)


def _check_paths() -> None:
    """Raise ConfigError for paths that remote shells would change."""
    for name, path in (("the working folder", os.getcwd()), ("Python's path", sys.executable), ("the script", SCRIPT)):
        if acting := re.sub(r"[A-Za-z0-9@%+=:,./_-]", "", str(path)):
            raise ConfigError(
                f"{name} {str(path)[:80]!r} contains {acting[0]!r}, which the shells of other machines would act on"
            )


def read_hostfile(path: Path | str) -> tuple[Host, ...]:
    """The machines in the order of the file. Raises ConfigError that names the line.

    Stricter than DeepSpeed, which passes any text of the file to ssh and to remote shells: a host named
    "-oProxyCommand=..." runs a command on the launching machine.
    """
    text = read_text(str(path), "a hostfile, one line a machine")
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        entry = _LINE.fullmatch(line)
        if entry is None or not 1 <= int(entry["slots"]) <= MAX_SLOTS:
            raise ConfigError(f'hostfile {path}:{number}: {_shown(line)} is not "name slots=N": {_FORM}')
        name = entry["name"]
        if name in hosts:
            raise ConfigError(f"hostfile {path}:{number}: {name} is named twice: write one line a machine")
        hosts[name] = Host(name, int(entry["slots"]))
    if not hosts:
        raise ConfigError(f'hostfile {path} names no machine: write a line "name slots=N" for each')
    return tuple(hosts.values())


def _shown(text: str, most: int = 80) -> str:
    return repr(text if len(text) <= most else f"{text[:most]}...")

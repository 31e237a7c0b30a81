"""The machines that a run may use, one a line of a hostfile.

Stricter than DeepSpeed, which hands on to ssh and to remote shells whatever stands there: a host named
"-oProxyCommand=..." runs a command on the launching machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dino_ds.basics.text_file import read_text
from dino_ds.errors import ConfigError

MAX_SLOTS = 1024
_FORM = (
    f"a name of letters, digits, '.', '-' and '_', and 1 to {MAX_SLOTS} slots without spaces, as in node1 slots=8; "
    "users, ports and IPv6 addresses belong into ~/.ssh/config"
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_LINE = re.compile(rf"(?P<name>{_NAME.pattern})[ \t]+slots=(?P<slots>[0-9]{{1,4}})[ \t]*(#.*)?", re.ASCII)


@dataclass(frozen=True)
class Host:
    """One machine and the slots on it, a process each: on machines with GPUs the numbers of the GPUs."""

    name: str
    slots: tuple[int, ...]


def read_hostfile(path: Path | str) -> tuple[Host, ...]:
    """The machines in the order of the file. Raises ConfigError that names the line."""
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
        hosts[name] = Host(name, tuple(range(int(entry["slots"]))))
    if not hosts:
        raise ConfigError(f'hostfile {path} names no machine: write a line "name slots=N" for each')
    return tuple(hosts.values())


def check_host_name(name: str, flag: str) -> None:
    """Raises ConfigError, naming the flag, for what can't be a machine's name or address."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--{flag} {_shown(name)} is not a machine's name or address")


def _shown(text: str, most: int = 80) -> str:
    return repr(text if len(text) <= most else f"{text[:most]}...")

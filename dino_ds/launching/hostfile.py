"""The machines that a run may use: the hostfile, and a choice among its slots.

Stricter than DeepSpeed, which hands on to ssh and to remote shells whatever stands there: a host named
"-oProxyCommand=..." runs a command on the launching machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dino_ds.basics.names import did_you_mean
from dino_ds.basics.text_file import read_text
from dino_ds.errors import ConfigError

MAX_SLOTS = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}")
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
        found = _LINE.fullmatch(line)
        if found is None or not 1 <= int(found["slots"]) <= MAX_SLOTS:
            raise ConfigError(
                f'hostfile {path}:{number}: {_shown(line)} is not "name slots=N", N 1 to {MAX_SLOTS}; '
                "a user's name goes into ~/.ssh/config"
            )
        name = found["name"]
        if name in hosts:
            raise ConfigError(f"hostfile {path}:{number}: {name} is named twice: write one line a machine")
        hosts[name] = Host(name, tuple(range(int(found["slots"]))))
    if not hosts:
        raise ConfigError(f'hostfile {path} names no machine: write a line "name slots=N" for each')
    return tuple(hosts.values())


def _shown(text: str, most: int = 80) -> str:
    return repr(text if len(text) <= most else f"{text[:most]}...")


def check_host_name(name: str, flag: str) -> str:
    """`name` if it can be a machine's name or address; raises ConfigError naming the flag."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--{flag} {_shown(name)} is not a machine's name or address")
    return name


def choose_slots(hosts: tuple[Host, ...], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """The hosts that DeepSpeed's --include or --exclude leave: "host" or "host:0,2", several joined by "@".

    Raises ConfigError for both at once, for names and slots that are not in the hostfile, and if nothing is left.
    """
    if include and exclude:
        raise ConfigError("--include and --exclude are given together: give one of them")
    if not include and not exclude:
        return hosts
    flag, text = ("include", include) if include else ("exclude", exclude)
    chosen = _parse_choice(hosts, flag, str(text))
    left = []
    for host in hosts:
        mine = chosen.get(host.name, ())
        slots = mine if include else tuple(slot for slot in host.slots if slot not in mine)
        if slots:
            left.append(Host(host.name, slots))
    if not left:
        raise ConfigError(f"--{flag} {text} leaves no slot of the hostfile")
    return tuple(left)


def _parse_choice(hosts: tuple[Host, ...], flag: str, text: str) -> dict[str, tuple[int, ...]]:
    there = {host.name: host.slots for host in hosts}
    chosen: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.partition(":")
        if name not in there:
            near = did_you_mean(name, there)
            raise ConfigError(f"--{flag} {_shown(part)}: {_shown(name)} is not in the hostfile.{near}")
        if name in chosen:
            raise ConfigError(f"--{flag}: {name} is named twice: write its slots together, {name}:0,1")
        words = numbers.split(",") if colon else [str(slot) for slot in there[name]]
        if wrong := [word for word in words if word not in map(str, there[name])]:
            last = len(there[name]) - 1
            raise ConfigError(f"--{flag} {_shown(part)}: {name} has slots 0 to {last}, not {_shown(wrong[0])}")
        chosen[name] = tuple(sorted({int(word) for word in words}))
    return chosen

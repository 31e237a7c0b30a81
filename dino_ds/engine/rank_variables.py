"""Checks the variables that a launcher gives a rank, before torch and DeepSpeed wait half an hour for wrong ones."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from dino_ds.errors import ConfigError

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_MOST_RANKS, _LAST_PORT = 10**6, 65535
_RESOLVE_SECONDS = 20.0
"""Time to wait for a name that a cluster makes known while its first machine starts."""


def check_ranks(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if the variables of a rank are missing, out of range, or name a machine that is not known.

    Without RANK there is one process, which needs none of them.
    """
    variables = {name: environment[name] for name in _NEEDED if environment.get(name)}
    if "RANK" not in variables:
        if variables.get("WORLD_SIZE", "1") != "1":
            raise _wrong(f"WORLD_SIZE is {variables['WORLD_SIZE']!r}, and RANK is not set")
        return
    if missing := [name for name in _NEEDED if name not in variables]:
        raise _wrong(f"RANK is {variables['RANK']!r} without {', '.join(missing)}")
    ranks = _number("WORLD_SIZE", variables, 1, _MOST_RANKS)
    _number("RANK", variables, 0, ranks - 1, f" of WORLD_SIZE {ranks}: ranks count from 0")
    _number("LOCAL_RANK", variables, 0, ranks - 1)
    _number("MASTER_PORT", variables, 1, _LAST_PORT)
    _resolve(variables["MASTER_ADDR"])


def speaks_for_its_machine(environment: Mapping[str, str]) -> bool:
    """Whether this is the first rank of its machine, and there are ranks on others."""
    here = environment.get("LOCAL_SIZE") or environment.get("LOCAL_WORLD_SIZE") or "1"
    sizes = environment.get("WORLD_SIZE", "1"), here
    several = all(map(str.isdecimal, sizes)) and int(sizes[0]) > int(sizes[1])
    return several and environment.get("LOCAL_RANK") == "0"


def _wrong(problem: str) -> ConfigError:
    return ConfigError(
        f"{problem}: start the ranks with deepspeed or torchrun, which set {', '.join(_NEEDED)}",
        said_by_me=True,  # the other ranks may not know of it
    )


def _number(name: str, variables: Mapping[str, str], low: int, high: int, of: str = "") -> int:
    text = variables[name]
    if text.isdecimal() and len(text) < 10 and low <= int(text) <= high:
        return int(text)
    raise _wrong(f"{name} is {text!r}, and must be a whole number, {low} to {high}{of}")


def _resolve(host: str) -> None:
    until = time.monotonic() + _RESOLVE_SECONDS
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= until:
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(
                    f"MASTER_ADDR {host!r} is not a machine known to {socket.gethostname()} ({reason}): give the name "
                    "or address of the machine of rank 0 (deepspeed and torchrun: --master_addr)"
                ) from None
        time.sleep(1.0)

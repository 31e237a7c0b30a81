"""Finds free TCP ports of this machine, and keeps the paths of sockets between processes short."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import socket
import tempfile
from multiprocessing import util

from dino_ds.errors import ConfigError

_LONGEST_TMPDIR = 60
"""Longest TMPDIR, in bytes, that leaves room for a socket's name: the whole path may have 107."""
_random = random.SystemRandom()  # a fixed seed would give two jobs of a machine the same port


def port_is_free(port: int) -> bool:
    """Whether a process of this machine may listen on the port, on all its addresses."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True


def find_free_port() -> int:
    """A free port, below the range that the system uses for outgoing connections."""
    while True:
        port = _random.randrange(20000, 32000)
        if port_is_free(port):
            return port


def shorten_socket_names() -> None:
    """Let this process and its children put their sockets into /tmp where TMPDIR is too long for a socket's name.

    Raises ConfigError where /tmp can't be written to.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" in config or len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_TMPDIR:
        return
    try:
        config["tempdir"] = folder = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
    except OSError as error:
        raise ConfigError(
            f"TMPDIR {tempfile.gettempdir()} is too long for the sockets of other processes, and /tmp can't be written "
            f"to ({error.strerror}): set a TMPDIR of at most {_LONGEST_TMPDIR} bytes, or --data.workers 0"
        ) from None
    util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)

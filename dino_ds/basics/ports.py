"""Finds free TCP ports of this machine."""

from __future__ import annotations

import random
import socket

_random = random.SystemRandom()  # a seed must not make two jobs of a machine choose alike


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

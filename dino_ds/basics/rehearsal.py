"""A rehearsal of the training step: real code on tensors without memory, on one rank, as if on another device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_devices: list[str] = []
_making_once: list[None] = []


def rehearsing() -> bool:
    """Whether this process rehearses a step: it is then the only rank, and reads no weights."""
    return bool(_devices)


def device_kind(of: str) -> str:
    """The device type whose tile sizes apply to tensors on `of`: the rehearsed one, else `of`."""
    return _devices[-1] if _devices else of


@contextmanager
def rehearsal(device: str) -> Iterator[None]:
    """A context whose code is a rehearsal for this type of device, "cpu" or "cuda"."""
    _devices.append(device)
    try:
        yield
    finally:
        _devices.pop()


@contextmanager
def making_once() -> Iterator[None]:
    """A context for work that only the first step does, as later steps reuse its results."""
    _making_once.append(None)
    try:
        yield
    finally:
        _making_once.pop()


def is_made_once() -> bool:
    """Whether the code runs inside `making_once`: the cost of a step does not include it."""
    return bool(_making_once)

"""A rehearsal of the training step: real code on tensors without memory, on one rank, as if on another device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_devices: list[str] = []
_observers: list[Callable[[str, int], None]] = []
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
def tell_of_collectives(observer: Callable[[str, int], None]) -> Iterator[None]:
    """Call `observer(operation, bytes of this rank)` for each collective that the rehearsed step would call."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


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


def note_collective(operation: str, size: int) -> None:
    """Tell observers of a collective that a real step would call here, with `size` bytes."""
    for observer in _observers:
        observer(operation, size)

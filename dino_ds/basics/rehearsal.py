"""A rehearsal of the training step: real code on tensors without memory, on one rank, as if on another device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

_devices: list[str] = []
_observers: list[Callable[[str, int], None]] = []
KernelListener = Callable[[int, float], AbstractContextManager[Any]]
_kernel_listeners: list[KernelListener] = []


def rehearsing() -> bool:
    """Whether this process rehearses a step: it is then a rank alone, and reads no weights."""
    return bool(_devices)


def device_kind(of: str) -> str:
    """The type of device whose sizes of tiles count for tensors on `of`: the rehearsed one, or theirs."""
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


def note_collective(operation: str, size: int) -> None:
    """A collective would be called here, with so many bytes."""
    for observer in _observers:
        observer(operation, size)


@contextmanager
def listen_to_kernels(listener: KernelListener) -> Iterator[None]:
    """Enter `listener(kernels, bytes)` around operators that a GPU would compute as so many kernels, moving so many
    bytes."""
    _kernel_listeners.append(listener)
    try:
        yield
    finally:
        _kernel_listeners.remove(listener)


@contextmanager
def kernels_of_gpu(kernels: int, moved: float) -> Iterator[None]:
    """Operators inside would be so many kernels on a GPU."""
    with ExitStack() as stack:
        for listener in _kernel_listeners:
            stack.enter_context(listener(kernels, moved))
        yield

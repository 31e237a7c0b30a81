"""Names for the parts of a step, for whoever listens: a profiler, Nsight, the benches. Free when nobody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

PARTS = ("data", "teacher", "student", "loss", "backward", "optimizer", "center", "ema")
"""Of one step, in order. data: the wait for the batch; loss: its forward; center: its commit over all ranks."""
AUGMENTATION = "augmentation"
"""Inside of data on a CPU; on a GPU by a stream of its own, beside the step."""

Listener = Callable[[str], AbstractContextManager[Any]]
_listeners: list[Listener] = []
_told: list[Callable[[str], None]] = []
_NOTHING: AbstractContextManager[None] = nullcontext()


def named_range(name: str) -> AbstractContextManager[Any]:
    """What runs inside is the part `name`; one look at an empty list when nobody listens."""
    for told in _told:
        told(name)
    return _entered_by_all(name) if _listeners else _NOTHING


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Enter `listener(name)` around every named range that is reached inside."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def tell(told: Callable[[str], None]) -> Iterator[None]:
    """Call `told(name)` at the beginning of every named range: less than `listen`, and so cheap that it may stay on."""
    _told.append(told)
    try:
        yield
    finally:
        _told.remove(told)


@contextmanager
def _entered_by_all(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for listener in _listeners:
            stack.enter_context(listener(name))
        yield

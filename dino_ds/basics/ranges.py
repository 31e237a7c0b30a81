"""State that the code of a training step shares with its process: named parts for profilers, whether the step is only
rehearsed on tensors without memory, and the fast paths that it takes on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

PARTS = ("data", "teacher", "targets", "student", "loss", "backward", "optimizer", "center", "ema")
"""Names of the parts of one step, in order. data: waiting for the batch; targets: centering or Sinkhorn-Knopp; student:
also the heads' cross-entropies; loss: the other terms, and the sum; center: its update over all ranks."""
AUGMENTATION = "augmentation"  # within "data" on a CPU; on a GPU in a stream of its own, parallel to the step
READ, DECODE, CROP, COPY = "read", "decode", "crop", "copy"  # ranges of loading, before the augmentation
_T = TypeVar("_T")
Listener = Callable[[str], AbstractContextManager[Any]]
_listeners: list[Listener] = []
_observers: list[Callable[[str], None]] = []
_NOTHING: AbstractContextManager[None] = nullcontext()
_devices: list[str] = []
_making_once: list[None] = []
TAKEN = set[str]()  # fast paths taken on a GPU: none until `dino_ds.method.fast_paths` has decided


def named_range(name: str) -> AbstractContextManager[Any]:
    """Mark the code inside as the part `name`."""
    for observer in _observers:
        observer(name)
    return entered(_listeners, name) if _listeners else _NOTHING


def loading_range(name: str) -> AbstractContextManager[Any]:
    """Mark the code inside for listeners alone: an observer in a loader process would write into the run's memory."""
    return entered(_listeners, name) if _listeners else _NOTHING


def listen(listener: Listener) -> AbstractContextManager[None]:
    """Enter `listener(name)` around every named range that is reached inside."""
    return added(_listeners, listener)


def tell(observer: Callable[[str], None]) -> AbstractContextManager[None]:
    """Call `observer(name)` at the beginning of every named range: cheaper than `listen`, so it may always be on."""
    return added(_observers, observer)


@contextmanager
def added(listeners: list[_T], listener: _T) -> Iterator[None]:
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


@contextmanager
def entered(listeners: list[Callable[..., AbstractContextManager[Any]]], *values: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener(*values))
        yield


def rehearsing() -> bool:
    """Whether this process rehearses a step: it is then the only rank, and reads no weights."""
    return bool(_devices)


def device_kind(of: str) -> str:
    """The device type whose tile sizes apply to tensors on `of`: the rehearsed one, else `of`."""
    return _devices[-1] if _devices else of


def rehearsal(device: str) -> AbstractContextManager[None]:
    """A context whose code is a rehearsal for this type of device, "cpu" or "cuda"."""
    return added(_devices, device)


def making_once() -> AbstractContextManager[None]:
    """A context for work that only the first step does, as later steps reuse its results."""
    return added(_making_once, None)


def is_made_once() -> bool:
    """Whether the code runs inside `making_once`: the cost of a step does not include it."""
    return bool(_making_once)

"""Fuses small pure functions of tensors into a few GPU kernels by torch.compile, and decides where that is done. A
fused kernel reads a tile once for many operators. On a CPU the callers' plain operators run in caches, as fast."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dino_ds.basics.ranges import TAKEN, added, device_kind, entered, rehearsing

_LEAST_BYTES = 16 * 2**20
"""Size from which functions of a tensor inside a block are fused. A fused call takes 25 microseconds of the host, three
plain operators take 6; fusing saves the GPU two passes over the tensor, which take as long at 3 TB/s. With a small
network the GPU waits for the host. The size is reckoned from these numbers, not measured."""
_PROGRAMS = 64  # of a function: rows vary by batch, prototypes by head; torch would stop at 8
KernelListener = Callable[[int, float], AbstractContextManager[Any]]
_listeners: list[KernelListener] = []
_training: list[None] = []
_uncompiled: list[None] = []


class Fused:
    """A function that runs as at most `kernels` kernels on a GPU. passes: for each argument, how often these read or
    write at most it and tensors of its size (scratch, results); 1 if not given. Rehearsals count by these numbers."""

    def __init__(self, function: Callable[..., Any], kernels: int, passes: dict[str, float]) -> None:
        functools.update_wrapper(self, function)
        self.function, self.kernels, self.passes = function, kernels, passes
        self._names = list(inspect.signature(function).parameters)

    @functools.cached_property
    def _compiled(self) -> Callable[..., Any]:
        """The function, compiled with a limit of its own on recompilations. torch 2.11 has only a limit for the whole
        process: there each call sets and resets it, by a patch made once per thread, as making one takes longer than
        launching the kernels, and the backward pass runs in threads of its own."""
        if "recompile_limit" in inspect.signature(torch.compile).parameters:
            limit_option: dict[str, Any] = {"recompile_limit": _PROGRAMS}
            return torch.compile(self.function, **limit_option)
        compiled, of_thread = torch.compile(self.function), threading.local()

        def call(*arguments: Any) -> Any:
            if not hasattr(of_thread, "limit"):
                of_thread.limit = torch._dynamo.config.patch(recompile_limit=_PROGRAMS)
            with of_thread.limit:
                return compiled(*arguments)

        return call

    def __call__(self, *arguments: Any) -> Any:
        if not rehearsing():
            return self._compiled(*arguments)
        moved = 0.0
        for name, argument in zip(self._names, arguments, strict=False):
            tensors = [leaf for leaf in tree_leaves(argument) if isinstance(leaf, Tensor)]
            moved += self.passes.get(name, 1) * sum(tensor.nbytes for tensor in tensors)
        with entered(_listeners, self.kernels, moved):
            return self.function(*arguments)


def fused(kernels: int, **passes: float) -> Callable[[Callable[..., Any]], Fused]:
    """Decorate a function as `Fused`; call it only if `fuses` returns True, and not inside `tf32`."""
    return lambda function: Fused(function, kernels, passes)


def fuses(of: Tensor) -> bool:
    """Whether to fuse functions of tensors on the device of `of`: on a GPU that trains, but not with deterministic
    algorithms, as kernels are chosen by timing them, nor inside `uncompiled`."""
    if rehearsing():
        return device_kind(of.device.type) == "cuda"
    taken = "fused" in TAKEN and not _uncompiled
    return taken and of.is_cuda and not torch.are_deterministic_algorithms_enabled()


def fuses_in_block(of: Tensor) -> bool:
    """Whether to fuse functions of `of` inside a backbone's block: with gradients, and in networks marked by
    `fuse_as_in_training`, such as teachers. Other networks may see only a few images, for which compiling takes too
    long. Small tensors are not worth the host's time."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() or _training):
        return False
    return fuses(of) and of.nbytes >= _LEAST_BYTES  # in this order: nbytes is symbolic in an export


def fuse_as_in_training(network: nn.Module) -> None:
    """Fuse functions in blocks of `network`, and of its copies, in forward passes without gradients too."""
    network.register_forward_pre_hook(lambda *_: _training.append(None))
    network.register_forward_hook(lambda *_: _training.pop(), always_call=True)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run passes whose sizes are not those of training as plain operators: nothing is compiled, and nothing fused.
    Compiling for each size would fill the cache that training needs, and take longer than the pass."""
    _uncompiled.append(None)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _uncompiled.pop()


def log_sum_exp(x: Tensor, dim: int = -1) -> Tensor:
    """ln of the sum of exp(x) along a dimension, which is kept. In this form Inductor reads x once."""
    largest = x.amax(dim=dim, keepdim=True)
    return largest + (x - largest).exp().sum(dim=dim, keepdim=True).log()


def listen_to_kernels(listener: KernelListener) -> AbstractContextManager[None]:
    """Enter `listener(kernels, bytes)` around each fused function: the kernels of a GPU, and the bytes that these
    move."""
    return added(_listeners, listener)

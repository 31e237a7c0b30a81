"""Records what operators on fake tensors hold and compute: bytes alive after each, and FLOPs.

A multiply-add is 2 FLOPs; matrix products, convolutions and attention count. Formulas are those of torch's counter,
except for operators for which torch has none or a wrong one.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dino_ds.basics.ranges import listen
from dino_ds.models.fused import listen_to_kernels

_aten = torch.ops.aten


@dataclass
class RecordedPart:
    """One part of a micro-batch.

    flops: of all products.
    computes: whether any of its operators does more than view a tensor.
    moments: (elements of finished gradients, most bytes alive meanwhile).
    """

    flops: float = 0.0
    computes: bool = False
    moments: list[tuple[int, int]] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Records the operators in its context; `known` tensors, and tensors that share memory with them, do not count.

    live: bytes of all other storages that are alive.
    done: elements of the finished gradients, which are freed at once.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live, self.done = 0, 0
        self.parts: dict[str, RecordedPart] = {"other": RecordedPart()}
        self._name, self._fused = "other", False
        self._known = list(known)  # kept alive: their addresses must not be reused
        self._seen: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in self._known}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A context whose operators belong to the part `name`, as a listener to `dino_ds.basics.ranges`."""
        before, self._name = self._name, name
        self.parts.setdefault(name, RecordedPart())
        self._note()
        try:
            yield
        finally:
            self._name = before

    @contextmanager
    def listening(self, student: nn.Module, teachers: Mapping[str, nn.Module]) -> Iterator[None]:
        """A context that records a step of these networks: parts, fused functions, the teachers' passes."""
        for name, network in teachers.items():
            self._watch(f"teacher {name}", network)
        self._free_gradients(student)
        with self, ExitStack() as stack:
            stack.enter_context(listen(self))
            stack.enter_context(listen_to_kernels(self.as_kernels))
            yield

    @contextmanager
    def as_kernels(self, kernels: int, moved: float) -> Iterator[None]:
        """A context whose operators are one fused function: memory that they use in between does not count."""
        self.parts[self._name].computes = True
        self._fused = True
        try:
            yield
        finally:
            self._fused = False
        self._note()

    def _watch(self, name: str, module: nn.Module) -> None:
        """Record the forward pass of `module` as the part `name`."""
        entered: list[Any] = []

        def begin(*_: Any) -> None:
            entered.append(self(name))
            entered[-1].__enter__()

        def end(*_: Any) -> None:
            entered.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)

    def _free_gradients(self, network: nn.Module) -> None:
        """Count each gradient when it is finished, and free it."""

        def finish(parameter: Tensor) -> None:
            self.done += parameter.numel()
            parameter.grad = None

        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(finish)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                size, key = storage.nbytes(), storage._cdata
                self.live += size
                self._seen[key] = weakref.ref(storage, functools.partial(self._freed, size, key))
        if not self._fused:
            self._note()
            if not is_idle(func):
                self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count an operator that computes something."""
        part = self.parts[self._name]
        part.computes = True
        if (formula := FORMULAS.get(func._overloadpacket)) is not None:
            part.flops += formula(*args, **kwargs, out_val=result)

    def _note(self) -> None:
        moments, now = self.parts[self._name].moments, (self.done, self.live)
        if moments and moments[-1][0] == self.done:
            moments[-1] = max(moments[-1], now)
        else:
            moments.append(now)

    def _freed(self, size: int, key: int, _: Any) -> None:
        self.live -= size
        del self._seen[key]


@functools.cache
def is_idle(func: Any) -> bool:
    """Whether an operator only views a tensor, or makes an uninitialized one."""
    name = func._schema.name.partition("::")[2]
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return views or name.startswith(("empty", "new_empty"))


def _convolution_backward(grad: Any, x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """FLOPs of the gradients; torch's own formula takes grouped convolutions for dense ones."""
    transposed, mask = rest[4], rest[7]
    forward = 2 * x.shape[0] * math.prod((x if transposed else grad).shape[2:]) * weight.numel()
    return int(forward * (mask[0] + mask[1]))


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """FLOPs of attention; torch below 2.15 has no formula for the CPU's kernel."""
    return int(2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1]))


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """FLOPs of the backward pass of attention; torch's own formula also counts what is recomputed."""
    return int(4 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1]))


def _addmm_in_place(_: Any, a: Any, b: Any, **__: Any) -> int:
    return int(2 * a.shape[0] * a.shape[1] * b.shape[1])


FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _aten.addmm_: _addmm_in_place,
    _aten.convolution_backward: _convolution_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""FLOPs of an operator from its arguments and its result."""


@contextmanager
def fused_attention() -> Iterator[None]:
    """A context in which attention is a fused kernel, as on all devices: it keeps queries, keys, values, the result and
    one number per query, never the attention weights. By default fake tensors would use the plain formula."""
    plain = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = functools.partial(_fused, plain)
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = plain


def _fused(
    plain: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *more: Any, **rest: Any
) -> Any:
    if more or (attn_mask is not None and attn_mask.requires_grad):
        return plain(q, k, v, attn_mask, *more, **rest)
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (q, k, v))
    options = {name: value for name, value in rest.items() if name in ("is_causal", "scale")}
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=attn_mask, **options)[0]

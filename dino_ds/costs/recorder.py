"""Records what operators on fake tensors hold, compute and move: bytes alive after each, FLOPs, traffic, launches.

A multiply-add is 2 FLOPs; matrix products, convolutions and attention count. Formulas are those of torch's counter,
but for the two that it has wrong and the products in place that it overlooks.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_OF_PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_scaled_dot_product", "_varlen_attn")
"""Operators that compute for as long as they move memory: their bytes are not counted. Convolutions' are."""


@dataclass
class Part:
    """One part of a micro-batch. flops: of low-precision and FP32 numbers by the dtype of what is multiplied; moved:
    bytes that operators other than products read and write; operators: those that launch something; moments:
    (elements of finished gradients, most bytes alive meanwhile)."""

    flops: float = 0.0
    flops_fp32: float = 0.0
    moved: float = 0.0
    operators: float = 0
    moments: list[tuple[int, int]] = field(default_factory=list)

    def scale(self, share: float) -> None:
        """Make it that of one of several micro-batches; the moments stay."""
        self.flops, self.flops_fp32, self.moved, self.operators = (
            share * number for number in (self.flops, self.flops_fp32, self.moved, self.operators)
        )

    def plain(self) -> dict[str, Any]:
        """Plain JSON."""
        return dict(vars(self))


class Recorder(TorchDispatchMode):
    """Counts from its construction on; `known` tensors, and what they share memory with, are not counted.

    `live`: bytes of all other storages; `done`: elements of gradients that are finished, which are freed at once;
    `on_host`: bytes that were saved on the host; `sent`: (part, operation, bytes) of collectives.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live, self.done, self.on_host = 0, 0, 0
        self.sent: list[tuple[str, str, int]] = []
        self.parts: dict[str, Part] = {"other": Part()}
        self._part = self.parts["other"]
        self._known = list(known)  # their addresses must not be used again
        self._seen: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in self._known}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A context whose operators count for the part `name`, as a listener to `dino_ds.basics.ranges`."""
        before, self._part = self._part, self.parts.setdefault(name, Part())
        self._note()
        try:
            yield
        finally:
            self._part = before

    def watch(self, name: str, module: nn.Module) -> None:
        """Count the forward pass of `module` for the part `name`."""
        entered: list[Any] = []

        def begin(*_: Any) -> None:
            entered.append(self(name))
            entered[-1].__enter__()

        def end(*_: Any) -> None:
            entered.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)

    def note_sent(self, operation: str, size: int) -> None:
        """A collective of so many bytes of this rank's."""
        part = next(name for name, part in self.parts.items() if part is self._part)
        self.sent.append((part, operation, size))

    def free_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Count each gradient when it is finished, and free it."""

        def finish(parameter: Tensor) -> None:
            self.done += parameter.numel()
            parameter.grad = None

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(finish)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                size, key = storage.nbytes(), storage._cdata
                self.live += size
                self._seen[key] = weakref.ref(storage, functools.partial(self._freed, size, key))
        self._note()
        launches, is_product = _kind_of(func)
        if launches:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._part.operators += 1
            if not is_product:
                self._part.moved += sum(tensor.nbytes for tensor in (*given, *made))
            if (formula := FORMULAS.get(func._overloadpacket)) is not None:
                flops = formula(*args, **kwargs, out_val=result)
                self._part.flops += flops
                self._part.flops_fp32 += flops * (given[-1].dtype == torch.float32)
        return result

    def _note(self) -> None:
        moments, now = self._part.moments, (self.done, self.live)
        if moments and moments[-1][0] == self.done:
            moments[-1] = max(moments[-1], now)
        else:
            moments.append(now)

    def _freed(self, size: int, key: int, _: Any) -> None:
        self.live -= size
        del self._seen[key]


@functools.cache
def _kind_of(func: Any) -> tuple[bool, bool]:
    """Whether an operator launches something, and whether it is one of products."""
    name = func._schema.name.partition("::")[2]
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    idle = views or name in ("detach", "_unsafe_view", "_reshape_alias") or name.startswith(("empty", "new_empty"))
    return not idle, name.startswith(_OF_PRODUCTS)


def _convolution_backward(grad: Any, x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """torch's own formula takes grouped convolutions for dense ones."""
    transposed, mask = rest[4], rest[7]
    forward = 2 * x.shape[0] * math.prod((x if transposed else grad).shape[2:]) * weight.numel()
    return int(forward * (mask[0] + mask[1]))


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """torch's own formula counts what is computed a second time."""
    return int(4 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1]))


def _addmm_in_place(_: Any, a: Any, b: Any, **__: Any) -> int:
    return int(2 * a.shape[0] * a.shape[1] * b.shape[1])


FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _aten.addmm_: _addmm_in_place,
    _aten.convolution_backward: _convolution_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""FLOPs of an operator from its arguments and its result."""


@contextmanager
def fused_attention() -> Iterator[None]:
    """The kernel that every device takes for attention: it keeps queries, keys, values, its result and a number a
    query, never a matrix of weights. Chosen here, because fake tensors would take the plain formula."""
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
    given = {name: value for name, value in rest.items() if name in ("is_causal", "scale")}
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=attn_mask, **given)[0]

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
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dino_ds.models.logits import Compared
from dino_ds.models.prototypes import Prototypes

_aten = torch.ops.aten
_OF_PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_scaled_dot_product", "_varlen_attn")
"""Operators that compute for as long as they move memory: their bytes are counted apart. Convolutions' are not."""
KERNELS = {
    "native_layer_norm_backward": 3, "topk": 3, "sort": 4, "cumsum": 2, "convolution": 2, "convolution_backward": 6,
    "index_add": 2, "index_put": 3, "index_put_": 3, "_index_put_impl_": 3, "logsumexp": 6, "nonzero": 4,
    "_scaled_dot_product_flash_attention_backward": 3, "_flash_attention_backward": 3,
    "_scaled_dot_product_efficient_attention_backward": 3, "_efficient_attention_backward": 3,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 3, "_reshape_alias": 0, "_unsafe_view": 0, "resize_": 0,
    "set_": 0, "detach": 0, 
    "_local_scalar_dense": 0, "lift_fresh": 0, "_record_function_enter_new": 0, "_record_function_exit": 0,
}  # fmt: skip
"""How many kernels a GPU starts for an operator, where that is not one."""
_FOREACH = 100
"""Tensors of a list that one kernel takes."""
_BYTES = {False: "moved", True: "moved_by_products"}


@dataclass
class Part:
    """One part of a micro-batch. flops: of low-precision and FP32 numbers by the dtype of what is multiplied; moved:
    bytes that operators other than products read and write; moved_by_products: those of products; operators: those
    that launch something; launches: the kernels that a GPU would start; moments: (elements of finished gradients, most
    bytes alive meanwhile)."""

    flops: float = 0.0
    flops_fp32: float = 0.0
    moved: float = 0.0
    moved_by_products: float = 0.0
    operators: float = 0
    launches: float = 0
    moments: list[tuple[int, int]] = field(default_factory=list)

    def scale(self, share: float) -> None:
        """Make it that of one of several micro-batches; the moments stay."""
        for name in NUMBERS:
            setattr(self, name, share * getattr(self, name))

    def plain(self) -> dict[str, Any]:
        """Plain JSON."""
        return dict(vars(self))


NUMBERS = tuple(one.name for one in fields(Part) if one.name != "moments")


class Recorder(TorchDispatchMode):
    """Counts from its construction on; `known` tensors, and what they share memory with, are not counted.

    `live`: bytes of all other storages; `done`: elements of gradients that are finished, which are freed at once;
    `on_host`: bytes that were saved on the host; `sent`: (part, operation, bytes) of collectives; `prototypes`: their
    share of each part.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live, self.done, self.on_host = 0, 0, 0
        self.sent: list[tuple[str, str, int]] = []
        self.parts: dict[str, Part] = {"other": Part()}
        self.prototypes: dict[str, Part] = {}
        self._name, self._of_prototypes, self._as_kernels = "other", 0, False
        self._known = list(known)  # their addresses must not be used again
        self._seen: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in self._known}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A context whose operators count for the part `name`, as a listener to `dino_ds.basics.ranges`."""
        before, self._name = self._name, name
        self.parts.setdefault(name, Part())
        self._of_prototypes += name == "targets"
        self._note()
        try:
            yield
        finally:
            self._name = before
            self._of_prototypes -= name == "targets"

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

    def watch_prototypes(self, modules: Iterable[nn.Module]) -> None:
        """Count forward and backward passes of heads' prototypes for `prototypes` too."""

        def move(by: int, *_: Any) -> None:
            self._of_prototypes += by

        def end(_: Any, __: Any, output: Any) -> None:
            move(-1)
            node = output.loss.grad_fn if isinstance(output, Compared) else None
            if node is not None:
                node.register_prehook(functools.partial(move, 1))
                node.register_hook(functools.partial(move, -1))

        for module in {id(module): module for module in modules if isinstance(module, Prototypes)}.values():
            module.register_forward_pre_hook(functools.partial(move, 1))
            module.register_forward_hook(end)

    @contextmanager
    def as_kernels(self, kernels: int, moved: float) -> Iterator[None]:
        """Operators inside count as so many kernels that move so many bytes, as a listener to `listen_to_kernels`."""
        self._add(operators=kernels, launches=kernels, moved=moved)
        self._as_kernels = True
        try:
            yield
        finally:
            self._as_kernels = False
        self._note()

    def _add(self, **numbers: float) -> None:
        parts = [self.parts[self._name]]
        if self._of_prototypes:
            parts.append(self.prototypes.setdefault(self._name, Part()))
        for part in parts:
            for name, number in numbers.items():
                setattr(part, name, getattr(part, name) + number)

    def note_sent(self, operation: str, size: int) -> None:
        """A collective of so many bytes of this rank's."""
        self.sent.append((self._name, operation, size))

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
        if self._as_kernels:
            return result
        self._note()
        kernels, is_product = _kind_of(func)
        if kernels:
            read = {name: value for name, value in kwargs.items() if name != "out"}
            given = [leaf for leaf in tree_leaves((args, read)) if isinstance(leaf, Tensor)]
            moved = sum(tensor.nbytes for tensor in (*given, *made))
            several = len(args[0]) // _FOREACH if func.__name__.startswith("_foreach") else 0
            self._add(operators=1, launches=kernels + several, **{_BYTES[is_product]: moved})
            if (formula := FORMULAS.get(func._overloadpacket)) is not None:
                flops = formula(*args, **kwargs, out_val=result)
                self._add(flops=flops, flops_fp32=flops * (given[-1].dtype == torch.float32))
        return result

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
def _kind_of(func: Any) -> tuple[int, bool]:
    """How many kernels an operator launches, and whether it is one of products."""
    name = func._schema.name.partition("::")[2]
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    idle = views or name.startswith(("empty", "new_empty"))
    return 0 if idle else KERNELS.get(name, 1), name.startswith(_OF_PRODUCTS)


def _convolution_backward(grad: Any, x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """torch's own formula takes grouped convolutions for dense ones."""
    transposed, mask = rest[4], rest[7]
    forward = 2 * x.shape[0] * math.prod((x if transposed else grad).shape[2:]) * weight.numel()
    return int(forward * (mask[0] + mask[1]))


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """torch below 2.15 has no formula for a CPU's kernel."""
    return int(2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1]))


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """torch's own formula counts what is computed a second time."""
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

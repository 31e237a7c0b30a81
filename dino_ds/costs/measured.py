"""What a backbone without formulas costs, measured on the meta device, where tensors have shapes and no memory.

Its real forward and backward pass runs there, for two sizes of a micro-batch: everything counted grows linearly with
the images, so both give what an image costs and what is fixed. cuDNN's workspaces and the temporary copies of
BatchNorm over several ranks are not seen.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dino_ds.config.crops import student_sizes, teacher_sizes
from dino_ds.config.recipe import Recipe
from dino_ds.errors import NotEstimated, one_line
from dino_ds.models.base import CLS, Backbone, is_cast
from dino_ds.models.build import build_backbone
from dino_ds.models.specs.backbones import BackboneOptions, BackboneSpec

_IMAGES = (2, 4)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_aten = torch.ops.aten


@dataclass(frozen=True)
class Parameters:
    """By name without "backbone.": their shapes, and their layers as of `Backbone.layers`; top: the number of segments;
    cast: those of which a low-precision teacher keeps a copy."""

    shapes: Mapping[str, tuple[int, ...]]
    layers: Mapping[str, int]
    top: int
    cast: frozenset[str]


@dataclass(frozen=True)
class Run:
    """How a backbone runs: crops (number of an image, side in pixels) by group, in order; image_size: its native side;
    recomputed: its first segments that activation checkpointing computes again; trains: with a backward pass."""

    spec: BackboneSpec
    image_size: int
    crops: tuple[tuple[int, int], ...]
    precision: str = "fp32"
    drop_path: float = 0.0
    recomputed: int = 0
    trains: bool = True


@dataclass(frozen=True)
class Moment:
    """Bytes that a backbone holds beside weights, finished gradients and crops, of an image and besides; `done`: the
    part of its gradients that is finished."""

    per_image: float
    fixed: float
    done: float = 0.0

    def of(self, images: int) -> float:
        return images * self.per_image + self.fixed


@dataclass(frozen=True)
class Measured:
    """`saved`: by autograd; `backward`: the fullest moments of the backward pass; `inputs`: bytes of an image that the
    segments are given. Of an image forward and in all: `flops`, and bytes `moved` by all operators. Of a micro-batch:
    `operators`."""

    saved: Moment
    backward: tuple[Moment, ...]
    inputs: float
    forward_flops: int
    flops: int
    forward_moved: float
    moved: float
    forward_operators: int
    operators: int


@functools.cache
def parameters_of(spec: BackboneSpec, image_size: int) -> Parameters:
    """Raises ConfigError for a network that can't be built."""
    with torch.device("meta"):
        backbone = build_backbone(spec, image_size)
    modules = dict(backbone.named_modules())
    shapes = {name: tuple(p.shape) for name, p in backbone.named_parameters()}
    cast = frozenset(name for name in shapes if is_cast(modules[name.rpartition(".")[0]]))
    return Parameters(MappingProxyType(shapes), MappingProxyType(backbone.layers()), len(backbone.segments()), cast)


def measure_student(recipe: Recipe, precision: str = "fp32", recomputed: int = 0) -> Measured:
    """Forward and backward pass of all crops. Raises NotEstimated."""
    sides = _by_side(student_sizes(recipe.groups))
    model, size = recipe.model, recipe.crops.global_size
    return measure(Run(model.spec(), size, sides, precision, model.drop_path, recomputed))


def measure_teacher(recipe: Recipe, precision: str = "fp32") -> Measured:
    """Its forward pass. Raises NotEstimated."""
    sides = _by_side(teacher_sizes(recipe.groups))
    return measure(Run(recipe.model.spec(), recipe.crops.global_size, sides, precision, trains=False))


def _by_side(sizes: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple((len(list(crops)), side) for side, crops in itertools.groupby(sizes))


@functools.cache
def measure(run: Run) -> Measured:
    """Raises NotEstimated for a network whose forward or backward pass wants the values of tensors."""
    try:
        few, many = (_Trace(run, images) for images in _IMAGES)
    except Exception as error:  # whatever a foreign network raises
        raise NotEstimated(f"memory and time are not estimated: {one_line(error)}") from None
    if len(few.moments) != len(many.moments):
        raise NotEstimated("memory and time are not estimated: the network does other things for other batches")
    pairs = zip(few.moments, many.moments, strict=True)
    moments = [_line(a, b, done / max(1, many.weights)) for (a, _), (b, done) in pairs]
    images = _IMAGES[1]
    return Measured(
        _line(few.saved, many.saved),
        tuple(_fullest(moments[many.forward_moments :])),
        many.inputs / images,
        many.forward_flops // images,
        many.flops // images,
        many.forward_moved / images,
        many.moved / images,
        many.forward_operators,
        many.operators,
    )


def _line(few: int, many: int, done: float = 0.0) -> Moment:
    per_image = (many - few) / (_IMAGES[1] - _IMAGES[0])
    return Moment(per_image, few - _IMAGES[0] * per_image, done)


def _fullest(moments: list[Moment]) -> Iterator[Moment]:
    """Without those that another one exceeds in everything."""
    kept: list[Moment] = []
    for one in sorted(moments, key=lambda m: (m.per_image, m.fixed, m.done), reverse=True):
        if not any(other.fixed >= one.fixed and other.done >= one.done for other in kept):
            kept.append(one)
            yield one


class _Trace:
    """One run on the meta device."""

    def __init__(self, run: Run, images: int) -> None:
        with torch.device("meta"):
            backbone = _meta_backbone(run)
            crops = {
                str(i): [torch.empty(images, run.spec.in_chans, side, side) for _ in range(count)]
                for i, (count, side) in enumerate(run.crops)
            }
            keys = torch.zeros(images, dtype=torch.long) if run.drop_path and run.trains else None
        self.weights = sum(p.numel() for p in backbone.parameters())
        self.done, self._given = 0, 0
        known = [*backbone.parameters(), *backbone.buffers(), *tree_leaves(crops), *tree_leaves(keys)]
        memory = _Memory([tensor for tensor in known if isinstance(tensor, Tensor)], self)
        self._watch(backbone)
        for _ in range(2):  # what a dropped engine computes in its end is not this network's; it holds another's
            gc.collect()
        with memory, torch.set_grad_enabled(run.trains), _fused_attention():
            features = backbone(crops, keys)[CLS]
            self.saved, self.forward_moments = memory.live, len(memory.moments)
            self.forward_flops, self.forward_moved = memory.flops, memory.moved
            self.forward_operators, self.inputs = memory.operators, self._given
            if run.trains:
                features.backward(torch.empty_like(features))
        self.moments, self.flops = memory.moments, memory.flops
        self.moved, self.operators = memory.moved, memory.operators

    def _watch(self, backbone: Backbone) -> None:
        """Finished gradients are freed and counted; what the segments are given is counted once."""

        def finish(parameter: Tensor) -> None:
            self.done += parameter.numel()
            parameter.grad = None

        for parameter in backbone.parameters():
            parameter.register_post_accumulate_grad_hook(finish)
        seen: set[int] = set()

        def count(segment: nn.Module, inputs: Any) -> None:
            storages = [leaf.untyped_storage() for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
            new = {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in seen}
            seen.update(new)
            self._given += sum(new.values())

        for segment in backbone.segments():
            segment.register_forward_pre_hook(count)


def _meta_backbone(run: Run) -> Backbone:
    """Of one rank: what others send can't be awaited here."""
    backbone = build_backbone(
        run.spec, run.image_size, BackboneOptions(drop_path=run.drop_path, sync_batch_norm=False)
    ).train()
    for parameter in backbone.parameters():
        parameter.data = parameter.data.to(_DTYPES[run.precision])
    backbone.checkpoint_segments(run.recomputed)
    return backbone


class _Memory(TorchDispatchMode):
    """The bytes of all storages that operators make, after each of these; and what operators read and write."""

    def __init__(self, known: list[Tensor], trace: _Trace) -> None:
        super().__init__()
        self.live, self.flops, self.moved, self.operators = 0, 0, 0, 0
        self.moments: list[tuple[int, int]] = []
        self._trace = trace
        self._known = known  # their addresses must not be used again
        self._seen: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                size, key = storage.nbytes(), storage._cdata
                self.live += size
                self._seen[key] = weakref.ref(storage, functools.partial(self._freed, size, key))
        self.moments.append((self.live, self._trace.done))
        if not _is_view(func):
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.moved += sum(tensor.nbytes for tensor in given + made)
            self.operators += 1
        if func._overloadpacket in FORMULAS:
            self.flops += FORMULAS[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result

    def _freed(self, size: int, key: int, _: Any) -> None:
        self.live -= size
        del self._seen[key]


def _is_view(func: Any) -> bool:
    name = func._schema.name.partition("::")[2]
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return views or name in ("detach", "_unsafe_view", "_reshape_alias") or name.startswith(("empty", "new_empty"))


def _convolution_backward(grad: Any, x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """torch's own formula takes grouped convolutions for dense ones."""
    transposed, mask = rest[4], rest[7]
    forward = 2 * x.shape[0] * math.prod((x if transposed else grad).shape[2:]) * weight.numel()
    return int(forward * (mask[0] + mask[1]))


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """torch's own formula counts what is computed a second time."""
    return int(4 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1]))


FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _aten.convolution_backward: _convolution_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""FLOPs of an operator from its arguments and its result, as of torch's counter."""


@contextmanager
def _fused_attention() -> Iterator[None]:
    """The meta device would take attention's plain formula, whose matrices no other device keeps."""
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
    given = {name: value for name, value in rest.items() if name in ("is_causal", "scale")}
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=attn_mask, **given)[0]

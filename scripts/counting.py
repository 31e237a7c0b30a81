"""Counts the kernels that a rehearsed step would launch on a GPU, and their traffic."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dino_ds.basics.ranges import is_made_once
from dino_ds.config.crops import CropGroup
from dino_ds.config.ds_schema import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.costs.rehearse import Recorder, rehearse
from dino_ds.costs.step_costs import RehearsalSettings, student_facts
from dino_ds.models.prototypes import Compared, Prototypes

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


@dataclass
class Counts:
    """What a part of a micro-batch launches, bytes that it reads and writes, and FLOPs of its products."""

    launches: float = 0.0
    moved: float = 0.0
    flops: float = 0.0

    def add(self, launches: float, moved: float, flops: float = 0.0) -> None:
        self.launches += launches
        self.moved += moved
        self.flops += flops


@dataclass
class StepCounts:
    """A micro-batch by part; prototypes: what heads' prototypes have of all parts."""

    parts: dict[str, Counts] = field(default_factory=dict)
    prototypes: Counts = field(default_factory=Counts)


def count_step(recipe: Recipe, config: DsConfig, groups: tuple[CropGroup, ...], on_gpu: bool = True) -> StepCounts:
    """Count one micro-batch of the config, with crops of `groups`."""
    made: list[_Counter] = []

    def recorder(known: Iterable[Tensor]) -> _Counter:
        made.append(_Counter(known))
        return made[0]

    window = min(config.accumulation, 2) if student_facts(recipe).whole_step else 1
    rehearse(recipe, RehearsalSettings.of(recipe, config, window), groups, config.micro_batch, on_gpu, recorder)
    return made[0].counts


class _Counter(Recorder):
    """Counts beside what its base records."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__(known)
        self.counts = StepCounts()
        self._in_prototypes = 0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._in_prototypes += name == "targets"
        with super().__call__(name):
            yield
        self._in_prototypes -= name == "targets"

    @contextmanager
    def listening(self, student: nn.Module, teachers: Mapping[str, nn.Module]) -> Iterator[None]:
        for module in (part for network in (student, *teachers.values()) for part in network.modules()):
            if isinstance(module, Prototypes):
                self._watch_prototypes(module)
        with super().listening(student, teachers):
            yield

    @contextmanager
    def as_kernels(self, kernels: int, moved: float) -> Iterator[None]:
        self._add(kernels, moved)
        with super().as_kernels(kernels, moved):
            yield

    def _watch_prototypes(self, module: nn.Module) -> None:
        """Count forward and backward passes for `prototypes` too."""

        def move(by: int, *_: Any) -> None:
            self._in_prototypes += by

        def end(_: Any, __: Any, output: Any) -> None:
            move(-1)
            node = output.loss.grad_fn if isinstance(output, Compared) else None
            if node is not None:
                node.register_prehook(functools.partial(move, 1))
                node.register_hook(functools.partial(move, -1))

        module.register_forward_pre_hook(functools.partial(move, 1))
        module.register_forward_hook(end)

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if is_made_once():
            return
        before = self.parts[self._name].flops
        super()._count(func, args, kwargs, result)
        kernels = KERNELS.get(func._schema.name.partition("::")[2], 1)
        read = {name: value for name, value in kwargs.items() if name != "out"}
        moved = sum(leaf.nbytes for leaf in tree_leaves((args, read, result)) if isinstance(leaf, Tensor))
        several = len(args[0]) // _FOREACH if func.__name__.startswith("_foreach") else 0
        if kernels:
            self._add(kernels + several, moved, self.parts[self._name].flops - before)

    def _add(self, launches: float, moved: float, flops: float = 0.0) -> None:
        self.counts.parts.setdefault(self._name, Counts()).add(launches, moved, flops)
        if self._in_prototypes:
            self.counts.prototypes.add(launches, moved, flops)

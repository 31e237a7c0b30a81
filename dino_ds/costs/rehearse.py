"""Rehearses a micro-batch: runs `TrainingStep` itself, with its networks, terms and teachers, on fake tensors, which
have shapes and no memory, and records what their operators hold and compute: bytes alive after each, and FLOPs. It sees
whatever a term, a teacher or a backbone does, without naming any. DeepSpeed's part is not seen: the bare network takes
the engine's place. A multiply-add is 2 FLOPs; matrix products, convolutions and attention count, by the formulas of
torch's counter, except for operators for which torch has none or a wrong one."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dino_ds.basics.ranges import listen, rehearsal
from dino_ds.config.crops import FROZEN, CropGroup
from dino_ds.config.ds_schema import DsConfig, PerformanceOptions
from dino_ds.config.recipe import Recipe
from dino_ds.data.feed import Batch
from dino_ds.data.normalization import Normalization
from dino_ds.engine.engine import Engine, Progress
from dino_ds.engine.masters import FrozenWeights, Masters, WholeMasters
from dino_ds.engine.muon import matrices_of
from dino_ds.engine.optim import parameter_groups
from dino_ds.engine.process import DTYPES
from dino_ds.method.build import build_objective, build_schedules, build_teachers
from dino_ds.method.networks import build_head, build_meta, optimizer_options
from dino_ds.method.specs.own import heads_of, teachers_of
from dino_ds.method.step import TrainingStep
from dino_ds.models.base import is_cast
from dino_ds.models.fused import listen_to_kernels
from dino_ds.models.network import Network
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.models.specs.base import BackboneSpec
from dino_ds.weights.frozen import FrozenSource

if TYPE_CHECKING:
    from dino_ds.costs.step_costs import RehearsalSettings

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

        def finish(parameter: Tensor) -> None:
            self.done += parameter.numel()
            parameter.grad = None

        for parameter in student.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(finish)
        for name, network in teachers.items():
            network.forward = self(f"teacher {name}")(network.forward)
        with self, listen(self), listen_to_kernels(self.as_kernels):
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                size, key = storage.nbytes(), storage._cdata
                self.live += size
                self._seen[key] = weakref.ref(storage, partial(self._freed, size, key))
        if not self._fused:
            self._note()
            if not is_idle(func):
                self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
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


FORMULAS: dict[Any, Callable[..., int]] = {  # FLOPs of an operator from its arguments and its result
    **flop_registry,
    _aten.addmm_: lambda _, a, b, **__: int(2 * a.shape[0] * a.shape[1] * b.shape[1]),
    _aten.convolution_backward: _convolution_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    # torch's own formula also counts what is recomputed.
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, *qkv, **__: 2 * _attention(*qkv),
}


def _fused_attention(
    plain: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *more: Any, **rest: Any
) -> Any:
    """Attention by a fused kernel, as on all devices: it keeps queries, keys, values, the result and one number per
    query, never the attention weights. By default fake tensors would use the plain formula."""
    if more or (attn_mask is not None and attn_mask.requires_grad):
        return plain(q, k, v, attn_mask, *more, **rest)
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (q, k, v))
    options = {name: value for name, value in rest.items() if name in ("is_causal", "scale")}
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=attn_mask, **options)[0]


_EPOCH_STEPS, _CPU = 1000, torch.device("cpu")


def describe_student(recipe: Recipe, frozen: ViTSpec | None) -> dict[str, Any]:
    """`StudentFacts` in plain JSON; frozen: as in `RehearsalSettings`."""
    _read_widths(recipe, frozen)
    with rehearsal("cpu"), FakeTensorMode():
        objective = build_objective(recipe, _CPU, _frozen_source(recipe, frozen))
    network = build_meta(recipe, PerformanceOptions(), objective.queries, objective.student_features())
    groups = parameter_groups(network, optimizer_options(recipe.optimizer))
    blocks, name_of = matrices_of(network), {p: name for name, p in network.named_parameters()}
    modules = dict(network.named_modules())
    facts: dict[str, Any] = {"sizes": {name: p.numel() for name, p in network.named_parameters()}}
    facts["frozen"] = [name for name, p in network.named_parameters() if not p.requires_grad]
    facts["cast"] = [name for name in facts["sizes"] if is_cast(modules[name.rpartition(".")[0]])]
    facts["groups"] = [(group["kind"], sum(p.numel() for p in group["params"])) for group in groups]
    facts["matrices"] = [
        [(*sorted((len(p) // blocks[name_of[p]], p[0].numel())), blocks[name_of[p]]) for p in group["params"]]
        for group in groups
        if group["kind"] == "muon"
    ]
    facts["statistics"] = [statistic.value.numel() for statistic in objective.statistics.values()]
    return facts | {"whole_step": objective.whole_step}


def rehearse(
    recipe: Recipe,
    settings: RehearsalSettings,
    groups: Sequence[CropGroup],
    images: int,
    on_gpu: bool,
    recorder: Callable[[Iterable[Tensor]], Recorder] = Recorder,
) -> dict[str, Any]:
    """Rehearse a micro-batch of `images` with the crops `groups`; returns its `StepCosts` as plain JSON."""
    _read_widths(recipe, settings.frozen)
    if torch.distributed.is_initialized():  # a dropped engine must not end within the step and be recorded
        for _ in range(2):  # the first collection may release one more engine
            gc.collect()
    fake, functions, available = FakeTensorMode(allow_non_fake_inputs=True), nn.functional, torch.cuda.is_available()
    replaced: list[tuple[Any, str, Any]] = [
        (functions, "linear", torch._C._nn.linear),  # ZeRO 3 may have left DeepSpeed's here
        (functions, "scaled_dot_product_attention", partial(_fused_attention, functions.scaled_dot_product_attention)),
        (nn.Module, "to_empty", functools.partialmethod(_to_empty, fake)),
        (torch.cuda, "is_available", lambda: available),  # fake tensors ask at each operator: it opens a library
    ]
    with rehearsal("cuda" if on_gpu else "cpu"), ExitStack() as stack:
        for owner, name, value in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        alone = _single_rank_recipe(recipe)
        engine, step = _build_step(alone, settings, groups, images, fake)
        with fake:
            window = [_inputs(alone, groups, images) for _ in range(settings.window)]
            costs = _play(engine, step, window, recorder)
    if recipe.teacher.source is not None and settings.frozen is None:  # of unknown size: the student's took its place
        costs["parts"].pop(f"teacher {FROZEN}", None)
        costs["teachers"].pop(FROZEN, None)
    return costs


def _to_empty(
    network: nn.Module, fake: FakeTensorMode, *, device: Any, recurse: bool = True, dtype: torch.dtype | None = None
) -> nn.Module:
    """`nn.Module.to_empty` with new, fake parameters. dtype: of the parameters; None keeps theirs."""
    with fake:
        for module in network.modules() if recurse else [network]:
            for name, parameter in list(module.named_parameters(recurse=False)):
                empty = torch.empty(parameter.shape, dtype=dtype or parameter.dtype, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
    return network


def _build_step(
    recipe: Recipe, settings: RehearsalSettings, groups: Sequence[CropGroup], images: int, fake: FakeTensorMode
) -> tuple[_FakeEngine, TrainingStep]:
    """Networks are built on the meta device, not on fake tensors: some read numbers while they are built."""
    frozen = _frozen_source(recipe, settings.frozen)
    with fake:
        objective = build_objective(recipe, _CPU, frozen)
    network = build_meta(recipe, settings.performance, objective.queries, objective.student_features())
    with fake:
        masters = [(name, torch.empty(p.shape)) for name, p in network.named_parameters()]
    _to_empty(network, fake, device=_CPU, dtype=DTYPES[settings.precision])
    blocks = settings.checkpoint_blocks
    network.backbone.checkpoint_segments(None if blocks == "all" else int(blocks))
    config = DsConfig({}, images, settings.window, 0, settings.precision, False, 0.0, blocks, settings.performance)
    engine = _FakeEngine(network.train(), config, masters)
    real = cast(Engine, engine)
    teachers = build_teachers(recipe, config, real, objective, frozen)
    step = TrainingStep(real, teachers, objective, build_schedules(recipe, _EPOCH_STEPS), groups, recipe.seed)
    last = step.schedules.at(step.schedules.steps)
    weights = {name: weight or 1.0 for name, weight in last.weights.items()}
    step.schedule = dataclasses.replace(last, weights=weights)
    return engine, step


def _play(
    engine: _FakeEngine, step: TrainingStep, window: list[Batch], make_recorder: Callable[[Iterable[Tensor]], Recorder]
) -> dict[str, Any]:
    teachers = dict(step.teachers.items())
    networks = [engine.network, *(n for teacher in teachers.values() for n in (teacher.network, teacher._running))]
    known = [tensor for network in networks for tensor in (*network.parameters(), *network.buffers())]
    inputs = tree_leaves([(batch.crops, batch.drop_keys, batch.masks) for batch in window])
    engine.recorder = recorder = make_recorder([*known, *(leaf for leaf in inputs if isinstance(leaf, Tensor))])
    with recorder.listening(engine.network, {name: teacher._running for name, teacher in teachers.items()}):
        step.prepare(window)
        held = recorder.live
        step.micro_batch(window[0])
    parts = dict[str, Any]()
    for name, part in recorder.parts.items():
        times = len(window) if name.startswith("teacher") or name == "targets" else 1
        parts |= {name: {"flops": part.flops / times, "moments": part.moments}} if part.computes else {}
    weights = {name: sum(p.nbytes for p in teacher.network.parameters()) for name, teacher in teachers.items()}
    crops = sum(crop.nbytes for group in window[0].crops.values() for crop in group)
    costs = {"images": engine.config.micro_batch, "parts": parts, "saved": engine.saved - held}
    return costs | {"held": held / len(window), "crops": crops, "window": len(window), "teachers": weights}


class _FakeEngine:
    """The methods of an engine that a step calls, without DeepSpeed. saved: bytes alive before the backward pass."""

    unsynced_statistics = list
    recorder: Recorder

    def __init__(self, network: Network, config: DsConfig, masters: list[tuple[str, Tensor]]) -> None:
        self.config, self.device, self.network, self._masters, self.saved = config, _CPU, network, masters, 0

    def __call__(self, *inputs: Any) -> Any:
        return self.network(*inputs)

    def masters(self) -> list[Masters]:
        parameters: dict[str, Any] = dict(self.network.named_parameters())
        for name, value in self._masters:
            parameters[name].fp32_value = value
        frozen = [(name, p) for name, p in parameters.items() if not p.requires_grad]
        trained = [(name, value) for name, value in self._masters if parameters[name].requires_grad]
        return [WholeMasters(trained), FrozenWeights(frozen, None)]

    def buffers(self, saved: bool = False) -> dict[str, Tensor]:
        return dict(self.network.named_buffers())

    def backward(self, loss: Tensor) -> None:
        self.saved = self.recorder.live
        loss.backward()

    def step(self) -> Progress:
        return Progress.ACCUMULATING

    def freeze_prototypes(self, frozen: bool) -> None:
        """Do nothing: in most steps nothing is frozen."""

    freeze_backbone = set_groups = reset_optimizer_state = freeze_prototypes


def _single_rank_recipe(recipe: Recipe) -> Recipe:
    """The recipe for one rank; teachers that come from files are as large as the student where this is possible."""
    changes: dict[str, Any] = {"model": recipe.model.model_copy(update={"sync_batch_norm": False})}
    for spec in teachers_of(recipe):
        changes |= spec.changes_without_file(recipe)
    return recipe.model_copy(update=changes)


def _read_widths(recipe: Recipe, frozen: ViTSpec | None) -> None:
    """Read the backbones' widths before tensors are fake: a network that is not dino_ds's is built for it."""
    for spec in (recipe.model.spec(), frozen):
        _ = spec and spec.width


def _frozen_source(recipe: Recipe, frozen: ViTSpec | None) -> FrozenSource | None:
    """The teacher that is distilled, without its weights; an unknown architecture is replaced by the student's."""
    if (path := recipe.teacher.source) is None:
        return None
    spec: BackboneSpec = frozen or recipe.model.spec()
    with torch.device("meta"):
        sections = heads_of(recipe)
        heads = {name: build_head(spec.width, section).state_dict() for name, section in sections.items()}
    free = tuple(name for name, section in sections.items() if section.free_prototypes)
    side, normalization = recipe.crops.global_size, Normalization.of(recipe)
    return FrozenSource(path, spec, side, "dino", {}, heads, normalization, free_prototypes=free)


def _inputs(recipe: Recipe, groups: Sequence[CropGroup], images: int) -> Batch:
    """Crops, keys, and masks that hide the expected number of patches; drawn for mask dinov2, they hide 1 % fewer."""
    crops, masks = {}, {}
    for group in groups:
        shape = images, recipe.model.in_chans, group.size, group.size
        crops[group.name] = [torch.empty(shape) for _ in range(group.count)]
        if group.masked:
            patches = (group.size // recipe.model.spec().stride) ** 2
            share = recipe.crops.mask_share * sum(recipe.crops.mask_ratio) / 2
            hidden = round(images * group.count * patches * share)
            masks[group.name] = {"mask": torch.zeros(images * group.count, patches, dtype=torch.bool)}
            masks[group.name] |= {"rows": torch.zeros(hidden, dtype=torch.int64), "weights": torch.ones(hidden)}
    return Batch(crops, torch.zeros(images, dtype=torch.int64), masks)

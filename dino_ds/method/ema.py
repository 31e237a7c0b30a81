"""The EMA teacher: a whole FP32 copy on every rank, never sharded, never trained, averaged from FP32 master weights.
Source: DINO, section 3.1 (arXiv 2104.14294): teacher <- m teacher + (1 - m) student, after each applied step. In bf16 a
step at m >= .996 would leave most weights unchanged; hence an FP32 average of FP32 weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dino_ds.config.crops import EMA, teacher_sizes
from dino_ds.engine import distributed, schedules
from dino_ds.engine.masters import FlatMasters, FrozenWeights, Masters, PartitionedMasters, WholeMasters, write_weights
from dino_ds.engine.process import DTYPES, device
from dino_ds.method.networks import TeacherParts, build_meta
from dino_ds.method.specs.base import TeacherSpec
from dino_ds.method.teacher import Teacher
from dino_ds.models.base import is_cast
from dino_ds.models.batch_norm import batch_norms, unsynced_statistics
from dino_ds.models.blocks import RotaryAttention
from dino_ds.models.network import Network

_CHUNK_ELEMENTS = 128 * 2**20  # elements gathered at once under ZeRO 3: bounds the scratch memory to 512 MiB

_STATISTICS_SPAN = 0.1
"""With batch_norm "ema" the averages at first span this fraction of the passes so far, so that the statistics of
untrained weights fade."""


@dataclass(frozen=True)
class TeacherOptions:
    """`dtype`: of the forward pass. `keep_copy`: also keep the matrices in `dtype`, cast once per applied step instead
    of at each use: same results, 2 bytes more per weight. `compiled`: how blocks are compiled, see `compile_segments`,
    or "off". `batch_norm`: "reference": the teacher normalizes by its own batch and has its own running averages of its
    crops (facebookresearch/dino); "ema": by the student's running averages, averaged as the weights are; "frozen": by
    those that the student began with, as the student does (but in heads as with "ema"). Evaluations use the teacher's
    averages."""

    dtype: torch.dtype = torch.float32
    keep_copy: bool = False
    compiled: str = "off"
    batch_norm: str = "reference"
    name: str = EMA


class EmaTeacher(Teacher):
    """An average of the student's weights, updated after each applied step.

    On construction the network becomes equal to the masters, which DeepSpeed makes from weights already rounded to the
    engine's precision. Afterwards it must not be moved, cast or deep-copied: its parameters may be views of flat
    buffers. Weights that the student never trains keep their values from before any rounding. Matrices A and B of
    adapters (LoRA) are averaged each by itself, as is usual, though the product of averages is not the average of
    products.

    Args:
        network: see `Teacher`.
        masters: the student's FP32 weights.
        buffers: returns the student's buffers by name. Floating-point ones are averaged as the weights are, integers
            copied; for BatchNorm's see `TeacherOptions`.
    """

    def __init__(
        self,
        network: Network,
        masters: Sequence[Masters],
        options: TeacherOptions = TeacherOptions(),
        buffers: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        super().__init__(network, options.dtype)
        parameters: dict[str, Tensor] = dict(network.named_parameters())
        assert all(p.dtype == torch.float32 for p in parameters.values()), "the teacher is FP32"
        self._frozen = [m for m in masters if isinstance(m, FrozenWeights)]
        for name, parameter in (pair for m in self._frozen for pair in m.parameters):
            # The student's FP32 value and the teacher's weight are one tensor, on the teacher's device.
            parameter.fp32_value = parameters[name].data = parameter.fp32_value.to(self._device)
        whole = [m.parameters for m in masters if isinstance(m, WholeMasters)]
        flat = [m for m in masters if isinstance(m, FlatMasters)]
        self._updates: list[Callable[[float], object]] = [
            partial(torch._foreach_lerp_, [parameters[n].data for n, _ in pairs], [t.detach() for _, t in pairs])
            for pairs in whole
        ]
        self._updates += [_FlatUpdater(flat, parameters, self._device).update] if flat else []
        cut = [m for m in masters if isinstance(m, PartitionedMasters)]
        self._updates += [_PartitionedUpdater(m, parameters, self._device).update for m in cut]
        followed = [name for pairs in (*whole, *(m.parameters for m in self._frozen)) for name, _ in pairs]
        followed += [name for m in flat for name, _ in m.layout] + [name for m in cut for name, _, _ in m.layout]
        assert sorted(followed) == sorted(parameters), "each parameter must have exactly one master"
        self._student_buffers, self._own_buffers = buffers, dict(network.named_buffers())
        assert buffers().keys() == self._own_buffers.keys(), "each buffer must have the student's"
        statistics = {id(buffer) for norm in batch_norms(network) if not norm.frozen for buffer in norm.buffers()}
        self._statistics = {name: b for name, b in self._own_buffers.items() if id(b) in statistics}
        self._rule, self._name = options.batch_norm, options.name
        self._casts: tuple[list[Tensor], list[Tensor]] = ([], [])
        if options.keep_copy:
            self._running, self._casts = _low_precision_copy(network, options.dtype)
        if options.batch_norm == "reference":
            self._batch_norms, self._unsynced = batch_norms(self._running), unsynced_statistics(network)
        if options.compiled != "off":
            self._running.backbone.compile_segments(options.compiled)
        student = buffers()
        for name, tensor in self._own_buffers.items():
            tensor.copy_(student[name])
        self._move_weights(momentum=0.0)

    def update(self, schedule: schedules.ScheduleValues) -> None:
        self.move(schedule.momenta.get(self._name, schedule.teacher_momentum))

    @torch.no_grad()
    def move(self, momentum: float) -> None:
        """teacher <- momentum * teacher + (1 - momentum) * student; every rank must call it."""
        self._move_weights(momentum)
        student = self._student_buffers()
        for name, tensor in self._own_buffers.items():
            if name in self._statistics:
                continue
            if tensor.is_floating_point():
                tensor.lerp_(student[name].to(tensor.dtype), 1.0 - momentum)
            else:
                tensor.copy_(student[name])
        if self._rule == "reference" or not self._statistics:
            return
        # Average BatchNorm's statistics as the weights, but faster at first.
        counts = [name for name, tensor in self._statistics.items() if not tensor.is_floating_point()]
        torch._foreach_copy_([self._statistics[name] for name in counts], [student[name] for name in counts])
        averages = [tensor for tensor in self._statistics.values() if tensor.is_floating_point()]
        passes = self._statistics[counts[0]].float()
        steps = torch._foreach_sub([student[name] for name in self._statistics if name not in counts], averages)
        torch._foreach_mul_(steps, (1 / (_STATISTICS_SPAN * passes)).clamp(1.0 - momentum, 1.0))
        torch._foreach_add_(averages, steps)

    @torch.no_grad()
    def _move_weights(self, momentum: float) -> None:
        for update in self._updates:
            update(1.0 - momentum)
        self._cast()

    def moving_buffers(self) -> dict[str, Tensor]:
        return self._statistics if self._rule == "reference" else {}

    def _cast(self) -> None:
        if self._casts[0]:
            torch._foreach_copy_(*self._casts)

    def state(self) -> dict[str, Tensor]:
        return self.network.state_dict()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load `state`; if it is empty (the earlier run had no such teacher), become equal to the student."""
        if self._name != EMA and not state:
            self.move(0.0)
            return
        super().load_state(state)
        self._cast()
        for frozen in self._frozen:  # saved with the teacher alone: the student takes them from it
            write_weights(frozen)


def _low_precision_copy(network: Network, dtype: torch.dtype) -> tuple[Network, tuple[list[Tensor], list[Tensor]]]:
    """A network whose matrices have `dtype` and whose other tensors are those of `network`; (copies, originals).
    Autocast casts these matrices and no others, so the results are the same."""
    shared = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    running = copy.deepcopy(network, shared)
    copies, originals = [], []
    for mine in running.modules():
        if isinstance(mine, RotaryAttention):
            for part, original in mine.keep_bias(dtype):
                copies.append(part)
                originals.append(original)
        for name, parameter in list(mine.named_parameters(recurse=False)):
            if is_cast(mine):
                copies.append(torch.empty_like(parameter.data, dtype=dtype))
                originals.append(parameter.data)
                setattr(mine, name, nn.Parameter(copies[-1], requires_grad=False))
    return running, (copies, originals)


class _FlatUpdater:
    """Moves the teacher towards the masters: each rank its shards, then one collective gathers all shards in place.
    Layer-wise learning rates make two parameter groups per block, each a flat buffer: 58 in a ViT-L."""

    def __init__(self, masters: Sequence[FlatMasters], parameters: dict[str, Tensor], device: torch.device) -> None:
        self._masters, self._group = masters, masters[0].process_group
        assert all(m.process_group is self._group for m in masters)
        self._whole = [torch.zeros(m.numel, device=device) for m in masters]
        for flat, part in zip(self._whole, masters, strict=True):
            for name, offset in part.layout:
                parameter = parameters[name]
                view = flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
                view.copy_(parameter.data)
                parameter.data = view
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._shards = [flat.chunk(ranks)[rank] for flat in self._whole]

    def update(self, weight: float) -> None:
        masters = [m.shard().to(self._whole[0].device, non_blocking=True) for m in self._masters]
        torch._foreach_lerp_(self._shards, masters, weight)
        distributed.gather_in_place(self._whole, self._shards, self._group)


class _PartitionedUpdater:
    """Gathers the masters chunk by chunk, then updates whole parameters."""

    def __init__(self, masters: PartitionedMasters, parameters: dict[str, Tensor], device: torch.device) -> None:
        self._masters, self._device = masters, device
        self._world = dist.get_world_size(masters.process_group)
        self._chunks: list[list[tuple[Tensor, int, int]]] = [[]]
        filled = 0
        for name, offset, piece in masters.layout:
            if filled and (filled + piece) * self._world > _CHUNK_ELEMENTS:
                self._chunks.append([])
                filled = 0
            self._chunks[-1].append((parameters[name].data, offset, piece))
            filled += piece

    def update(self, weight: float) -> None:
        shard = self._masters.shard()
        for chunk in self._chunks:
            start, (_, last, piece) = chunk[0][1], chunk[-1]
            mine = shard[start : last + piece].to(self._device)
            gathered = mine.new_empty(self._world * mine.numel())
            dist.all_gather_into_tensor(gathered, mine, group=self._masters.process_group)
            rows = gathered.view(self._world, -1)
            teacher = [tensor.view(-1) for tensor, _, _ in chunk]
            masters = [
                rows[:, offset - start : offset - start + piece].reshape(-1)[: tensor.numel()]
                for tensor, offset, piece in chunk
            ]
            torch._foreach_lerp_(teacher, masters, weight)


def build_teacher(spec: TeacherSpec, parts: TeacherParts) -> EmaTeacher:
    recipe, config, objective = parts.recipe, parts.config, parts.objective
    network = build_meta(recipe, config.performance, objective.queries, objective.teacher_features(spec.name))
    network = network.to_empty(device=device())
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.zero_()  # the student's values replace them
    weights = sum(p.numel() for p in network.parameters())
    copies = config.keeps_teacher_copy(device().type == "cuda", weights)
    keep_copy = copies and bool(teacher_sizes(recipe.groups, spec.name))
    dtype, compiled = DTYPES[config.precision], config.performance.compile
    options = TeacherOptions(dtype, keep_copy, compiled, recipe.batch_norm, spec.name)
    return EmaTeacher(network, parts.engine.masters(), options, parts.engine.buffers)

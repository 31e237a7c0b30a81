"""Access to an engine's FP32 master weights, which each of DeepSpeed's optimizers stores in a layout of its own, and
the placing of a new student's weights. Of a partitioned network, a rank never holds more than its own part and the
module that is being placed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dino_ds.config.ds_schema import DsConfig
from dino_ds.engine.process import DTYPES, device

Names = Mapping[int, str]
"""Names of parameters, by their ids."""


@dataclass(frozen=True)
class WholeMasters:
    """Every rank holds every element: (name, FP32 tensor of the parameter's shape)."""

    parameters: list[tuple[str, Tensor]]


@dataclass(frozen=True)
class FlatMasters:
    """ZeRO 1 and 2: the parameters lie in one flat buffer of `numel` elements, cut into equal shards, one per rank.

    layout: (name, offset in the flat buffer); shard(): this rank's FP32 shard, on any device.
    """

    numel: int
    layout: list[tuple[str, int]]
    shard: Callable[[], Tensor]
    process_group: Any


@dataclass(frozen=True)
class PartitionedMasters:
    """ZeRO 3: every parameter is cut into one piece per rank; a rank's pieces are concatenated in its shard.

    layout: (name, offset in the shard, elements of a piece); the last pieces of a parameter may hold padding.
    """

    layout: list[tuple[str, int, int]]
    shard: Callable[[], Tensor]
    process_group: Any


@dataclass(frozen=True)
class FrozenWeights:
    """Student weights that `optimizer` never trains; the attribute `fp32_value` of each is an EMA teacher's tensor."""

    parameters: list[tuple[str, Any]]
    optimizer: Any


Masters = WholeMasters | FlatMasters | PartitionedMasters | FrozenWeights


def masters_of(optimizer: Any, network: nn.Module, names: Names) -> list[Masters]:
    """The masters of `optimizer`, which deepspeed.initialize made for `network`; one entry per group or sub-group."""
    if isinstance(optimizer, torch.optim.Optimizer):  # stage 0: the weights themselves
        return [WholeMasters([(name, p) for name, p in network.named_parameters() if p.requires_grad])]
    if hasattr(optimizer, "bit16_groups") and optimizer.dtype == torch.float32:  # every rank has the masters' values
        return [WholeMasters([(names[id(p)], p) for p in group]) for group in optimizer.bit16_groups]
    return [*sharded_masters_of(optimizer, names)]


def sharded_masters_of(optimizer: Any, names: Names) -> list[FlatMasters | PartitionedMasters]:
    """The layout of each of `master_shards`: which parameters it holds, and where."""
    build = _zero3 if hasattr(optimizer, "fp16_groups") else _zero12 if hasattr(optimizer, "bit16_groups") else _bf16
    return [build(optimizer, i, names) for i in range(len(master_shards(optimizer)))]


def _zero3(optimizer: Any, i: int, names: Names) -> PartitionedMasters:
    layout, offset = [], 0
    for parameter in optimizer.fp16_groups[i]:
        piece = parameter.partition_numel()
        layout.append((names[id(parameter)], offset, piece))
        offset += piece
    group = optimizer._get_sub_group_process_group(i)
    return PartitionedMasters(layout, lambda: optimizer.fp32_partitioned_groups_flat[i].detach(), group)


def _zero12(optimizer: Any, i: int, names: Names) -> FlatMasters:
    # round_robin_gradients reorders a group; these two describe the order in the buffer either way.
    order = zip(optimizer.round_robin_bit16_groups[i], optimizer.round_robin_bit16_offsets[i], strict=True)
    return FlatMasters(
        optimizer.bit16_groups_flat[i].numel(),
        [(names[id(p)], offset) for p, offset in order],
        lambda: optimizer.single_partition_of_fp32_groups[i].detach(),
        optimizer.real_dp_process_group[i],
    )


def _bf16(optimizer: Any, i: int, names: Names) -> FlatMasters:
    layout, offset = [], 0
    for parameter in optimizer.bf16_groups[i]:
        layout.append((names[id(parameter)], offset))
        offset += parameter.numel()
    return FlatMasters(
        optimizer.bf16_groups_flat[i].numel(),
        layout,
        lambda: optimizer.fp32_groups_flat_partition[i].detach(),
        optimizer.real_dp_process_group[i],
    )


def master_shards(optimizer: Any) -> list[Tensor]:
    """This rank's shards of the masters, as the inner optimizer sees them; for stages 1 to 3."""
    for attribute in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, attribute):
            shards: list[Tensor] = getattr(optimizer, attribute)
            return shards
    raise AssertionError(type(optimizer).__name__)


def shard_groups(optimizer: Any) -> list[dict[str, Any]]:
    """The parameter group of each of `master_shards`."""
    groups = optimizer.optimizer.param_groups
    owners = getattr(optimizer, "sub_group_to_group_id", None) or {i: i for i in range(len(groups))}
    return [groups[owners[i]] for i in range(len(owners))]


def refresh_weights(optimizer: Any) -> None:
    """Set the weights of the forward pass to the masters (at stage 0 these are the same tensors); a collective."""
    if hasattr(optimizer, "fp16_groups"):
        optimizer.checkpoint_event_prologue()  # releases parameters that are still gathered
        for i in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(i)
        optimizer.checkpoint_event_epilogue()  # gathers persistent parameters again
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()


@torch.no_grad()
def write_weights(frozen: FrozenWeights) -> None:
    """Set the weights to their FP32 values, which all ranks have; a collective under ZeRO 3."""
    optimizer: Any = frozen.optimizer
    if not hasattr(optimizer, "fp16_groups"):
        for _, parameter in frozen.parameters:
            parameter.copy_(parameter.fp32_value)
        return
    import deepspeed

    optimizer.checkpoint_event_prologue()
    for _, parameter in frozen.parameters:
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(parameter.fp32_value)
    optimizer.checkpoint_event_epilogue()


class Placement:
    """Called with each module of a new student as soon as its own weights (FP32, CPU, equal on all ranks) are drawn.

    Afterwards the weights are on this process's device in the engine's precision, at stage 3 partitioned over all
    ranks; the module's buffers are on the device, in their own dtype.
    """

    def __init__(self, config: DsConfig) -> None:
        self._device, self._dtype = device(), DTYPES[config.precision]
        self._partition = _Partitioner(config.raw) if config.stage == 3 else None

    def __call__(self, module: nn.Module) -> None:
        parameters = list(module.parameters(recurse=False))
        for parameter in parameters:
            parameter.data = parameter.data.to(self._device, self._dtype)
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(self._device))
        if self._partition is not None and parameters:
            self._partition(parameters)


class _Partitioner:
    """Cuts parameters into ZeRO 3's partitions by the ds config `raw`."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw = raw
        self._partitioned: Any = None  # the first parameter that was cut

    def __call__(self, parameters: list[nn.Parameter]) -> None:
        if self._partitioned is None:
            import deepspeed

            deepspeed.zero.Init(module=nn.ParameterList(parameters), config_dict_or_path=self._raw)
            self._partitioned = parameters[0]
        else:
            # The way DeepSpeed itself adds parameters to partitioned ones: each Init would make new process groups.
            self._partitioned.convert_to_zero_parameters(param_list=parameters)

"""Access to an engine's FP32 master weights, which each of DeepSpeed's optimizers stores in a layout of its own, and
the placing of a new student's weights. Of a partitioned network, a rank holds at most its own part and the module being
placed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from dino_ds.config.ds_schema import DsConfig
from dino_ds.engine.process import DTYPES, device

Names = Mapping[int, str]  # names of parameters, by their ids


@dataclass(frozen=True)
class WholeMasters:
    """Every rank holds every element: (name, FP32 tensor of the parameter's shape)."""

    parameters: list[tuple[str, Tensor]]


@dataclass(frozen=True)
class FlatMasters:
    """ZeRO 1 and 2: the parameters lie in one flat buffer of `numel` elements, cut into equal shards, one per rank.
    layout: (name, offset in the flat buffer); shard(): this rank's FP32 shard, on any device."""

    numel: int
    layout: list[tuple[str, int]]
    shard: Callable[[], Tensor]
    process_group: Any


@dataclass(frozen=True)
class PartitionedMasters:
    """ZeRO 3: every parameter is cut into one piece per rank; a rank's pieces are concatenated in its shard. layout:
    (name, offset in the shard, elements of a piece); the last pieces of a parameter may hold padding."""

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
    return [masters for masters, _, _ in shards_of(optimizer, names)]


def shards_of(optimizer: Any, names: Names) -> list[tuple[FlatMasters | PartitionedMasters, Tensor, dict[str, Any]]]:
    """For each of `master_shards`: which parameters it holds and where, the shard, and its parameter group."""
    shards = master_shards(optimizer)
    layouts = [_layout_of_shard(optimizer, i, names) for i in range(len(shards))]
    return list(zip(layouts, shards, shard_groups(optimizer), strict=True))


def _layout_of_shard(optimizer: Any, i: int, names: Names) -> FlatMasters | PartitionedMasters:
    def shard() -> Tensor:
        return master_shards(optimizer)[i].detach()

    if hasattr(optimizer, "fp16_groups"):  # ZeRO 3
        parameters = optimizer.fp16_groups[i]
        sizes = [parameter.partition_numel() for parameter in parameters]
        group_names = [names[id(parameter)] for parameter in parameters]
        layout = list(zip(group_names, accumulate([0, *sizes[:-1]]), sizes, strict=True))
        return PartitionedMasters(layout, shard, optimizer._get_sub_group_process_group(i))
    if hasattr(optimizer, "bit16_groups"):
        # round_robin_gradients reorders a group; these two describe the order in the buffer either way.
        parameters, offsets = optimizer.round_robin_bit16_groups[i], optimizer.round_robin_bit16_offsets[i]
        numel = optimizer.bit16_groups_flat[i].numel()
    else:  # DeepSpeed's BF16_Optimizer
        parameters, numel = optimizer.bf16_groups[i], optimizer.bf16_groups_flat[i].numel()
        offsets = accumulate([0, *(parameter.numel() for parameter in parameters[:-1])])
    order = [(names[id(parameter)], offset) for parameter, offset in zip(parameters, offsets, strict=True)]
    return FlatMasters(numel, order, shard, optimizer.real_dp_process_group[i])


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
    ranks; the module's buffers are on the device, in their own dtype."""

    def __init__(self, config: DsConfig) -> None:
        self._device, self._config = device(), config
        self._partitioned: Any = None  # the first parameter that was cut

    def __call__(self, module: nn.Module) -> None:
        parameters = list(module.parameters(recurse=False))
        for parameter in parameters:
            parameter.data = parameter.data.to(self._device, DTYPES[self._config.precision])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(self._device))
        if self._config.stage < 3 or not parameters:
            return
        if self._partitioned is None:
            import deepspeed

            deepspeed.zero.Init(module=nn.ParameterList(parameters), config_dict_or_path=self._config.raw)
            self._partitioned = parameters[0]
        else:
            # The way DeepSpeed itself adds parameters to partitioned ones: each Init would make new process groups.
            self._partitioned.convert_to_zero_parameters(param_list=parameters)

"""Where each of DeepSpeed's optimizers keeps its FP32 master weights: the engine's knowledge of their inner layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dino_ds.masters import FlatMasters, Masters, PartitionedMasters, WholeMasters

Names = Mapping[int, str]
"""id of a parameter -> its name"""


def masters_of(optimizer: Any, network: nn.Module, names: Names) -> list[Masters]:
    """Of `optimizer`, as deepspeed.initialize gives it for `network`; one entry a parameter group or sub-group."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return [_zero3(optimizer, i, names) for i in range(len(optimizer.fp16_groups))]
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return [_zero12(optimizer, i, names) for i in range(len(optimizer.bit16_groups))]
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        return [_bf16(optimizer, i, names) for i in range(len(optimizer.bf16_groups))]
    assert isinstance(optimizer, torch.optim.Optimizer), type(optimizer).__name__  # stage 0: the weights themselves
    return [WholeMasters(list(network.named_parameters()))]


def _zero3(optimizer: Any, i: int, names: Names) -> PartitionedMasters:
    layout, offset = [], 0
    for parameter in optimizer.fp16_groups[i]:
        piece = parameter.partition_numel()
        layout.append((names[id(parameter)], offset, piece))
        offset += piece
    group = optimizer._get_sub_group_process_group(i)
    return PartitionedMasters(layout, lambda: optimizer.fp32_partitioned_groups_flat[i].detach(), group)


def _zero12(optimizer: Any, i: int, names: Names) -> Masters:
    if optimizer.bit16_groups_flat[i].dtype == torch.float32:
        return WholeMasters([(names[id(p)], p) for p in optimizer.bit16_groups[i]])
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

"""Computes the gradient's norm over all ranks, and clips each part of the network by its own norm, unlike DeepSpeed.

Source of clipping by part: facebookresearch/dinov2 clips backbone, DINO head and iBOT head each by its own norm.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dino_ds.config.ds_values import DsConfig, offloads_optimizer
from dino_ds.engine.masters import master_shards, shard_groups
from dino_ds.errors import ConfigError

_EPS = 1e-6  # added to the norm, as in DeepSpeed and torch


def check_clip_by_part(config: DsConfig) -> None:
    """Raises ConfigError if optimizer.clip_by part can't work with this ds config."""
    if not config.clipping:
        raise ConfigError(
            "optimizer.clip_by part clips nothing with gradient_clipping 0: set --ds.gradient_clipping to a norm "
            "(DINOv2: 3.0), or optimizer.clip_by network"
        )
    if offloads_optimizer(config.raw["zero_optimization"]):
        raise ConfigError(
            "optimizer.clip_by part does not go with zero_optimization.offload_optimizer, where DeepSpeed clips by the "
            "norm of the whole network: remove the one, or set optimizer.clip_by network"
        )


def parts_of(optimizer: torch.optim.Optimizer, network: nn.Module) -> list[list[nn.Parameter]]:
    """The trained parameters of `network`, grouped by the part with which they are clipped, in order; at stage 0."""
    part_of = {id(p): group["part"] for group in optimizer.param_groups for p in group["params"]}
    parts: dict[str, list[nn.Parameter]] = {}
    for parameter in filter(lambda p: p.requires_grad, network.parameters()):
        parts.setdefault(part_of[id(parameter)], []).append(parameter)
    return list(parts.values())


def norm_of_parts(parts: list[list[nn.Parameter]]) -> tuple[Tensor, list[Tensor]]:
    """The norm of all gradients and the norms of the parts, scalars on the device, at stage 0."""
    norms = [torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in parts]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)), norms


def norm_in_one_pass(optimizer: Any, clip_parts: float = 0.0) -> None:
    """Make ZeRO 1 to 3 compute the gradient's global norm over all groups at once, with one all-reduce.

    DeepSpeed launches two kernels per parameter and copies a constant to the device per group. The norm is the same,
    summed in FP64, infinite if a gradient is not finite. An offloaded optimizer keeps DeepSpeed's code, on the host.
    clip_parts: if above 0, each part's norm is clipped to it here, and DeepSpeed's gradient_clipping must be 0.
    """
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        return
    if hasattr(optimizer, "averaged_gradients"):
        gradient = _ShardedGradient(optimizer, clip_parts)
        if hasattr(optimizer, "scaled_global_norm"):
            optimizer.scaled_global_norm = lambda norm_type=2: gradient.norm()
            optimizer.unscale_and_clip_grads = _FactorOnce(optimizer)
        else:  # ZeRO 3
            optimizer._get_norm_groups = lambda: [gradient.norm()]
        if clip_parts:
            optimizer.unscale_and_clip_grads = gradient.unscale_and_clip
    elif clip_parts and hasattr(optimizer, "get_grads_for_norm"):
        optimizer.get_grads_for_norm = lambda for_clipping=False: ([_clip_bf16(optimizer, clip_parts)], {})


class _ShardedGradient:
    """The gradients that this rank owns under ZeRO 1 to 3, grouped by the part with which they are clipped.

    limit: the largest norm of a part, or 0 where DeepSpeed clips.
    """

    def __init__(self, optimizer: Any, limit: float) -> None:
        self._optimizer, self._limit = optimizer, limit
        zero3 = hasattr(optimizer, "_get_sub_group_process_group")
        self._process_group = optimizer._get_sub_group_process_group(0) if zero3 else optimizer.dp_process_group
        parts = [group["part"] for group in shard_groups(optimizer)]
        self._parts = list(dict.fromkeys(parts))
        self._part_of = [self._parts.index(part) for part in parts]

    def norm(self) -> Tensor:
        """The norm of all gradients times the loss scale: a scalar on the device, FP32, infinite if one is not finite.

        A collective.
        """
        owned: list[list[Tensor]] = [[] for _ in self._parts]
        for i, gradients in self._optimizer.averaged_gradients.items():
            present = [g for g in gradients or () if g.numel() and not getattr(g, "_zero_padding", False)]
            owned[self._part_of[i]] += [gradient.detach() for gradient in present]
        parts = [_sum_of_squares(gradients, self._optimizer.device) for gradients in owned]
        squares = torch.stack(parts) if len(parts) > 1 else parts[0].view(1)
        dist.all_reduce(squares, group=self._process_group)
        if self._limit:
            # Now, not when the factors are used: DeepSpeed changes the loss scale in between.
            self._factors = _clip_factors(squares, self._limit, self._optimizer.loss_scale) / self._optimizer.loss_scale
        norm = (squares.sum() if len(parts) > 1 else squares[0]).sqrt().float()
        return norm.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def unscale_and_clip(self, shard: int | list[Tensor], total_norm: Tensor) -> None:
        """Unscale and clip one master shard, given by index (ZeRO 3) or gradient; DeepSpeed calls it after `norm`."""
        shards = master_shards(self._optimizer)
        i = shard if isinstance(shard, int) else next(i for i, m in enumerate(shards) if m.grad is shard[0])
        gradient = shards[i].grad
        assert gradient is not None
        gradient.mul_(self._factors[self._part_of[i]])


class _FactorOnce:
    """Replaces `unscale_and_clip_grads` of ZeRO 1 and 2, which computes the same factor again for each group."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._unscale = optimizer, optimizer.unscale_and_clip_grads
        self._norm: Tensor | None = None

    def __call__(self, gradients: list[Tensor], norm: Tensor) -> None:
        if not self._optimizer.clip_grad and self._optimizer.loss_scale == 1.0:
            return
        if norm is not self._norm:
            self._norm, self._factor = norm, torch.ones_like(norm)
            self._unscale([self._factor], norm)
        for gradient in gradients:
            gradient.mul_(self._factor)


def _clip_bf16(optimizer: Any, limit: float) -> Tensor:
    """Clip the gradients of DeepSpeed's BF16_Optimizer by part; returns their norm before clipping.

    The gradients are FP32, whole on every rank, and have no loss scale.
    """
    parts: dict[str, list[Tensor]] = {}
    for i, group in enumerate(optimizer.optimizer.param_groups):
        there = zip(optimizer.fp32_groups_gradients[i], optimizer.fp32_groups_has_gradients[i], strict=True)
        parts.setdefault(group["part"], []).extend(gradient for gradient, has in there if has)
    gradients = [part for part in parts.values() if part]
    squares = torch.stack([_sum_of_squares(part, part[0].device) for part in gradients])
    for part, factor in zip(gradients, _clip_factors(squares, limit, 1.0), strict=True):
        torch._foreach_mul_(part, factor)
    return squares.sum().sqrt().float()


def _sum_of_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The sum of all squared elements, a scalar in FP64."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square().sum()


def _clip_factors(squares: Tensor, limit: float, scale: float) -> Tensor:
    """FP32 clipping factors, at most 1, of parts whose gradients times `scale` have these squared norms (parts,)."""
    return (limit / (squares.sqrt() / scale + _EPS)).clamp(max=1.0).float()

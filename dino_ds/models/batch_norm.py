"""BatchNorm on any device with statistics over all ranks, whose running averages count each batch once. torch's
SyncBatchNorm runs on GPUs only and waits for the device at every layer; only its kernels are used. Here statistics and
arithmetic are FP32 whatever the precision of the network, and the recomputation of activation checkpointing leaves the
running averages alone. Source: Ioffe and Szegedy 2015 (arXiv 1502.03167); statistics of ranks are combined as in Chan
et al. 1979."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dino_ds.engine import distributed
from dino_ds.errors import ConfigError

_AGAIN = [0]


@contextmanager
def again() -> Iterator[None]:
    """Context of a recomputed forward pass: running averages do not change."""
    _AGAIN[0] += 1
    try:
        yield
    finally:
        _AGAIN[0] -= 1


class BatchNorm(nn.modules.batchnorm._BatchNorm):
    """torch's BatchNorm for any number of dimensions; x (b, c, ...) -> the same shape and dtype. `synced`: statistics
    are over all ranks. Otherwise each rank normalizes by its own; running averages then differ between ranks until a
    step is applied, which averages them over the ranks. `frozen`: it normalizes by its running averages in training
    too, and they never change."""

    synced = False
    frozen = False

    def forward(self, x: Tensor) -> Tensor:
        assert self.momentum is not None
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        mean, var = self.running_mean, self.running_var
        if mean is not None and (self.frozen or not self.training):
            return F.batch_norm(x, mean, var, weight, bias, False, 0.0, self.eps)
        ranks = distributed.world_size() if self.synced and self.training else 1  # a rank may evaluate alone
        if x.numel() == x.shape[1] and ranks == 1:
            why = "BatchNorm has one value a channel to take statistics of: give more images to a micro-batch"
            raise ConfigError(f"{why}, more or larger local crops, or take a network with LayerNorm or GroupNorm")
        # A recomputed pass also updates the averages, by 0: autograd and the compiler must see the same operations.
        momentum = 0.0 if _AGAIN[0] else self.momentum
        if momentum and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if ranks == 1:
            return F.batch_norm(x, mean, var, weight, bias, True, momentum, self.eps)
        out, batch_mean, batch_var = (_SyncedOnGpu if x.is_cuda else _Synced).apply(x, weight, bias, self.eps)
        if mean is not None and var is not None:
            mean.lerp_(batch_mean, momentum)
            var.lerp_(batch_var, momentum)
        return out


class BatchNormAct(BatchNorm):
    """timm's BatchNormAct2d: BatchNorm followed by an activation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))  # type: ignore[operator]


class _Synced(torch.autograd.Function):
    """x (b, c, ...) normalized by the statistics of all ranks, which must have batches of one shape. Also returns the
    mean (c,) and the unbiased variance (c,)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dims = [0, *range(2, x.ndim)]
        var, mean = torch.var_mean(x.float(), dims, correction=0)
        means, variances = _of_all_ranks(mean, var)
        mean = means.mean(0)
        var = (variances + (means - mean).square()).mean(0)
        scale = (var + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.total = x.numel() // x.shape[1] * distributed.world_size()
        unbiased = var * (ctx.total / max(ctx.total - 1, 1))
        ctx.mark_non_differentiable(mean, unbiased)
        factor = scale if weight is None else scale * weight
        shift = -mean * factor if bias is None else bias - mean * factor
        shape = _channels(x)
        out = torch.addcmul(shift.view(shape), x.float(), factor.view(shape)).to(x.dtype)
        return out, mean, unbiased

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight, mean, scale = ctx.saved_tensors
        dims, shape = [0, *range(2, x.ndim)], _channels(x)
        grad = grad.float()
        centered = x.float() - mean.view(shape)
        local_sums = torch.stack((grad.sum(dims), (grad * centered).sum(dims) * scale))
        of_bias, of_weight = local_sums.unbind(0)
        sums = local_sums.clone()
        dist.all_reduce(sums)
        shift, slope = sums.div_(ctx.total).unbind(0)
        factor = scale if weight is None else scale * weight
        grad_x = grad - shift.view(shape) - centered * (slope * scale).view(shape)
        grad_x = (grad_x * factor.view(shape)).to(x.dtype)
        if weight is None:
            return grad_x, None, None, None
        return grad_x, of_weight, of_bias, None


class _SyncedOnGpu(torch.autograd.Function):
    """`_Synced` with the kernels of torch's SyncBatchNorm, without its mask of ranks that have no images: to read the
    mask, the host would wait for the device. Not verified on a GPU."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = _dense(x)
        means, scales = _of_all_ranks(*torch.batch_norm_stats(x, eps))
        counts = means.new_full((len(means),), x.numel() // x.shape[1])
        batch_mean, batch_var = torch.zeros_like(means[0]), torch.zeros_like(means[0])  # averages of momentum 1
        mean, scale = torch.batch_norm_gather_stats_with_counts(
            x, means, scales, batch_mean, batch_var, 1.0, eps, counts
        )
        ctx.save_for_backward(x, weight, mean, scale, counts.int())
        ctx.mark_non_differentiable(batch_mean, batch_var)
        return torch.batch_norm_elemt(x, weight, bias, mean, scale, eps), batch_mean, batch_var

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight, mean, scale, counts = ctx.saved_tensors
        grad, affine = _dense(grad), weight is not None
        shift, slope, of_weight, of_bias = torch.batch_norm_backward_reduce(
            grad, x, mean, scale, weight, True, affine, affine
        )
        sums = torch.stack((shift, slope))
        dist.all_reduce(sums)
        grad_x = torch.batch_norm_backward_elemt(grad, x, mean, scale, weight, sums[0], sums[1], counts)
        return (grad_x, of_weight, of_bias, None) if affine else (grad_x, None, None, None)


def _of_all_ranks(first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """Gather two tensors (c,) from all ranks -> (ranks, c) each."""
    local = torch.cat((first, second))
    gathered = local.new_empty(distributed.world_size() * len(local))
    dist.all_gather_into_tensor(gathered, local)
    return gathered.view(-1, 2, len(first)).unbind(1)


def _dense(x: Tensor) -> Tensor:
    return x if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()


def _channels(x: Tensor) -> list[int]:
    return [1, -1, *[1] * (x.ndim - 2)]


def use_own_batch_norm(network: nn.Module, synced: bool) -> None:
    """Turn each BatchNorm of torch and timm in `network` into ours, in place: names and tensors stay. Raises
    ConfigError for BatchNorm without momentum, and for other classes, whose arithmetic is not known."""
    ours: dict[type, type[BatchNorm]] = dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), BatchNorm)
    if layers := sys.modules.get("timm.layers"):  # without importing timm, which takes seconds
        ours[layers.BatchNormAct2d] = BatchNormAct
    for name, module in network.named_modules():
        if isinstance(module, BatchNorm):
            continue
        if replacement := ours.get(type(module)):
            module.__class__ = replacement
            module.synced = synced
            if module.momentum is None:
                raise ConfigError(f"{name} averages its statistics over all batches: give its momentum a number")
        elif isinstance(module, nn.modules.batchnorm._NormBase) and (
            module.running_mean is not None or isinstance(module, nn.modules.batchnorm._BatchNorm)
        ):
            why = f"{name} is of class {type(module).__name__}, not torch's BatchNorm"
            more = "its statistics can't be kept right over ranks and recomputation"
            raise ConfigError(f"{why}: {more}; take torch's, GroupNorm or LayerNorm")


def batch_norms(network: nn.Module) -> list[BatchNorm]:
    return [module for module in network.modules() if isinstance(module, BatchNorm)]


def unsynced_statistics(network: nn.Module) -> list[Tensor]:
    """FP32 running averages that each rank computes over its own batch alone; none with a single rank."""
    if distributed.world_size() == 1:
        return []
    unsynced = [n for n in batch_norms(network) if not (n.synced or n.frozen) and n.running_mean is not None]
    return [tensor for norm in unsynced for tensor in (norm.running_mean, norm.running_var) if tensor is not None]

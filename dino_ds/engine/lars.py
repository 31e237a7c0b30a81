"""LARS: SGD with momentum, with each layer's gradient scaled to a fraction of the norm of the layer's weights.

Source: You et al. 2017 (arXiv 1708.03888) as facebookresearch/dino `utils.LARS`: one-dimensional tensors have neither
weight decay nor a trust ratio, and the learning rate multiplies the momentum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Layer(NamedTuple):
    """Elements [offset, offset + numel) of a shard belong to layer number `layer` of the layers with a trust ratio."""

    layer: int
    offset: int
    numel: int


class Lars(torch.optim.Optimizer):
    """LARS with one `momentum` and `trust` for all groups; lr and weight_decay come with each step.

    A tensor is a whole parameter unless `lay_out` has declared its contents. A step overwrites the gradients.
    """

    def __init__(self, params: Iterable[Any], momentum: float, trust: float) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum, "trust": trust})
        self._shards: dict[Tensor, tuple[list[Layer], Tensor, int, Any]] = {}

    def lay_out(self, tensor: Tensor, layers: list[Layer], total: int, process_group: Any) -> None:
        """Declare that `tensor` holds this rank's `layers` of one group, whose `total` layers with a trust ratio are
        split among ranks.

        From now on all ranks must call `step` together, with equal groups.
        """
        numbers = torch.tensor([part.layer for part in layers], dtype=torch.long, device=tensor.device)
        self._shards[tensor] = layers, numbers, total, process_group

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make a step without reading from the device, with one all-reduce for each tensor that was laid out."""
        assert closure is None
        for group in self.param_groups:
            tensors = [p for p in group["params"] if p.grad is not None]
            if not tensors:
                continue
            gradients = [p.grad for p in tensors]
            self._adapt(tensors, gradients, group)
            for p in tensors:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            momenta = [self.state[p]["momentum_buffer"] for p in tensors]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, gradients)
            torch._foreach_add_(tensors, momenta, alpha=-group["lr"])

    def _adapt(self, tensors: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        """Apply weight decay and the trust ratio to the gradients of the layers that have them."""
        laid_out = self._shards.get(tensors[0])
        if laid_out is None:
            weights, steps = ([t for t in ts if t.ndim != 1] for ts in (tensors, gradients))
        else:
            assert len(tensors) == 1
            weights, steps = ([t.narrow(0, at, n) for _, at, n in laid_out[0]] for t in (*tensors, *gradients))
        if weights:
            torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
            norms = torch.stack([*torch._foreach_norm(weights), *torch._foreach_norm(steps)])
            squares = norms.double().square().view(2, -1)  # in FP32 the squares of small gradients would vanish
        else:
            squares = torch.zeros(2, 0, dtype=torch.float64, device=tensors[0].device)
        if laid_out is not None and laid_out[2]:
            _, numbers, total, process_group = laid_out
            every = squares.new_zeros(2, total).index_copy_(1, numbers, squares)
            dist.all_reduce(every, group=process_group)
            squares = every.index_select(1, numbers)
        if weights:
            weight, step = squares.sqrt()
            ratios = torch.where((weight > 0) & (step > 0), group["trust"] * weight / step, 1.0).float()
            # Multiplied by tensors, not numbers: the ratios are on the device and must stay there.
            torch._foreach_mul_(steps, list(ratios.unbind()))
